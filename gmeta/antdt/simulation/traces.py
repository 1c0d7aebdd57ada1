"""How slow each worker is at each time: made up from a seed, or read from a recording.

A worker's time is its healthy time multiplied by three factors: of its hardware (for ever), of its
node (until it is restarted elsewhere) and of the moment.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from gmeta.antdt.errors import AntdtError
from gmeta.errors import UserError

Floats = NDArray[np.float64]


class TraceError(AntdtError, UserError):
    """A recording that cannot be read as one."""


class Change(NamedTuple):
    """From `time_s` on a worker is `factor` times slower than healthy, until its next change."""

    time_s: float
    worker: int
    factor: float
    is_of_node: bool  # True: a restart elsewhere ends it


@dataclass(frozen=True)
class Stragglers:
    """What a synthetic cluster suffers from. The defaults are assumptions, stated in
    docs/stragglers.md: neither AntDT's paper nor anybody else has published such traces."""

    hardware_share: float = 0.0  # of the workers are of an older generation,
    hardware_factor: float = 1.5  # so many times slower
    node_share: float = 0.0  # of the workers get a noisy neighbour that stays,
    node_factor: float = 4.0  # which makes them so much slower,
    node_start_s: float = 900.0  # beginning within so long from the start
    moment_every_s: float = 0.0  # each worker is slowed for a while, once in so long on average;
    moment_for_s: float = 180.0  # so long on average,
    moment_factors: tuple[float, float] = (1.5, 3.0)  # by a factor between these


SCENARIOS: dict[str, Stragglers] = {
    "transient": Stragglers(moment_every_s=3600.0),
    "persistent": Stragglers(node_share=0.02),
    "deterministic": Stragglers(hardware_share=0.25),
    "mixed": Stragglers(moment_every_s=3600.0, node_share=0.02, hardware_share=0.25),
}


@final
class Trace:
    """The factors of all workers; `advance` moves on in time."""

    def __init__(
        self, hardware: Floats, changes: Sequence[Change], node_share: float, seed: int
    ) -> None:
        self._hardware = hardware
        self._node = np.ones(len(hardware))
        self._moment = np.ones(len(hardware))
        self._changes = sorted(changes)
        self._next = 0
        self._node_share = node_share
        self._random = np.random.default_rng((seed, 2))
        self._node_factor = max((c.factor for c in changes if c.is_of_node), default=1.0)
        self.factors = hardware.copy()

    def advance(self, now_s: float) -> None:
        """Takes in what changed up to now."""
        moved = False
        while self._next < len(self._changes) and self._changes[self._next].time_s <= now_s:
            change = self._changes[self._next]
            (self._node if change.is_of_node else self._moment)[change.worker] = change.factor
            self._next += 1
            moved = True
        if moved:
            self.factors = self._hardware * self._node * self._moment

    def restart(self, worker: int) -> None:
        """The worker moves to another node, which is as likely as any to have a noisy neighbour."""
        is_slow = self._random.random() < self._node_share
        self._node[worker] = self._node_factor if is_slow else 1.0
        self._moment[worker] = 1.0
        self._changes[self._next :] = [
            change
            for change in self._changes[self._next :]
            if not (change.is_of_node and change.worker == worker)
        ]
        self.factors = self._hardware * self._node * self._moment


def synthetic_trace(stragglers: Stragglers, num_workers: int, until_s: float, seed: int) -> Trace:
    """The same for every method that runs on the same seed."""
    random = np.random.default_rng((seed, 1))
    hardware = np.ones(num_workers)
    if stragglers.hardware_share:
        count = max(1, round(stragglers.hardware_share * num_workers))
        old = random.permutation(num_workers)[:count]
        hardware[old] = stragglers.hardware_factor
    changes: list[Change] = []
    if stragglers.node_share:
        count = max(1, round(stragglers.node_share * num_workers))
        for worker in random.permutation(num_workers)[:count]:
            start_s = float(random.uniform(0.0, stragglers.node_start_s))
            changes.append(Change(start_s, int(worker), stragglers.node_factor, True))
    if stragglers.moment_every_s:
        for worker in range(num_workers):
            changes.extend(_moments(stragglers, worker, until_s, random))
    return Trace(hardware, changes, stragglers.node_share, seed)


def _moments(
    stragglers: Stragglers, worker: int, until_s: float, random: np.random.Generator
) -> Iterator[Change]:
    now_s = float(random.exponential(stragglers.moment_every_s))
    while now_s < until_s:
        for_s = float(random.exponential(stragglers.moment_for_s))
        factor = float(random.uniform(*stragglers.moment_factors))
        yield Change(now_s, worker, factor, False)
        yield Change(now_s + for_s, worker, 1.0, False)
        now_s += for_s + float(random.exponential(stragglers.moment_every_s))


def recorded_trace(path: Path, seed: int) -> tuple[Trace, int]:
    """(trace, number of workers) of a CSV file with the columns time_s, worker and slowdown.

    Raises:
        TraceError: no such columns, or a value that is no number above 0.
    """
    changes: list[Change] = []
    names: dict[str, int] = {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = {"time_s", "worker", "slowdown"} - set(reader.fieldnames or ())
        if missing:
            raise TraceError(
                f"{path} has the columns {reader.fieldnames}; {', '.join(sorted(missing))} is "
                "missing. Write time_s,worker,slowdown in the first line"
            )
        for number, row in enumerate(reader, 2):
            try:
                time_s, factor = float(row["time_s"]), float(row["slowdown"])
                if not (factor > 0 and time_s >= 0):
                    raise ValueError
            except (TypeError, ValueError):
                raise TraceError(
                    f"line {number} of {path} says time_s = {row['time_s']} and slowdown = "
                    f"{row['slowdown']}; both are numbers, slowdown above 0. Correct the line"
                ) from None
            worker = names.setdefault(row["worker"], len(names))
            changes.append(Change(time_s, worker, factor, False))
    if not names:
        raise TraceError(f"{path} holds no line after its header: nothing to simulate")
    return Trace(np.ones(len(names)), changes, 0.0, seed), len(names)
