"""The number of threads of a rank's steps, against machines on which one or several are faster."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn

from gmeta.distributed.sharded_learner import ShardedLearner
from gmeta.platform.threads import (
    LEAST_WORK,
    LONGEST_HOLD,
    SHORTEST_HOLD,
    SLOW_STEPS,
    THREADED_WORK,
    TRIES,
    ThreadChoice,
)
from gmeta.serving.model_loader import load
from tests.support.exported import random_rows, write_random_model

WORK = 2 * LEAST_WORK
TRIAL = 2 * TRIES


def steps(choice: ThreadChoice, number: int, seconds: Callable[[int], float]) -> list[int]:
    """The threads of so many steps, which take so long on so many."""
    taken = []
    for _ in range(number):
        taken.append(choice.threads_for(WORK))
        choice.record(seconds(taken[-1]), WORK, taken[-1])
    return taken


@pytest.mark.parametrize(("on_four", "best"), [(0.9, 4), (1.1, 1)])
def test_a_trial_finds_what_is_faster(on_four: float, best: int) -> None:
    choice = ThreadChoice(4)
    tried = steps(choice, TRIAL, lambda threads: 1.0 if threads == 1 else on_four)
    assert tried == [1, 4] * TRIES
    assert set(steps(choice, SHORTEST_HOLD, lambda _: 1.0)) == {best}


def test_trials_become_rare_while_nothing_changes() -> None:
    choice, seconds = ThreadChoice(2), lambda threads: 1.0 / threads
    taken = steps(choice, 40_000, seconds)
    trials = sum(before == 2 and after == 1 for before, after in pairwise(taken))
    # TRIES in each trial; the last of them after holds of 200, 400, ..., 3,200 steps.
    assert trials <= TRIES * (40_000 / LONGEST_HOLD + 6)
    assert taken.count(2) > 0.99 * len(taken)


def test_a_step_that_other_work_slows_ends_several_threads_at_once() -> None:
    choice = ThreadChoice(2)
    steps(choice, TRIAL + 5, lambda threads: 1.0 / threads)
    beside_others = lambda threads: 50.0 if threads == 2 else 1.0  # noqa: E731
    assert steps(choice, 4, beside_others) == [2, 2, 1, 1]
    # Later they are tried again: two slow steps, if nothing has changed.
    assert steps(choice, SHORTEST_HOLD + TRIAL, beside_others).count(2) == SLOW_STEPS
    alone = steps(choice, 2 * LONGEST_HOLD, lambda threads: 1.0 / threads)
    assert alone[-1] == 2


def test_a_slow_step_alone_decides_nothing() -> None:
    """As where code for several threads is generated first, or data came late."""
    choice = ThreadChoice(2)
    first = iter([1.0, 50.0])
    steps(choice, 2, lambda _: next(first))
    assert steps(choice, TRIAL, lambda threads: 1.0 / threads)[-1] == 2
    steps(choice, 1, lambda _: 50.0)
    assert steps(choice, 5, lambda _: 0.5) == [2] * 5


def test_small_steps_stay_on_one_thread_and_a_single_thread_is_never_tried() -> None:
    choice = ThreadChoice(4)
    for _ in range(TRIAL):
        assert choice.threads_for(LEAST_WORK - 1) == 1
        choice.record(1.0, LEAST_WORK - 1, 1)
    assert steps(choice, 2, lambda _: 1.0) == [1, 4]  # they were no part of a trial
    assert set(steps(ThreadChoice(1), 500, lambda _: 1.0)) == {1}


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
def test_where_bits_must_not_depend_on_the_clock_sizes_decide() -> None:
    choice = ThreadChoice(4)
    assert [choice.threads_for(work) for work in (0, THREADED_WORK - 1, THREADED_WORK)] == [1, 1, 4]


class Recording(nn.Module):
    """A learner that notes the threads it predicts on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10))
        self.threads: list[int] = []

    def predict_along(self, *_: object) -> list[object]:
        self.threads.append(torch.get_num_threads())
        return []


def test_predictions_too_are_made_on_the_threads_that_are_faster() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        learner = Recording()
        sharded = ShardedLearner(nn.Module(), cast(Any, learner))
        fetched = cast(Any, SimpleNamespace(num_rows=LEAST_WORK // 10))
        with patch.object(sharded, "fetch", lambda episodes: (episodes, torch.zeros(0))):
            for _ in range(2):
                sharded.predict_along(fetched, (0, 1))
            sharded.predict_along(cast(Any, SimpleNamespace(num_rows=0)), (1,))
        assert learner.threads == [1, 2, 1]
    finally:
        torch.set_num_threads(before)


def test_a_served_model_chooses_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_model(tmp_path)
    served = load(tmp_path)
    support, query = random_rows(40, seed=1, num_tasks=4), random_rows(40, seed=2, num_tasks=4)
    predict, took = served.learner.predict, [0]

    def noted(*arguments: Any) -> Any:
        took[0] = torch.get_num_threads()
        return predict(*arguments)

    monkeypatch.setattr(served.learner, "predict", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        served.predict_tasks(support, query, allow_no_support=True)
        assert took[0] == 2
        served.choose_threads()
        served.predict_tasks(support, query, allow_no_support=True)
        assert took[0] == 1  # such small work
        assert torch.get_num_threads() == 2  # for the next model
    finally:
        torch.set_num_threads(before)
