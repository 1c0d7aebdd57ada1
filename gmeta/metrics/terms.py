"""A metric as sums over tasks, which makes resampling tasks cheap
(gmeta.evaluation.report.intervals)."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# N rows, T tasks, R runs of equal sort keys

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

# A float32 sigmoid rounds to exactly 0 or 1 for ordinary logits; scikit-learn clips there too.
LOGLOSS_CLIP = float(np.finfo(np.float32).eps)
# As in Guo et al. 2017, and what torchmetrics takes without being asked.
ECE_BINS = 15


@dataclass(frozen=True)
class Value:
    """A metric of one split over `num_tasks` tasks; NaN when undefined, with the `reason`."""

    value: float
    num_tasks: int
    reason: str = ""


@dataclass(frozen=True)
class Terms:
    """One metric as sums over tasks: value = num_T.sum() / den_T.sum(), its root if `is_root`."""

    # A task with den_T = 0 does not count (for GAUC, one of a single class). Of a metric of two
    # classes over all rows, no more than the `rarer_tasks` tasks with the rarer class tell
    # anything. `no_interval` says why the value has none; differences of two have one.
    value: float
    num_T: Floats
    den_T: Floats
    is_root: bool = False
    reason: str = ""
    rarer_tasks: int | None = None
    no_interval: str = ""

    @property
    def num_tasks(self) -> int:
        """Return the number of tasks that count."""
        counted = int(np.count_nonzero(self.den_T))
        return counted if self.rarer_tasks is None else min(counted, self.rarer_tasks)


def undefined_terms(num_tasks: int, reason: str) -> Terms:
    """Return the terms of a metric without a value, of which no task counts."""
    # NaN with its reason, never a number that looks like a value.
    zeros_T = np.zeros(num_tasks)
    return Terms(np.nan, zeros_T, zeros_T, reason=reason)


def mean_over_tasks(num_T: Floats, counts_T: Bools) -> Terms:
    """Return the mean of a number per task over the tasks that count; there must be one."""
    den_T = counts_T.astype(np.float64)
    num_T = np.where(counts_T, num_T, 0.0)
    return Terms(float(num_T.sum() / den_T.sum()), num_T, den_T)


def mean_over_rows(row_N: Floats, code_N: Ints, num_tasks: int, is_root: bool = False) -> Terms:
    """Return the mean of a number per row, or its root; code_N are dense task codes."""
    mean = mean_of(row_N)
    num_T, den_T = sum_T(row_N, code_N, num_tasks), sum_T(np.ones(row_N.size), code_N, num_tasks)
    return Terms(float(np.sqrt(mean)) if is_root else mean, num_T, den_T, is_root)


def with_influence(value: float, influence_T: Floats, rarer_tasks: int | None = None) -> Terms:
    """Return the terms of a metric that is no ratio of sums over tasks, to first order, from its
    value and its derivatives by the tasks' weights."""
    num_tasks = influence_T.size
    # Exact where all tasks weigh the same: the derivatives then add up to 0.
    terms_T = value + num_tasks * influence_T
    return Terms(value, terms_T, np.ones(num_tasks), rarer_tasks=rarer_tasks)


def sum_T(row_N: Array, code_N: Ints, num_tasks: int) -> Floats:
    """Return the sum of each task's rows; code_N are dense task codes in [0, num_tasks)."""
    return np.asarray(np.bincount(code_N, row_N, minlength=num_tasks), np.float64)


def mean_of(row_N: Floats) -> float:
    """Return the mean; NaN without a row."""
    return float(row_N.mean()) if row_N.size else float("nan")


def why_unusable(score_N: Floats) -> str:
    """Return why no metric can be computed of these predictions; "" if one can."""
    if score_N.size == 0:
        return "no rows"
    num_bad = int(np.count_nonzero(~np.isfinite(score_N)))
    return (
        f"{num_bad:,} of {score_N.size:,} predictions are not finite: the model diverged"
        if num_bad
        else ""
    )


def why_one_class(num_positive: int, num_negative: int) -> str:
    """Return why two classes cannot be compared; "" where both are there."""
    if num_positive and num_negative:
        return ""
    return f"{num_positive:,} positive and {num_negative:,} negative rows: both classes are needed"


def run_bounds(starts_N: Bools) -> tuple[Ints, Ints]:
    """Return the first index of each row's run and one past its last; starts_N marks the starts."""
    first_R = np.flatnonzero(starts_N)
    end_R = np.append(first_R[1:], starts_N.size)
    length_R = end_R - first_R
    return np.repeat(first_R, length_R), np.repeat(end_R, length_R)
