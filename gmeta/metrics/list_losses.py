"""Ranking losses as metrics: a model trained with one is also judged by it.

Shape suffixes: T tasks, N rows"""

from collections.abc import Callable

import numpy as np

from gmeta.metrics.terms import Floats, Ints, Terms, mean_over_tasks, undefined_terms

MOST_PAIRS = 1 << 20  # of a task, at once in memory


def list_loss_terms(
    name: str, label_N: Floats, score_N: Floats, code_N: Ints, num_tasks: int
) -> Terms:
    """Return the mean of `softmax` or `pairwise` (losses/ranking.py) over the tasks whose labels
    differ; code_N are dense task codes."""
    # Unlike a metric of the order alone, the loss notices outputs that run away.
    num_negative = int(np.count_nonzero(label_N < 0))
    if name == "softmax" and num_negative:
        reason = f"{num_negative:,} of {label_N.size:,} labels are below 0, and cannot share 1"
        return undefined_terms(num_tasks, reason)
    of_task: Callable[[Floats, Floats], float] = _softmax if name == "softmax" else _pairwise
    order_N = np.argsort(code_N, kind="stable")
    ends_T = np.cumsum(np.bincount(code_N, minlength=num_tasks))
    loss_T, counts_T = np.zeros(num_tasks), np.zeros(num_tasks, np.bool_)
    for task, rows in enumerate(np.split(order_N, ends_T[:-1])):
        own = label_N[rows]
        if rows.size and own.min() < own.max():
            loss_T[task], counts_T[task] = of_task(own, score_N[rows]), True
    if not counts_T.any():
        return undefined_terms(num_tasks, "no task holds two different labels")
    return mean_over_tasks(loss_T, counts_T)


def _softmax(label_N: Floats, score_N: Floats) -> float:
    # The largest is subtracted so that exp cannot overflow; it cancels out.
    above_N = score_N - score_N.max()
    return float(np.log(np.exp(above_N).sum()) - above_N @ label_N / label_N.sum())


def _pairwise(label_N: Floats, score_N: Floats) -> float:
    # A block of rows at a time: all pairs of a long task would not fit in memory.
    total, count, step = 0.0, 0, max(1, MOST_PAIRS // label_N.size)
    for first in range(0, label_N.size, step):
        rows = slice(first, first + step)
        is_pair = label_N[rows, None] > label_N[None, :]
        gaps = score_N[None, :] - score_N[rows, None]
        total += float(np.logaddexp(0.0, gaps[is_pair]).sum())
        count += int(np.count_nonzero(is_pair))
    return total / count
