"""A run that hangs: who is missing, in a line, and where every rank stands, on one page."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gmeta.runs.hang_watch import HangWatch, _RankPlace, describe_hang, find_place
from tests.support.commands import SMALL_MODEL, environment, write_config
from tests.support.forked import Task, forked
from tests.support.waiting import PATIENCE_S, wait_until

HOSTS = [("a", 1), ("a", 2), ("b", 3), ("b", 4)]


@pytest.mark.parametrize(
    ("places", "missing", "waiting"),
    [
        (
            [_RankPlace(0, 7, "gmeta/x.py:5 in f", True), _RankPlace(1, 7, "own.py:3 in g", False)],
            "rank 1 (a, process 2) is at own.py:3 in g; rank 2 (b, process 3) says nothing: it is "
            "stopped, or its host is cut off; rank 3 (b, process 4) says nothing: it is stopped, "
            "or its host is cut off",
            "rank 0 at gmeta/x.py:5 in f",
        ),
        (
            [_RankPlace(rank, 7 - (rank == 2), "gmeta/x.py:5 in f", True) for rank in range(4)],
            "rank 2, a step behind",
            "rank 0, 1, 2, 3 at gmeta/x.py:5 in f",
        ),
    ],
)
def test_a_line_says_who_is_missing_and_where_the_others_wait(
    places: list[_RankPlace], missing: str, waiting: str
) -> None:
    said = describe_hang({place.rank: place for place in places}, HOSTS, 61.2)
    assert said == (
        f"no step for 61 s, behind step 7. Missing: {missing}. Waiting for others: {waiting}. The "
        "run ends; --resume goes on from its newest checkpoint"
    )


def test_a_thread_in_our_code_is_found_at_its_line() -> None:
    ended = threading.Event()
    waiting = threading.Thread(target=ended.wait)
    waiting.start()
    try:
        place, waits = find_place(waiting.ident)
    finally:
        ended.set()
    assert ("threading.py:" in place, waits) == (True, False)


def test_the_time_of_a_pause_counts_for_nothing() -> None:
    watch: Any = HangWatch.__new__(HangWatch)
    watch._since_s, watch._floor_s, watch._times_s = 0.0, 10, [0.01] * 9
    assert watch.limit_s() == 50  # a first step may take longer
    watch._times_s = [0.01] * 10
    assert watch.limit_s() == 10
    watch._times_s = [0.2] * 10
    assert watch.limit_s() == 20
    with watch.pause():
        assert watch._since_s is None
    assert time.monotonic() - watch._since_s < watch.limit_s()


def stop_for_ever() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_for_ever() -> None:
    threading.Event().wait()


def hang(how: Callable[[], None]) -> None:
    """Have rank 1 hang in step 15."""
    from gmeta.training import TrainingRun

    take = TrainingRun._step

    def step(run: Any, *arguments: Any) -> Any:
        if run._progress.step == 14 and os.environ.get("RANK") == "1":
            how()
        return take(run, *arguments)

    TrainingRun._step = step  # type: ignore[method-assign]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "what"),
    [(stop_for_ever, "says nothing: it is stopped"), (sleep_for_ever, "threading.py:")],
)
def test_a_run_that_hangs_ends_with_a_page_that_names_the_missing_rank(
    tmp_path: Path, click_logs: Path, how: Callable[[], None], what: str
) -> None:
    config = write_config(tmp_path / "t.toml", click_logs, tmp_path / "run")
    arguments = ["train", str(config), *SMALL_MODEL, "run.max_steps=100", "run.epochs=100"]
    arguments += ["run.hang_timeout_s=10", "data.valid_split=", "--nproc-per-node=2"]
    env = {**environment(), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    task = Task("gmeta", tuple(arguments), env, tmp_path, first=partial(hang, how))
    with forked(task) as running:
        wait_until(lambda: running.poll() is not None, "the end of the run", 0.1, 2 * PATIENCE_S)
        assert running.poll() == 1, running.stderr
        said = running.stderr
    (page,) = (tmp_path / "run/hangs").glob("*/page.txt")
    text = page.read_text()
    line = text.partition("\n")[0]
    assert "behind step 14. Missing: rank 1 (" in line
    assert what in line.partition("Waiting")[0]
    assert "Waiting for others: rank 0 at gmeta/" in line
    assert line in said
    assert f"All stacks: {page}" in said
    assert "in _take_steps" in text  # of rank 0's stack
