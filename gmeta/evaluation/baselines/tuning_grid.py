"""The grid of inner rates and steps among which runs choose theirs."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from gmeta.evaluation.baselines.episode_rows import HALF_STREAM, hash_uniform
from gmeta.evaluation.report.evaluation_schema import TriedSetting
from metaio.ragged import Int64

# Plain training sees no inner step, so no key of its config was chosen for one.
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
STEPS = (1, 3, 5, 10)
# How often at most the grid goes on beyond its lowest or highest rate, where that is the best.
MAX_EXTENSIONS = 3


def try_settings(
    errors: Callable[[float, Sequence[int]], list[float]], own: tuple[float, int]
) -> tuple[TriedSetting, ...]:
    """Return the settings that were tried with their errors, the config's `own` first."""
    found: dict[tuple[float, int], float] = {}

    def add(rate: float, grid: Sequence[int] = STEPS) -> None:
        wanted = {*grid, own[1]} if rate == own[0] else {*grid}
        # All steps of a rate in one call: the inner loop with the most of them passes through the
        # others.
        steps = sorted(one for one in wanted if (rate, one) not in found)
        values = errors(rate, steps) if steps else []
        found.update({(rate, one): value for one, value in zip(steps, values, strict=True)})

    def list_tried() -> list[TriedSetting]:
        ordered = sorted(found, key=lambda setting: (setting != own, setting))
        return [TriedSetting(*setting, found[setting]) for setting in ordered]

    add(own[0], STEPS if own[0] in RATES else ())
    rates = list(RATES)
    for rate in rates:
        add(rate)
    # The best rate at an edge of the grid: a better one may lie beyond.
    for _ in range(MAX_EXTENSIONS):
        best = choose_best(list_tried()).inner_lr
        if best >= rates[-1]:
            rates.append(_next_rate(rates[-1], 1))
            add(rates[-1])
        elif best <= rates[0]:
            rates.insert(0, _next_rate(rates[0], -1))
            add(rates[0])
        else:
            break
    return tuple(list_tried())


def assign_halves(task_N: Int64) -> Int64:
    """Return which half each task is in, 0 or 1, by its id alone."""
    return (hash_uniform(task_N, HALF_STREAM, 0) >= 0.5).astype(np.int64)


def choose_best(tried: Sequence[TriedSetting]) -> TriedSetting:
    """Return the setting of the smallest error, of equals the first."""
    # A setting that diverged has an error of NaN, which min would keep if it came first.
    return min(tried, key=lambda one: one.value if math.isfinite(one.value) else math.inf)


def _next_rate(rate: float, direction: int) -> float:
    """Return the neighbour of a rate in ..., 0.01, 0.03, 0.1, 0.3, 1, 3, 10, ..."""
    place = round(2 * math.log10(rate)) + direction
    return float(f"{10.0 ** (place / 2):.0e}")
