"""Asynchronous training and scoring in simulated time: each worker pulls shards and waits for no
other; with or without second leases for the last shards of slow workers."""

import heapq
from dataclasses import replace
from typing import final

import numpy as np

from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger.offers import WAIT_RETRY_MS
from gmeta.antdt.monitor import Monitor
from gmeta.antdt.policies import find_policy
from gmeta.antdt.reports import Report
from gmeta.antdt.simulation.job_config import JobConfig, JobOutcome
from gmeta.antdt.simulation.simulated_data import SimulatedData
from gmeta.antdt.simulation.traces import Trace
from gmeta.antdt.stragglers.controller import Controller
from gmeta.antdt.stragglers.governor import read_backups

HEARTBEAT = -1  # in the place of a worker


def run_pulling(config: JobConfig, trace: Trace) -> JobOutcome:
    """Run as asynchronous training does; the last shards of slow workers are waited for."""
    return _PullingJob(config, trace, with_backups=False).run()


def run_pulling_with_backups(config: JobConfig, trace: Trace) -> JobOutcome:
    """Run with idle workers doing the last shards of slow ones too (AntDT-ND)."""
    # Without restarts, and in a job whose results can be discarded: the first to complete counts.
    return _PullingJob(config, trace, with_backups=True).run()


@final
class _PullingJob:
    """A queue of (time, worker): when a shard is through, or an idle worker asks again."""

    def __init__(self, config: JobConfig, trace: Trace, with_backups: bool) -> None:
        self.config = config
        self.trace = trace
        self.with_backups = with_backups
        self.per_shard = config.steps_per_shard * config.tasks_per_worker
        num_tasks = config.num_steps * config.tasks_per_step
        self.data = SimulatedData(num_tasks, self.per_shard, config.num_workers, with_backups)
        self.noise = np.random.default_rng((config.seed, 4))
        self.queue = [(0.0, worker) for worker in range(config.num_workers)]
        self.num_shards = 0
        # Of each worker's shard in hand: when it began, how long it takes, its tasks (0: none).
        self.in_hand: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] * config.num_workers
        self.totals = [Report()] * config.num_workers  # of the shards that are through
        self.monitor = Monitor(config.monitor, 0.0)
        controlled = replace(
            config.controller, policy="nd", dry_run=False, synchronous=False, restarts_per_worker=0
        )
        self.controller = Controller(controlled, find_policy("nd"))

    def run(self) -> JobOutcome:
        """Run to the end of the data."""
        if self.with_backups:
            self._beat(0.0)
        now_s = 0.0
        while True:
            now_s, worker = heapq.heappop(self.queue)
            if worker == HEARTBEAT:
                self._beat(now_s)
                continue
            self._finish(worker, now_s)
            if self.data.finished:
                break
            self._begin(worker, now_s)
        steps = self.num_shards * self.config.steps_per_shard // self.config.num_workers
        return JobOutcome(now_s, steps, 0, 0)

    def _begin(self, worker: int, now_s: float) -> None:
        config = self.config
        self.trace.advance(now_s)
        num_tasks = self.data.take_for(worker, self.per_shard, now_s)
        if num_tasks:
            steps = -(-num_tasks // config.tasks_per_worker)
            healthy_s = (steps * config.overhead_ms + num_tasks * config.task_ms) / 1000
            # A shard's time is the sum of its steps', whose noise averages out.
            noise = self.noise.lognormal(0.0, config.jitter / steps**0.5)
            takes_s = healthy_s * float(self.trace.factors[worker]) * noise
            self.in_hand[worker] = (now_s, takes_s, num_tasks)
            heapq.heappush(self.queue, (now_s + takes_s, worker))
            self.num_shards += 1
        elif self.with_backups:
            heapq.heappush(self.queue, (now_s + WAIT_RETRY_MS / 1000, worker))

    def _finish(self, worker: int, now_s: float) -> None:
        """Complete the worker's shard."""
        # If another worker completed it first, this one learns so only here.
        num_tasks = self.in_hand[worker][2]
        if num_tasks:
            self.totals[worker] = self._report(worker, now_s)
            self.in_hand[worker] = (now_s, 0.0, 0)
            self.data.finish_of(worker, num_tasks, now_s)

    def _report(self, worker: int, now_s: float) -> Report:
        """Return the totals up to now, with the tasks done of the shard in hand."""
        began_s, takes_s, num_tasks = self.in_hand[worker]
        done = self.totals[worker]
        if not num_tasks:
            return done
        # 1e-9: a shard that is through just now has all of its tasks, whatever the last bit.
        tasks = int(num_tasks * min(1.0, (now_s - began_s) / takes_s) + 1e-9)
        compute_ms = done.compute_ms + 1000 * takes_s * tasks / num_tasks
        return Report(done.step + tasks, done.tasks_done + tasks, compute_ms)

    def _beat(self, now_s: float) -> None:
        """Have all report; once a window is over, pass the controller's backups to the ledger."""
        heapq.heappush(self.queue, (now_s + self.config.heartbeat_s, HEARTBEAT))
        for worker in range(self.config.num_workers):
            self.monitor.observe(f"w{worker}", "p0", self._report(worker, now_s))
        if not self.monitor.close_window(now_s):
            return
        ledger = self.data.ledger
        snapshot = self.controller.snapshot(
            self.monitor.health, 0, 0, float("inf"), now_s, read_backups(ledger.state)
        )
        for decision, allowed, _ in self.controller.decide(snapshot):
            if allowed and decision.kind == "BACKUP_WORKERS":
                ledger.apply(cmd.BackUp(str(now_s), decision.worker_id), now_s)
