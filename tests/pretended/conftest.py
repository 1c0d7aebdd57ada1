"""The pretended GPU as a fixture; its C++ part is built once for all workers of a test run."""

import fcntl
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.pretended.learner_steps import all_cases
from tests.pretended.process import built_guard, call_pretended, missing_for_guard

# Steps that are taken on tensors without values, too.
FAKE = ["melu maml", "melu metasgd everything", "dlrm fomaml", "dlrm maml everything", "cbml maml"]
SHOWN_BY = {  # a mutant, and which reading shows it
    "a value read in the step": "waits",
    "a copy more": "copies_inside",
    "labels left on the host": "error",
}
Reading = dict[str, Any]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this test run, the same for all its workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "pretended"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def pretended(shared: Path) -> Callable[..., Any]:
    """Calls a function of a module in a process with a pretended GPU: see call_pretended."""
    if missing := missing_for_guard():
        pytest.skip(f"a pretended GPU needs {missing}")
    return partial(call_pretended, built_guard(shared))


@pytest.fixture(scope="session")
def pretended_once(pretended: Callable[..., Any], shared: Path) -> Callable[..., Any]:
    """The same, once for all workers that ask for what a function returns."""

    def call(module: str, function: str, *arguments: Any) -> Any:
        told = shared / f"{module}.{function}.json"
        with told.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not told.exists():
                told.write_text(json.dumps(pretended(module, function, *arguments)))
        return json.loads(told.read_text())

    return call


@pytest.fixture(scope="session")
def found(pretended_once: Callable[..., Any]) -> Reading:
    """What steps of the learner and served models show, in one process and half a minute."""
    cases = [case.name for case in all_cases()]
    arguments = [cases.index(one) for one in FAKE], list(SHOWN_BY), cases.index("melu maml")
    return dict(pretended_once("tests.pretended.learner_steps", "everything", *arguments))
