"""Groups of tasks of similar size."""

import random
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.data.task_groups import (
    MOST_RECTANGLES,
    PADDING_SHARE,
    RECTANGLE_WORK,
    group_tasks,
    least_gain,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), min_size=1, max_size=60))
def test_groups_hold_every_task_once_and_few_pad_little(sizes: list[tuple[int, int]]) -> None:
    support_T, query_T = np.array(sizes).T
    groups = group_tasks(support_T, query_T)
    assert sorted(task for group in groups for task in group) == list(range(len(sizes)))
    padded = sum(len(g) * (support_T[g].max() + query_T[g].max()) for g in groups)
    allowed = (1 + PADDING_SHARE) * (support_T.sum() + query_T.sum())
    assert len(groups) == MOST_RECTANGLES or padded <= allowed


def test_a_group_more_saves_at_least_the_rows_that_were_asked_for() -> None:
    support_T, query_T = np.array([2, 2, 12, 12]), np.array([4, 4, 4, 4])
    of = lambda least: len(group_tasks(support_T, query_T, least_gain=least))  # noqa: E731
    assert [of(1), of(20), of(21)] == [2, 2, 1]  # two tasks of ten rows of padding each


@pytest.mark.parametrize(("longest", "on_cuda"), [(12, 1), (1_500, 2)])
def test_on_cuda_ragged_tasks_are_cut_only_where_padding_costs_more_than_launches(
    longest: int, on_cuda: int
) -> None:
    support_T, query_T = np.array([5] * 64 + [longest] * 64), np.full(128, 10)
    groups = {
        device: group_tasks(support_T, query_T, least_gain(RECTANGLE_WORK, device, 557_000))
        for device in ("cpu", "cuda")
    }
    assert (len(groups["cpu"]), len(groups["cuda"])) == (2, on_cuda)


def test_the_first_cut_is_the_best_of_all_by_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gmeta.data.task_groups.MOST_RECTANGLES", 2)
    monkeypatch.setattr("gmeta.data.task_groups.PADDING_SHARE", 0.0)
    rng = random.Random(3)
    for _ in range(200):
        widest = rng.choice([(1, 30), (30, 1), (9, 9)])  # one side may be alike in all tasks
        sizes = [tuple(rng.randrange(width) + 1 for width in widest) for _ in range(12)]
        cuts = [
            padded_rows(ordered[:cut]) + padded_rows(ordered[cut:])
            for side in (0, 1)
            for ordered in [sorted(sizes, key=itemgetter(side))]
            for cut in range(1, len(sizes))
        ]
        groups = group_tasks(*np.array(sizes).T)
        found = sum(padded_rows([sizes[task] for task in group]) for group in groups)
        assert found <= min(padded_rows(sizes), *cuts)


def padded_rows(sizes: list[tuple[int, ...]]) -> int:
    return len(sizes) * sum(max(rows) for rows in zip(*sizes, strict=True))
