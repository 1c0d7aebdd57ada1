"""The loop inside the service: reports from the ledger to the monitor, verdicts to the controller,
its actions back to the ledger, where heartbeats fetch them."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, final

from gmeta.access.errors import AntdtError, RefusedError
from gmeta.access.log import LOGGER_NAME, event
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger.offers import leases_to_back_up
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.model import MAX_EPOCHS, ShardState
from gmeta.antdt.monitor import CUT_AFTER, Monitor
from gmeta.antdt.phase import Phase, phase_of, present_workers, silent_workers
from gmeta.antdt.policies import find_policy
from gmeta.antdt.policies.interface import Decision
from gmeta.antdt.reports import Report, WorkerHealth
from gmeta.antdt.storage.request import LedgerView, Request
from gmeta.antdt.stragglers.controller import Controller, Ruling
from gmeta.antdt.stragglers.straggler_config import StragglerConfig
from gmeta_keys.translate_errors import format_foreign_error, translate_errors
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb

# For types alone: at run time it would lengthen the longest chain of imports.
if TYPE_CHECKING:
    from gmeta.antdt.ledger.ledger import Ledger

MAX_TICK_S = 0.2  # within DECIDED_AFTER_S of the client
STEPS_AHEAD = 1  # a global action takes effect after the newest step that anybody reported
HISTORY_WINDOWS = 120  # of speeds, for the dashboard
HISTORY_DECISIONS = 200
HISTORY_SHARES = 120  # changes of shares
_PASSES = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")  # the same request may succeed later


class LedgerReading(NamedTuple):
    """The parts of the ledger that one tick reads."""

    service_epoch: int
    generation: int
    # worker -> (incarnation, report as it came; empty before the first)
    workers: dict[str, tuple[str, tuple[float, ...]]]
    silent: frozenset[str]  # not heard from for longer than a lease lives
    phase: Phase
    tasks_left: int  # of all epochs; of present ones where the number of epochs is open
    backups: dict[str, tuple[int, int]]  # worker -> last shards to back up, and backed up


class RulingRecord(NamedTuple):
    """One ruling, for people."""

    wall_s: float
    step: int
    kind: str
    worker_id: str
    reason: str
    allowed: bool
    note: str


def read_ledger(ledger: "Ledger", now_s: float) -> LedgerReading:
    """Return the workers of the present generation, and the data still to train."""
    state = ledger.state
    workers = {}
    for name in present_workers(ledger):
        seen = ledger.seen.get(name)
        workers[name] = (state.workers[name].incarnation, seen.report if seen else ())
    left = 0
    for table in state.tables.values():
        open_shards = table.counts[ShardState.READY] + table.counts[ShardState.DOING]
        left += open_shards * table.spec.units_per_shard - sum(table.units_done.values())
        if table.spec.num_epochs < MAX_EPOCHS:  # else the job decides when to stop
            left += (table.spec.num_epochs - 1 - table.epoch) * table.spec.num_units
    silent = silent_workers(ledger, now_s)
    return LedgerReading(
        state.service_epoch,
        state.generation,
        workers,
        silent,
        phase_of(ledger, silent),
        max(0, left),
        read_backups(state),
    )


def read_backups(state: LedgerState) -> dict[str, tuple[int, int]]:
    """Return for each worker how many of its shards can be backed up, and how many are."""
    if not any(table.spec.speculative for table in state.tables.values()):
        return {}
    backups = {}
    for name, worker in state.workers.items():
        to_back_up = len(leases_to_back_up(state, worker))
        backed_up = len(state.backups.wanted & worker.tokens)
        if to_back_up or backed_up:
            backups[name] = (to_back_up, backed_up)
    return backups


@final
class Governor:
    """Owns a monitor and a controller; `tick` does one round, `start` does so in a thread."""

    def __init__(
        self,
        config: StragglerConfig,
        ask: Callable[[Request], Any],
        log: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the thread; `ask` answers a request to the ledger. Raise ConfigError."""
        self.config = config
        policy, window_s = find_policy(config.controller.policy), config.monitor.window_s
        self.controller = Controller(config.controller, policy, log, window_s)
        self.monitor = Monitor(config.monitor, clock())
        self.ruling_records: deque[RulingRecord] = deque(maxlen=HISTORY_DECISIONS)
        self.counts: Counter[tuple[str, str]] = Counter()  # (kind, posted or held back)
        self.speeds: dict[str, deque[float]] = {}
        # (wall time in s, tasks a step by worker), a new one where they changed.
        self.share_changes: deque[tuple[float, dict[str, int]]] = deque(maxlen=HISTORY_SHARES)
        self.step = 0
        self.tasks_per_step = 0
        self.tasks_per_s = 0.0
        self.silent: frozenset[str] = frozenset()
        self.phase: Phase = "waiting"
        self.num_windows = 0
        self._ask = ask
        self._clock = clock
        self._generation = 0
        self._tasks_seen: tuple[float, int] | None = None  # (time, tasks done) at the last news
        self._tasks_gained = 0  # by the last news
        self._num_actions = 0
        self._held_back: set[tuple[str, str]] = set()  # (kind, worker) of the last evaluation
        # The controller takes these for done, so one that the store refused is posted again. A
        # newer one of its kind replaces it, as in the ledger.
        self._unposted: dict[tuple[str, str], cmd.Command] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="antdt-governor", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def tick(self) -> None:
        """Take in the newest reports; judge and decide when a window is over."""
        reading: LedgerReading = self._ask(LedgerView(read_ledger))
        if reading.generation != self._generation:
            self._start_over(reading)
        self.silent, self.phase = reading.silent, reading.phase
        if self.phase != "running":
            self.tasks_per_s, self._tasks_seen = 0.0, None
        # A worker's state before it fell silent says nothing about now, nor about the others.
        self.monitor.forget(self.silent)
        for name, (incarnation, report) in reading.workers.items():
            if report and name not in self.silent:
                totals = Report(int(report[0]), int(report[1]), *report[2:6])
                self.monitor.observe(name, incarnation, totals)
        now_s = self._clock()
        if self.monitor.close_window(now_s):
            self.num_windows += 1
            # Nothing is known of a job that stands still but what it did before.
            if self.phase == "running":
                self._note_speed(reading, now_s)
                self._control(reading, now_s)
        self._post_all()

    @property
    def health(self) -> dict[str, WorkerHealth]:
        """Return the health of every judged worker."""
        # A copy: other threads iterate over it.
        return dict(self.monitor.health)

    def _run(self) -> None:
        # Twice within the shortest window, so that none is cut much later than it may be.
        tick_s = min(MAX_TICK_S, CUT_AFTER * self.config.monitor.window_s / 2)
        reported = ""
        while not self._stopping.wait(tick_s):
            try:
                # Whatever it is: a thread that ended would leave stragglers alone in silence.
                with translate_errors(
                    lambda error: AntdtError(format_foreign_error(error)), AntdtError
                ):
                    self.tick()
            # The service is recovering, or shutting down: not worth a line.
            except RefusedError as error:
                event(logging.DEBUG, "governor_waits", message=str(error))
            except AntdtError as error:
                if str(error) != reported:  # else it would be logged at each tick
                    logging.getLogger(LOGGER_NAME).error("governor_failed", exc_info=error)
                reported = str(error)

    def _start_over(self, reading: LedgerReading) -> None:
        """Give the ranks of a restarted job equal shares and an empty history."""
        self._generation = reading.generation
        self.monitor = Monitor(self.config.monitor, self._clock())
        self.controller.start_over()
        self._unposted = {}
        self._held_back = set()
        self.speeds = {}
        self.step = self.tasks_per_step = 0
        self._tasks_seen = None

    def _note_speed(self, reading: LedgerReading, now_s: float) -> None:
        reports = [report for _, report in reading.workers.values() if report]
        self.step = max((int(report[0]) for report in reports), default=0)
        tasks_done = int(sum(report[1] for report in reports))
        if self._tasks_seen is None or tasks_done < self._tasks_seen[1]:
            # The first look, or a worker began anew: the difference says nothing.
            self._tasks_seen = (now_s, tasks_done)
        elif tasks_done > self._tasks_seen[1]:
            self._tasks_gained = tasks_done - self._tasks_seen[1]
            self.tasks_per_s = self._tasks_gained / (now_s - self._tasks_seen[0])
            self._tasks_seen = (now_s, tasks_done)
        else:
            # A step may outlast a window; if it takes longer than the last one, the job is slower.
            slower = self._tasks_gained / (now_s - self._tasks_seen[0])
            self.tasks_per_s = min(self.tasks_per_s, slower)
        shares = {name: int(r[-1]) for name, (_, r) in reading.workers.items() if r and r[-1]}
        if shares and (not self.share_changes or self.share_changes[-1][1] != shares):
            self.share_changes.append((time.time(), shares))
        for name, health in self.monitor.health.items():
            self.speeds.setdefault(name, deque(maxlen=HISTORY_WINDOWS)).append(health.tasks_per_s)

    def _control(self, reading: LedgerReading, now_s: float) -> None:
        health = self.monitor.health
        # Somebody is not judged yet, or silent: its share of a step cannot be planned.
        is_early = self.config.controller.synchronous and set(health) != set(reading.workers)
        if not health or is_early:
            return
        shares = {name: int(r[-1]) if r else 0 for name, (_, r) in reading.workers.items()}
        if not self.tasks_per_step and all(shares.values()):
            self.tasks_per_step = sum(shares.values())
            # The shares in force: unequal ones may have been given by the service before this one.
            self.controller.shares = shares
        left_s = reading.tasks_left / self.tasks_per_s if self.tasks_per_s else float("inf")
        snapshot = self.controller.snapshot(
            health, self.step, self.tasks_per_step, left_s, now_s, reading.backups
        )
        held_back: set[tuple[str, str]] = set()
        for ruling in self.controller.decide(snapshot):
            decision, allowed, _ = ruling
            key = decision.kind, decision.worker_id
            self.counts[decision.kind, "posted" if allowed else "held_back"] += 1
            if allowed:
                self._unposted[key] = self._command(decision, reading)
            else:
                held_back.add(key)
            # What is held back is held back again at each window; saying so once is enough.
            if allowed or key not in self._held_back:
                self._record_ruling(ruling)
        self._held_back = held_back

    def _record_ruling(self, ruling: Ruling) -> None:
        (kind, worker_id, _, reason), allowed, note = ruling
        record = RulingRecord(time.time(), self.step, kind, worker_id, reason, allowed, note)
        self.ruling_records.append(record)
        fields = record._asdict()
        del fields["wall_s"]  # the log has a time of its own
        event(logging.INFO, "decision", **fields)

    def _command(self, decision: Decision, reading: LedgerReading) -> cmd.Command:
        self._num_actions += 1
        action_id = f"{reading.service_epoch}.{reading.generation}.{self._num_actions}"
        if decision.kind == "EXCLUDE":
            return cmd.Drain(f"exclude-{action_id}", decision.worker_id, False)
        if decision.kind == "BACKUP_WORKERS":
            return cmd.BackUp(action_id, decision.worker_id)
        is_global = decision.kind in ("ADJUST_BS", "ADJUST_LR")
        return cmd.PostAction(
            decision.worker_id,
            action_id,
            pb.Action.Kind.Value(f"KIND_{decision.kind}"),
            self.step + STEPS_AHEAD if is_global else 0,
            dict(decision.parameters),
        )

    def _post_all(self) -> None:
        """Post what was decided. Raise RefusedError while the store takes nothing."""
        for key, command in list(self._unposted.items()):
            try:
                self._ask(command)
            except RefusedError as error:
                if error.code in _PASSES:
                    # The next tick posts the rest.
                    raise
                event(logging.WARNING, "action_refused", kind=key[0], message=str(error))
            del self._unposted[key]
