"""What adapting gives each task: a histogram of gains, and one task shown step by step."""

from collections.abc import Mapping, Sequence

import numpy as np

from gmeta.evaluation.report.evaluated_runs import SplitRows
from gmeta.evaluation.report.evaluation_schema import TaskGains, TaskStory
from gmeta.metrics.catalogue import Scoring, loss_metric, predicted_by
from gmeta.metrics.terms import Array, Floats, sum_T

# N rows, T tasks

NUM_BINS = 30  # even: 0 is an edge
# The histogram ends there; a few tasks far away would press all others into one bar.
SHOWN_SHARE = 0.98
# A probability of 0 would make one row's loss infinite.
MIN_PROBABILITY = 1e-7
MAX_STORY_ROWS = 12


def measure_task_gains(draws: Sequence[SplitRows], scoring: Scoring) -> TaskGains | None:
    """Return the histogram of gains over tasks; None for scores, which have no loss of their own.

    A task's gain is its mean loss before adapting minus that after, over its rows in all draws."""
    of_rows = predicted_by(scoring.loss)
    if of_rows == "score":
        return None
    gain_T = _measure_gains_T(draws, of_rows == "probability")
    gain_T = gain_T[np.isfinite(gain_T)]
    if not gain_T.size:
        return None
    limit = float(np.quantile(np.abs(gain_T), SHOWN_SHARE)) or 1.0
    half = NUM_BINS // 2
    # The middle one is exactly 0: a task that nothing changes is not among those worse off.
    edges = limit * np.arange(-half, half + 1) / half
    counts, _ = np.histogram(np.clip(gain_T, -limit, limit), edges)
    return TaskGains(
        loss=loss_metric(scoring.loss),
        edges=tuple(edges.tolist()),
        num_tasks_in_bin=tuple(counts.tolist()),
        share_better=float((gain_T > 0).mean()),
        share_worse=float((gain_T < 0).mean()),
        median=float(np.median(gain_T)),
    )


def tell_story(
    rows: SplitRows, limited: Mapping[int, SplitRows], scoring: Scoring
) -> TaskStory | None:
    """Return the task of median gain, predicted from more and more of its support rows.

    Of those that have as many support rows as the largest limit, and rows of different labels;
    None without such a task or without limits."""
    limits = sorted(limited)
    if not limits or predicted_by(scoring.loss) == "score":
        return None
    tasks, code_N = np.unique(rows.task_N, return_inverse=True)
    num_tasks = tasks.size
    size_T = np.zeros(num_tasks, np.int64)
    np.maximum.at(size_T, code_N, rows.support_rows_N.astype(np.int64))
    low_T, high_T = np.full(num_tasks, np.inf), np.full(num_tasks, -np.inf)
    np.minimum.at(low_T, code_N, rows.label_N)
    np.maximum.at(high_T, code_N, rows.label_N)
    fitting = np.flatnonzero((size_T >= limits[-1]) & (low_T < high_T))
    if not fitting.size:
        return None
    gain_T = _measure_gains_T([rows], predicted_by(scoring.loss) == "probability")
    task = int(tasks[fitting[np.argsort(gain_T[fitting], kind="stable")[fitting.size // 2]]])
    first = limited[limits[0]]
    label_N = first.label_N[first.task_N == task]
    is_high_N = label_N > label_N.mean()
    # As many of either kind as there is room for.
    sides = (np.flatnonzero(is_high_N), np.flatnonzero(~is_high_N))
    chosen = np.sort(np.concatenate([side[: MAX_STORY_ROWS // 2] for side in sides]))
    return TaskStory(
        task=task,
        labels=tuple(label_N[chosen].tolist()),
        support_rows=tuple(limits),
        predictions=tuple(
            tuple(found.after_N[found.task_N == task][chosen].tolist())
            for found in (limited[limit] for limit in limits)
        ),
    )


def _measure_gains_T(draws: Sequence[SplitRows], are_probabilities: bool) -> Floats:
    task_N = np.concatenate([rows.task_N for rows in draws])
    tasks, code_N = np.unique(task_N, return_inverse=True)
    gain_N = np.concatenate(
        [
            _row_losses_N(rows.label_N, rows.before_N, are_probabilities)
            - _row_losses_N(rows.label_N, rows.after_N, are_probabilities)
            for rows in draws
        ]
    )
    num_rows_T = sum_T(np.ones_like(gain_N), code_N, tasks.size)
    return np.asarray(sum_T(gain_N, code_N, tasks.size) / num_rows_T)


def _row_losses_N(label_N: Array, prediction_N: Array, are_probabilities: bool) -> Floats:
    label_N, prediction_N = label_N.astype(np.float64), prediction_N.astype(np.float64)
    if not are_probabilities:
        return np.asarray(np.abs(label_N - prediction_N))
    p_N = np.clip(prediction_N, MIN_PROBABILITY, 1 - MIN_PROBABILITY)
    return np.asarray(-(label_N * np.log(p_N) + (1 - label_N) * np.log1p(-p_N)))
