"""Random rows with ties, and metrics by loops over them that are slow and obvious."""

from collections.abc import Callable, Iterator
from itertools import permutations

import numpy as np

from gmeta.metrics.terms import Array

# N rows, T tasks


def few_rows(seed: int, num_tasks: int = 12) -> tuple[Array, Array, Array]:
    """Return labels (0 or 1), scores of which many are equal, and tasks of 1 to 6 rows, mixed."""
    rng = np.random.default_rng(seed)
    task_N = np.repeat(np.arange(num_tasks) * 3 - 5, rng.integers(1, 7, num_tasks))
    rng.shuffle(task_N)
    label_N = (rng.random(task_N.size) < 0.4).astype(np.float32)
    return label_N, (rng.integers(0, 4, task_N.size) / 4).astype(np.float32), task_N


def ranked_labels(label_N: Array, score_N: Array) -> Iterator[list[float]]:
    """Yield the labels from the best score to the worst, in each order that the ties leave open."""
    for order in permutations(range(len(label_N))):
        scores = [score_N[row] for row in order]
        if scores == sorted(scores, reverse=True):
            yield [float(label_N[row]) for row in order]


def mean_over_tasks(
    rows: tuple[Array, Array, Array], measure: Callable[[list[float]], float]
) -> float:
    """Return the mean of `measure` over all orders of a task, then over tasks with a positive."""
    label_N, score_N, task_N = rows
    found = []
    for task in np.unique(task_N):
        own = task_N == task
        if label_N[own].any():
            orders = list(ranked_labels(label_N[own], score_N[own]))
            found.append(np.mean([measure(order) for order in orders]))
    return float(np.mean(found))


def weighted(rows: tuple[Array, Array, Array], task: int, times: int) -> tuple[Array, ...]:
    """Return all rows `times` times over, those of one task once more."""
    own_N = rows[2] == task
    return tuple(np.concatenate([np.tile(column, times), column[own_N]]) for column in rows)
