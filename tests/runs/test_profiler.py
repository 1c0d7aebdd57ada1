"""A profile of some steps: which are recorded, what is written, what the user is told."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gmeta.runs.step_profiler import SKIPPED_STEPS, SUMMARY_FILE, TRACE_FILE, StepProfiler


def of_rank(rank: int) -> Any:
    return SimpleNamespace(rank=rank, device=torch.device("cpu"))


def run_steps(profiler: StepProfiler, num_steps: int) -> None:
    with profiler:
        for step in range(num_steps):
            with torch.profiler.record_function(f"training step {step}"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()
        profiler.end()


def steps_of(trace: Path) -> set[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    return {one["name"] for one in events if one["name"].startswith("training step")}


def test_the_steps_after_the_first_few_are_recorded(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path / "profile", 2, of_rank(0))
    run_steps(profiler, SKIPPED_STEPS + 4)
    recorded = {f"training step {SKIPPED_STEPS + i}" for i in range(2)}
    assert steps_of(tmp_path / "profile" / TRACE_FILE) == recorded
    summary = (tmp_path / "profile" / SUMMARY_FILE).read_text()
    assert summary.startswith(f"torch {torch.__version__}")
    assert "aten::mm" in summary
    expected = [f"profile: {tmp_path / 'profile'}  ({SUMMARY_FILE}, {TRACE_FILE})"]
    assert profiler.summary_lines() == expected


def test_a_run_that_ends_early_keeps_the_steps_that_it_had(tmp_path: Path) -> None:
    run_steps(StepProfiler(tmp_path, 10, of_rank(0)), SKIPPED_STEPS + 1)
    assert steps_of(tmp_path / TRACE_FILE) == {f"training step {SKIPPED_STEPS}"}


def test_a_run_too_short_for_a_profile_says_so(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path / "profile", 2, of_rank(0))
    run_steps(profiler, 1)
    assert not (tmp_path / "profile").exists()
    (line,) = profiler.summary_lines()
    assert line.startswith("no profile: the run ended within the first")


@pytest.mark.parametrize(("num_steps", "rank"), [(0, 0), (2, 1)])
def test_nothing_is_recorded_where_nobody_asked(tmp_path: Path, num_steps: int, rank: int) -> None:
    profiler = StepProfiler(tmp_path / "profile", num_steps, of_rank(rank))
    run_steps(profiler, SKIPPED_STEPS + 3)
    assert not (tmp_path / "profile").exists()
    assert profiler.summary_lines() == []


def test_a_step_that_fails_keeps_its_own_error(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path / "profile", 2, of_rank(0))
    with pytest.raises(ValueError, match="of the step"), profiler:
        raise ValueError("of the step")
    assert not (tmp_path / "profile").exists()
    profiler.end()  # the recorder is the whole process's: the next test wants it
