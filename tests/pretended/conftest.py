"""The pretended GPU as a fixture; its C++ part is built once for all workers of a test run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.pretended.process import built_guard, call_pretended, missing_for_guard


@pytest.fixture(scope="session")
def pretended(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Calls a function of a module in a process with a pretended GPU: see call_pretended."""
    if missing := missing_for_guard():
        pytest.skip(f"a pretended GPU needs {missing}")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    return partial(call_pretended, built_guard(shared / "pretended-guard"))
