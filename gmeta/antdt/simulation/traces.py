"""How slow each worker is when, from a seed or a recording: its healthy time times three factors,
of its hardware (for ever), its node (until it is restarted elsewhere) and the moment."""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from gmeta.access.errors import AntdtError
from gmeta.antdt.policies.interface import Snapshot
from gmeta.antdt.reports import STRAGGLERS
from gmeta.errors import UserError

Floats = NDArray[np.float64]
MAX_SLOWDOWN = 1e6  # of a recording: a second's step takes eleven days


class TraceError(AntdtError, UserError):
    """A recording cannot be read as one."""


class SpeedChange(NamedTuple):
    """From `time_s` on a worker is slower than healthy by `factor`, until its next change."""

    time_s: float
    worker: int
    factor: float
    cause: Literal["moment", "node", "reader"]  # a restart elsewhere ends the node's


@dataclass(frozen=True)
class Stragglers:
    """What a synthetic cluster suffers from."""

    # The defaults are assumptions, stated in docs/stragglers.md: neither AntDT's paper nor anybody
    # else has published such traces.
    hardware_share: float = 0.0  # of the workers are of an older generation,
    hardware_factor: float = 1.5  # slower by this factor
    node_share: float = 0.0  # of the workers get a noisy neighbour that stays,
    node_factor: float = 4.0  # which makes them slower by this factor,
    node_start_s: float = 900.0  # beginning within this time from the start
    moment_every_s: float = 0.0  # each worker is slowed once in this time on average;
    moment_for_s: float = 180.0  # for this time on average,
    moment_factors: tuple[float, float] = (1.5, 3.0)  # by a factor between these


SCENARIOS: dict[str, Stragglers] = {
    "transient": Stragglers(moment_every_s=3600.0),
    "persistent": Stragglers(node_share=0.02),
    "deterministic": Stragglers(hardware_share=0.25),
    "mixed": Stragglers(moment_every_s=3600.0, node_share=0.02, hardware_share=0.25),
    # Equal workers on a host with other work: each loses its core now and then, for a second.
    "busy": Stragglers(moment_every_s=6.0, moment_for_s=1.0),
}


@final
class Trace:
    """The factors of all workers; `advance` moves on in time."""

    def __init__(
        self, hardware: Floats, changes: Sequence[SpeedChange], node_share: float, seed: int
    ) -> None:
        self._hardware = hardware
        self._factors = {of: np.ones(len(hardware)) for of in ("moment", "node", "reader")}
        self._changes = sorted(changes)
        self._next = 0
        self._node_share = node_share
        self._random = np.random.default_rng((seed, 2))
        self._node_factor = max((c.factor for c in changes if c.cause == "node"), default=1.0)
        self.factors = hardware.copy()  # of the computation
        self.reading = self._factors["reader"]

    def advance(self, now_s: float) -> None:
        """Take in what changed up to now."""
        moved = False
        while self._next < len(self._changes) and self._changes[self._next].time_s <= now_s:
            change = self._changes[self._next]
            self._factors[change.cause][change.worker] = change.factor
            self._next += 1
            moved = True
        if moved:
            self._multiply()

    def restart(self, worker: int) -> None:
        """Move the worker to another node."""
        # The other node is as likely as any to have a noisy neighbour.
        is_slow = self._random.random() < self._node_share
        self._factors["node"][worker] = self._node_factor if is_slow else 1.0
        # What slowed the old process for a while does not follow the new one.
        self._factors["moment"][worker] = 1.0
        self._changes[self._next :] = [
            change
            for change in self._changes[self._next :]
            if not (change.cause == "node" and change.worker == worker)
        ]
        self._multiply()

    def _multiply(self) -> None:
        self.factors = self._hardware * self._factors["node"] * self._factors["moment"]


def synthetic_trace(stragglers: Stragglers, num_workers: int, until_s: float, seed: int) -> Trace:
    """Return a trace that is the same for every method that runs on the same seed."""
    random = np.random.default_rng((seed, 1))
    hardware = np.ones(num_workers)
    if stragglers.hardware_share:
        count = max(1, round(stragglers.hardware_share * num_workers))
        old = random.permutation(num_workers)[:count]
        hardware[old] = stragglers.hardware_factor
    changes: list[SpeedChange] = []
    if stragglers.node_share:
        count = max(1, round(stragglers.node_share * num_workers))
        for worker in random.permutation(num_workers)[:count]:
            start_s = float(random.uniform(0.0, stragglers.node_start_s))
            changes.append(SpeedChange(start_s, int(worker), stragglers.node_factor, "node"))
    if stragglers.moment_every_s:
        for worker in range(num_workers):
            changes.extend(_moments(stragglers, worker, until_s, random))
    return Trace(hardware, changes, stragglers.node_share, seed)


def _moments(
    stragglers: Stragglers, worker: int, until_s: float, random: np.random.Generator
) -> Iterator[SpeedChange]:
    now_s = float(random.exponential(stragglers.moment_every_s))
    while now_s < until_s:
        for_s = float(random.exponential(stragglers.moment_for_s))
        factor = float(random.uniform(*stragglers.moment_factors))
        yield SpeedChange(now_s, worker, factor, "moment")
        yield SpeedChange(now_s + for_s, worker, 1.0, "moment")
        now_s += for_s + float(random.exponential(stragglers.moment_every_s))


def recorded_trace(path: Path, seed: int) -> tuple[Trace, int]:
    """Return (trace, number of workers) of a recording: a CSV file with the columns time_s, worker
    and slowdown, or the decision log (.jsonl) of a real job. Raise TraceError."""
    names: dict[str, int] = {}
    rows = _rows_of_log(path) if path.suffix == ".jsonl" else _rows_of_table(path)
    changes = [
        SpeedChange(time_s, names.setdefault(worker, len(names)), factor, "moment")
        for time_s, worker, factor in rows
    ]
    if not names:
        raise TraceError(
            f"{path} holds no line after its header: nothing to simulate. Give another recording"
        )
    return Trace(np.ones(len(names)), changes, 0.0, seed), len(names)


def _rows_of_table(path: Path) -> Iterator[tuple[float, str, float]]:
    """Yield (time_s, worker, slowdown) of each line."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
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
                if not (0 < factor <= MAX_SLOWDOWN and 0 <= time_s < math.inf):
                    raise ValueError
            except (TypeError, ValueError):
                raise TraceError(
                    f"line {number} of {path} says time_s = {row['time_s']} and slowdown = "
                    f"{row['slowdown']}; both are numbers, slowdown above 0 and at most "
                    f"{MAX_SLOWDOWN:,.0f}. Correct the line"
                ) from None
            yield time_s, row["worker"], factor


def _rows_of_log(path: Path) -> Iterator[tuple[float, str, float]]:
    """Yield (time_s, worker, slowdown) of each worker at each evaluation of the log."""
    began_s: float | None = None
    slow: set[str] = set()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            # The log has a line whenever a verdict changed, so no verdict is missed.
            snapshot = Snapshot.from_json(json.loads(line)["snapshot"])
            usual = median(worker.health.tasks_per_s_newest for worker in snapshot.workers)
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(
                f"line {number} of {path} is none of a decision log ({error!r}). Name the file "
                "that gmeta shard-service wrote with --decisions"
            ) from error
        began_s = snapshot.now_s if began_s is None else began_s
        for health in (worker.health for worker in snapshot.workers):
            name, time_s = health.worker_id, snapshot.now_s - began_s
            if health.verdict not in STRAGGLERS:
                slow.discard(name)
                yield time_s, name, 1.0
                continue
            if name not in slow:
                slow.add(name)
                # It was slow before it was found: the slowdown begins when the slowness did.
                time_s = max(0.0, time_s - health.slow_for_s)
            yield time_s, name, max(usual / max(health.tasks_per_s_newest, 1e-9), 1.0)
