"""Measures what tasks and their rows cost, from the time that ranks compute for their batches."""

import json
from collections import deque
from typing import final

import numpy as np
import numpy.typing as npt

from gmeta.distributed.ranks import Ranks, gather_values
from gmeta.distributed.sharded_learner import ShardedLearner
from gmeta.feeds.local_time import LocalClock
from gmeta.runs.run_folder import COST_FILE

WARM_UP_STEPS = 10  # buffers grow, kernels are chosen
MIN_STEPS = 100  # of all ranks: fewer say little on a busy machine
# Columns of the sums: a step, its tasks, its rows, its milliseconds. Of these the first three are
# tried together, then without the part that came out below 0.
_SUBSETS = ([0, 1, 2], [0, 2], [1, 2], [2], [0, 1], [1])
_MIN_DETERMINANT = 1e-6  # of correlations: below, two columns tell the same


@final
class CostMeter:
    """Fits `ms = per_step + per_task x tasks + per_row x rows` to the steps of all ranks."""

    def __init__(self, local: ShardedLearner, ranks: Ranks) -> None:
        """Measure the steps of this rank's learner from now on."""
        self._ranks = ranks
        self.clock = local.clock = LocalClock()
        self._steps = deque[tuple[int, int, int]]()  # not yet timed: number, tasks, rows
        self._num_steps = 0
        self._sums = np.zeros((4, 4))

    def finish_step(self, num_tasks: int, num_rows: int) -> float:
        """Count one more step; return the seconds of those that the clock has timed since."""
        self._steps.append((self.clock.num_started, num_tasks, num_rows))
        spent_s = 0.0
        for number, seconds in self.clock.take():
            spent_s += seconds
            # A step without rows of its own on this rank is never timed.
            while self._steps and self._steps[0][0] < number:
                self._steps.popleft()
            if self._steps and self._steps[0][0] == number:
                self._count(*self._steps.popleft()[1:], 1000 * seconds)
        return spent_s

    def _count(self, num_tasks: int, num_rows: int, milliseconds: float) -> None:
        self._num_steps += 1
        if num_tasks and self._num_steps > WARM_UP_STEPS:
            one = np.array([1.0, num_tasks, num_rows, milliseconds])
            self._sums += np.outer(one, one)

    def checkpoint_files(self) -> dict[str, str]:
        """Return the file with the costs, on rank 0; nothing where too little was measured, or all
        tasks are alike. Collective."""
        sums = gather_values(self._sums, self._ranks)
        costs = None if sums is None else fit_costs(np.sum(sums, axis=0))
        return {} if costs is None else {COST_FILE: json.dumps(costs)}


def fit_costs(sums: npt.NDArray[np.float64]) -> dict[str, float] | None:
    """Return the costs in ms of a step, a task and a row, none below 0, by least squares; None: the
    sums of products [4, 4] of (1, tasks, rows, ms) do not tell."""
    if sums[0, 0] < MIN_STEPS:
        return None
    scale = np.sqrt(np.diag(sums))
    if not scale.all():
        return None
    scaled = sums / np.outer(scale, scale)
    best, least = None, np.inf
    for subset in _SUBSETS:
        products = scaled[np.ix_(subset, subset)]
        if np.linalg.det(products) < _MIN_DETERMINANT:
            continue
        found = np.linalg.solve(products, scaled[subset, 3])
        left = 1 - found @ scaled[subset, 3]
        if found.min() >= 0 and left < least:
            best, least = np.zeros(3), left
            best[subset] = found
    if best is None:
        return None
    per_step, per_task, per_row = (best * scale[3] / scale[:3]).tolist()
    return {"per_step_ms": per_step, "per_task_ms": per_task, "per_row_ms": per_row}
