"""A stage in a process of its own, and SIGTERM."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gmeta.loop import stages


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    stages._ending.clear()
    stages._dismiss()


def test_a_stage_that_sigterm_comes_before_is_ended_at_once(tmp_path: Path) -> None:
    stages.end_stage()
    assert stages.run_stage(["--version"], tmp_path / "log") == -signal.SIGTERM
