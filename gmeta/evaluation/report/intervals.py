"""How much of a metric is noise: 95 % intervals from resampling tasks."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gmeta.metrics.terms import Floats, Terms
from metaio.quantities import format_count

# T tasks, U units that are resampled, X columns (two a metric), M metrics, B resamples

LEVEL_PERCENT = 95.0
# Below ten the percentile bootstrap is far too narrow (Hesterberg 2015, What Teachers Should Know
# about the Bootstrap).
MIN_TASKS = 10
# More tasks are pooled at random: a standard error from U units is itself off by 1/sqrt(2U), 0.7 %.
MAX_UNITS = 10_000
# Draw counts that are multiplied at a time: 8 MB as float64.
CHUNK = 1_000_000


@dataclass(frozen=True)
class Interval:
    """A 95 % interval over tasks; both ends NaN, with the reason, where there is none."""

    low: float
    high: float
    reason: str = ""


def bootstrap(terms: Sequence[Terms], resamples: int = 1000, seed: int = 0) -> Floats:
    """Return each metric on resamples of tasks, drawn with replacement; NaN where undefined.

    All metrics see the same draws, so two lines compare two models task by task. Each costs
    O(min(T, 10 000)): more tasks are first pooled at random into 10 000 groups (the random group
    method: Wolter, Introduction to Variance Estimation, chapter 2)."""
    # Tasks, not rows: rows of a task share its taste and its support set, so resampling them would
    # give intervals that are too narrow.
    sizes = {one.num_T.size for one in terms}
    if len(sizes) > 1:
        raise ValueError(
            f"these metrics are over {sorted(sizes)} tasks: a paired resample needs the same "
            "tasks in each. Resample each set of tasks by itself."
        )
    if not terms or sizes == {0}:
        return np.full((len(terms), resamples), np.nan)
    # A metric is a ratio of sums over tasks: all resamples together are one matrix product.
    columns = [column for one in terms for column in (one.num_T, one.den_T)]
    sums = _pool_tasks(np.stack(columns, axis=1), seed)
    counts = _draw_counts(sums.shape[0], resamples, seed)
    chunks = np.array_split(counts, max(1, counts.size // CHUNK))
    drawn = np.concatenate([chunk.astype(np.float64) @ sums for chunk in chunks])
    with np.errstate(invalid="ignore", divide="ignore"):
        by_resample = drawn[:, ::2] / drawn[:, 1::2]
        roots = np.array([one.is_root for one in terms])
        by_resample[:, roots] = np.sqrt(by_resample[:, roots])
    return np.ascontiguousarray(by_resample.T)


def percentile_interval(resampled: Floats, num_tasks: int) -> Interval:
    """Return the middle 95 % of the resampled values; none with few tasks or undefined draws."""
    if num_tasks < MIN_TASKS:
        few = format_count(num_tasks, "task")
        return Interval(np.nan, np.nan, f"rests on only {few}: too few to resample")
    num_undefined = int(np.count_nonzero(~np.isfinite(resampled)))
    if num_undefined > 0.01 * resampled.size:
        return Interval(
            np.nan, np.nan, f"undefined in {num_undefined} of {resampled.size} resamples"
        )
    tail = (100.0 - LEVEL_PERCENT) / 2
    low, high = np.nanpercentile(resampled, [tail, 100.0 - tail])
    return Interval(float(low), float(high))


def _pool_tasks(columns: Floats, seed: int) -> Floats:
    num_tasks = columns.shape[0]
    if num_tasks <= MAX_UNITS:
        return columns
    order_T = np.random.default_rng(seed).permutation(num_tasks)
    bounds = np.linspace(0, num_tasks, MAX_UNITS, endpoint=False).astype(np.int64)
    return np.add.reduceat(columns[order_T], bounds, axis=0)


# A report needs the same draws for each model and stage in turn; a matrix has at most 10 MB.
@functools.lru_cache(maxsize=2)
def _draw_counts(num_units: int, resamples: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return how often each unit is drawn in each resample, with replacement."""
    rng = np.random.default_rng(seed)
    # uint8 holds up to 255 draws of a unit: more have a probability below 1e-500.
    counts = np.empty((resamples, num_units), np.uint8)
    for row in counts:
        row[:] = np.bincount(rng.integers(0, num_units, num_units), minlength=num_units)
    return counts
