"""How few shapes the batches of ragged runs have that are arranged in buckets, and what that pads:
for gpu.py."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _common import print_table
from _synthetic import random_batch, single_id_features

from gmeta.data.collate import group_similar_tasks
from gmeta.learner import MetaLearner

Ints = npt.NDArray[np.int64]
FEATURES = single_id_features(1, 10)


def uniform(low: int, high: int) -> Callable[[np.random.Generator, int], Ints]:
    """Return what draws the rows of so many tasks: these, and all between."""
    return lambda rng, count: rng.integers(low, high + 1, count)


def lognormal(middle: int, spread: float, low: int, high: int) -> Callable[..., Ints]:
    """Return what draws the rows of so many tasks around a median."""
    return lambda rng, count: np.clip(
        np.exp(rng.normal(np.log(middle), spread, count)).astype(np.int64), low, high
    )


# What draws a task's rows, and how many of them are the query; 0: half of them.
RUNS: dict[str, tuple[Callable[..., Ints], int]] = {
    "10 + 10": (uniform(20, 20), 10),
    "10 to 30 + 10": (uniform(20, 40), 10),
    "Poisson of 30": (lambda rng, count: np.maximum(rng.poisson(30, count), 2), 0),
    "lognormal, 13 to 100, 10 are the query": (lognormal(50, 0.5, 13, 100), 10),
    "lognormal, 2 to 100": (lognormal(10, 0.9, 2, 100), 0),
    "lognormal, 2 to 1,000": (lognormal(40, 1.0, 2, 1000), 0),
}


def shapes_of_runs(learner: MetaLearner, num_batches: int) -> dict[str, dict[str, Any]]:
    """Print and return how many shapes each run has, what share of its batches has one of the
    twelve most frequent, and what share of the rows pads."""
    layout = learner.collate_options().layout
    assert layout is not None
    found: dict[str, dict[str, Any]] = {}
    for name, (draw, num_query) in RUNS.items():
        for tasks in (128, 1_024):
            shapes: Counter[Any] = Counter()
            padded = true = 0
            for seed in range(num_batches):
                rows_T = torch.from_numpy(draw(np.random.default_rng(seed), tasks))
                query_T = torch.full_like(rows_T, num_query) if num_query else rows_T - rows_T // 2
                batch = random_batch(FEATURES, rows_T - query_T, query_T, seed=0)
                groups = group_similar_tasks(batch, layout)
                shapes[tuple((len(one.tasks), *one[1:]) for one in groups)] += 1
                padded += sum(one.num_rows for one in groups)
                true += batch.num_rows
            found[f"{name}, {tasks} tasks"] = {
                "shapes": len(shapes),
                "in_twelve": sum(count for _, count in shapes.most_common(12)) / num_batches,
                "padded_share": round(1 - true / padded, 2),
            }
    print_table(
        ["rows of a task", "shapes", "in twelve", "padded"],
        [
            [name, str(run["shapes"]), f"{run['in_twelve']:.0%}", f"{run['padded_share']:.0%}"]
            for name, run in found.items()
        ],
    )
    return found
