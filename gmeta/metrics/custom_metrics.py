"""Custom metrics: by entry point or import path, beside those of the catalogue."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gmeta.errors import GMetaError
from gmeta.metrics.terms import Floats, Ints, Terms, undefined_terms, with_influence
from gmeta_keys.plugins import Registry
from gmeta_keys.translate_errors import format_foreign_error, translate_errors

# N rows, T tasks, G groups of tasks

# The standard error of an interval is itself off by 1/sqrt(2 (G - 1)): 10 %.
NUM_GROUPS = 50
# The same groups, and so the same interval, in every evaluation.
SEED = 0
KEY = "evaluation.metrics"


@dataclass(frozen=True)
class Metric:
    """A custom metric: `function(label_N, prediction_N, task_N)` returns its value on rows in any
    order, NaN where undefined; predictions are probabilities for bce, else ratings."""

    function: Callable[[Floats, Floats, Ints], float]
    label: str  # in tables and pictures
    higher_is_better: bool
    explanation: str = ""  # a sentence
    unit: str = ""


NAMED_METRICS: Registry[Metric] = Registry(
    KEY,
    "gmeta.metrics",
    {},
    "a value of gmeta.metrics.custom_metrics.Metric",
    lambda found: isinstance(found, Metric),
)


def is_custom(name: str) -> bool:
    """Return whether a name is an import path or an entry point."""
    return bool(re.fullmatch(r"[\w.]+:[\w.]+", name)) or name in NAMED_METRICS.names()


def try_out(name: str) -> None:
    """Call a custom metric on 200 made-up rows of 20 tasks. Raises GMetaError: it fails."""
    place_N = np.arange(200)
    # Both labels in every task and no equal scores: no metric has a reason to be undefined.
    label_N, score_N = (place_N % 2).astype(np.float64), (place_N + 1) / 201
    try:
        custom_terms(name, label_N, score_N, place_N // 10, 20, resampled=False)
    except GMetaError as error:
        raise GMetaError(f"{error}. These rows were made up to try it") from error


def custom_terms(
    name: str, label_N: Floats, score_N: Floats, code_N: Ints, num_tasks: int, resampled: bool
) -> Terms:
    """Return a custom metric's value, and with `resampled` how it changes with each task's weight;
    code_N are dense task codes. Raises GMetaError: the function failed.

    The change is that of a delete-a-group jackknife: tasks are dealt at random into G groups, and
    I_g = (T - n_g) / T * (value - value without the n_g tasks of group g) estimates the sum of
    their influences. Each has I_g / sqrt(n_g), so that resampled tasks vary as much as the I_g do
    (Kott, The delete-a-group jackknife, Journal of Official Statistics 17, 2001)."""
    function = NAMED_METRICS.find(name).function

    def value_of(kept_N: Any) -> float:
        with translate_errors(
            lambda error: GMetaError(
                f"{KEY} = {name!r} failed on {np.count_nonzero(kept_N):,} rows: "
                f"{format_foreign_error(error)}. Mend it, or leave it out"
            )
        ):
            return float(function(label_N[kept_N], score_N[kept_N], code_N[kept_N]))

    value = value_of(np.ones(label_N.size, np.bool_))
    if not math.isfinite(value):
        return undefined_terms(num_tasks, f"{name} is {value} of these rows")
    if not resampled:
        return Terms(value, np.full(num_tasks, value), np.ones(num_tasks))
    num_groups = min(NUM_GROUPS, num_tasks)
    group_T = np.random.default_rng(SEED).permutation(num_tasks) % num_groups
    sizes = np.bincount(group_T, minlength=num_groups)
    # Without a group that has all rows there is nothing to measure: too few tasks have no interval.
    kept = (group_T[code_N] != group for group in range(num_groups))
    without = np.array([value_of(kept_N) if kept_N.any() else value for kept_N in kept])
    of_groups = (num_tasks - sizes) / num_tasks * (value - without) / np.sqrt(sizes)
    influence_T = of_groups[group_T]
    return with_influence(value, influence_T - influence_T.mean())
