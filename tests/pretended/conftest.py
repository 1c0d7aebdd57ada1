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
RUNS = {
    "as it comes": [],
    "clipped": ["outer.clip_norm=0.1", "outer.accumulate_steps=2", "model.name=dlrm"],
    "bf16": ["run.precision=bf16", "run.checkpoint_in_background=false"],
    "resumed": ["run.max_steps=3", "model.name=cbml", "model.admission=[2,2]"],
    "adam": [
        "outer.sparse_optimizer=partial_rowwise_adam",
        "sharding.wire_dtype=bfloat16",
        "model.name=deepfm",
    ],
    "host": ["sharding.placement=host", "outer.clip_norm=0.1"],
    "file": ["sharding.placement=file", "run.max_steps=3", "outer.sparse_optimizer=adam"],
    "torchrec": ["sharding.exchange=torchrec"],
    "graphs": ["run.cuda_graphs=on"],
    "graphs, processes": ["run.cuda_graphs=on", "data.processes=1"],
    "graphs of parts": [
        "run.cuda_graphs=on", "outer.accumulate_steps=2", "outer.clip_norm=0.1", "model.name=dcnv2",
        "model.admission=[2,0]",
    ],
    "labels": ["model.name=ple", "labels.loss.stars=mse", "data.tasks_per_step=8"],
    "labels, mixed": [
        "model.name=mmoe", "labels.entire_space.buy=click", "labels.loss.stars=mse",
        "data.tasks_per_step=8",
    ],
}  # fmt: skip
# The second step of an epoch has one task: rank 1 has none. The second epoch's are graphs.
UNEVEN = {
    "uneven": [
        "data.tasks_per_step=199", "run.epochs=2", "run.valid_every_steps=0", "run.cuda_graphs=on",
    ]
}  # fmt: skip
MUTANT = "collectives swapped on a rank"
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
def shown(
    pretended_once: Callable[..., Any], click_logs: Path, labelled: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:  # fmt: skip
    """What steps of the learner and served models show, and whole runs: half a minute."""
    cases = [case.name for case in all_cases()]
    steps = [cases.index(one) for one in FAKE], list(SHOWN_BY), cases.index("melu maml")
    folder = str(tmp_path_factory.mktemp("runs"))
    of_labels = [f"data.path={labelled / 'data'}"]
    keys = {name: one + of_labels * name.startswith("labels") for name, one in RUNS.items()}
    runs = folder, str(click_logs), keys, UNEVEN, MUTANT
    return dict(pretended_once("tests.pretended.at_once", "everything", steps, runs))


@pytest.fixture(scope="session")
def found(shown: dict[str, Any]) -> Reading:
    """What steps of the learner and served models show."""
    return dict(shown["steps"])


@pytest.fixture(scope="session")
def runs(shown: dict[str, Any]) -> dict[str, Any]:
    """Each run on the CPU and the pretended GPU, one rank; `ranks` UNEVEN on two; the mutant."""
    return dict(shown["runs"])
