"""How the tasks of a step are divided among workers of unequal speed."""

from collections.abc import Sequence
from typing import NamedTuple


class Speed(NamedTuple):
    """A step of n tasks in c micro-batches takes `c * overhead_ms + n * task_ms`."""

    task_ms: float
    overhead_ms: float = 0.0
    max_micro_batch: int = 0  # 0: any

    def micro_batches(self, num_tasks: int) -> int:
        """Return how many micro-batches the memory demands, at least."""
        if not self.max_micro_batch:
            return 1
        return max(1, -(-num_tasks // self.max_micro_batch))

    def step_ms(self, num_tasks: int) -> float:
        """Return the time that a share of `num_tasks` takes; 0 for no tasks."""
        if num_tasks == 0:
            return 0.0
        return self.micro_batches(num_tasks) * self.overhead_ms + num_tasks * self.task_ms

    def tasks_within(self, limit_ms: float) -> int:
        """Return the most tasks whose step ends within the limit."""
        if self.overhead_ms == 0 or not self.max_micro_batch:
            # 1e-9: a limit that is a whole number of tasks must not lose one to rounding.
            return max(0, int((limit_ms - self.overhead_ms) / self.task_ms + 1e-9))
        full_ms = self.step_ms(self.max_micro_batch)
        num_full = int(limit_ms / full_ms + 1e-9)
        rest_ms = limit_ms - num_full * full_ms - self.overhead_ms
        rest = max(0, int(rest_ms / self.task_ms + 1e-9))
        return num_full * self.max_micro_batch + min(rest, self.max_micro_batch)


def proportional_split(total: int, speeds: Sequence[float], minimum: int) -> list[int]:
    """Return B_i = B v_i / sum v by largest remainder, none below `minimum` (AntDT-ND's ADJUST_BS).

    >>> proportional_split(13, [4.0, 4.0, 4.0, 1.0], 1)
    [4, 4, 4, 1]
    >>> proportional_split(12, [10.0, 10.0, 0.1], 2)
    [5, 5, 2]"""
    # A step may have fewer tasks than all minimums together.
    minimum = min(minimum, total // len(speeds))
    shares = [minimum] * len(speeds)
    free = list(range(len(speeds)))
    while True:  # workers below the minimum get it, others share the rest
        rest = total - minimum * (len(speeds) - len(free))
        weight = sum(speeds[i] for i in free)
        below = [i for i in free if rest * speeds[i] < minimum * weight]
        if not below:
            break
        free = [i for i in free if i not in set(below)]
    exact = {i: rest * speeds[i] / weight for i in free}
    for i in free:
        shares[i] = int(exact[i])
    # Ties go to the first: equal speeds must give the same shares each time.
    by_remainder = sorted(free, key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def fastest_split(total: int, speeds: Sequence[Speed], minimum: int = 0) -> list[int]:
    """Return the split of `total` tasks whose slowest worker ends first: min over n of max_i
    t_i(n_i) (AntDT-DD). Exact: a bisection over the time limit, then whole tasks are taken back. Of
    splits that end at the same time it is the one with the most slack for workers whose tasks take
    long: a straggler's time is the least certain.

    >>> fastest_split(16, [Speed(1.0), Speed(3.0)])
    [12, 4]
    >>> fastest_split(64, [Speed(20.0), Speed(20.0), Speed(20.0), Speed(80.0)])  # not 20, 20, 19, 5
    [20, 20, 20, 4]"""
    minimum = min(minimum, total // len(speeds))
    low, high = 0.0, max(speed.step_ms(total) for speed in speeds)
    # 60 halvings go below the last bit of a float64.
    for _ in range(60):
        middle = (low + high) / 2
        if sum(max(minimum, speed.tasks_within(middle)) for speed in speeds) >= total:
            high = middle
        else:
            low = middle
    shares = [max(minimum, speed.tasks_within(high)) for speed in speeds]
    while (surplus := sum(shares) - total) > 0:
        # Taking tasks from workers at the limit would not lower it, as not all of these could give
        # one. So they are taken where each saves most, one from each worker in a round.
        order = sorted(
            (i for i in range(len(speeds)) if shares[i] > minimum),
            key=lambda i: speeds[i].step_ms(shares[i]) - speeds[i].step_ms(shares[i] - 1),
            reverse=True,
        )
        for i in order[:surplus]:
            shares[i] -= 1
    return shares


class Resplit(NamedTuple):
    """Better shares, and how long the slowest worker takes now and with them."""

    shares: list[int]
    now_ms: float
    then_ms: float


def improve_split(
    shares: Sequence[int], total: int, speeds: Sequence[Speed], minimum: int, min_gain: float
) -> Resplit | None:
    """Return the fastest split, None unless it makes the step shorter by the share `min_gain`."""
    wanted = fastest_split(total, speeds, minimum)
    now_ms, then_ms = (
        max(speed.step_ms(n) for speed, n in zip(speeds, split, strict=True))
        for split in (shares, wanted)
    )
    return None if then_ms > (1 - min_gain) * now_ms else Resplit(wanted, now_ms, then_ms)
