"""A synchronous job on a simulated cluster, by one method.

Shape suffix: W ranks or workers"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gmeta.antdt.client.agent import CHANGE_AFTER_S, CHANGE_RATIO
from gmeta.antdt.monitor import Monitor
from gmeta.antdt.policies import find_policy
from gmeta.antdt.policies.interface import Decision
from gmeta.antdt.policies.task_split import proportional_split
from gmeta.antdt.reports import Report
from gmeta.antdt.simulation.job_config import JobConfig, JobOutcome
from gmeta.antdt.simulation.simulated_data import SimulatedData
from gmeta.antdt.simulation.traces import Floats, Trace
from gmeta.antdt.stragglers.controller import Controller, equal_shares

Ints = NDArray[np.int64]


@final
class _Cluster:
    """Clock, speeds and data that every method shares."""

    def __init__(self, config: JobConfig, trace: Trace) -> None:
        self.config = config
        self.trace = trace
        self.now_s = 0.0
        num_tasks = config.num_steps * config.tasks_per_step
        per_shard = config.steps_per_shard * config.tasks_per_worker
        self.data = SimulatedData(num_tasks, per_shard, config.num_workers)
        self.tasks_left = num_tasks
        # A random stream of its own: the traces have 1 and 2, so noise moves no straggler.
        self._random = np.random.default_rng((config.seed, 3))

    def compute_s(self, tasks_W: Ints) -> Floats:
        """Return how long each worker computes its tasks, as slow as it is now; 0 for no tasks."""
        self.trace.advance(self.now_s)
        # Of median 1, and never below 0.
        noise_W = self._random.lognormal(0.0, self.config.jitter, len(tasks_W))
        healthy_W = self.config.overhead_ms + tasks_W * self.config.task_ms
        return np.where(tasks_W > 0, healthy_W * self.trace.factors * noise_W / 1000, 0.0)

    def step_s(self, tasks_W: Ints, compute_W: Floats) -> Floats:
        """Return each worker's own time."""
        # A worker waits for its reader where reading takes longer than computing.
        return np.maximum(compute_W, tasks_W * self.config.read_ms * self.trace.reading / 1000)

    def take(self, shares_W: Ints) -> Ints:
        """Return the tasks of the next step, as many as each worker gets of its share."""
        return self.data.take_step(shares_W, self.now_s)

    def finish(self, tasks_W: Ints) -> None:
        """Put the step's tasks into the model."""
        self.data.finish_step(tasks_W, self.now_s)
        self.tasks_left -= int(tasks_W.sum())


def run_static(config: JobConfig, trace: Trace) -> JobOutcome:
    """Run BSP: equal shares, everybody waits for the slowest."""
    return _run_steps(_Cluster(config, trace), lambda step_s, tasks_W: None, 0)


def run_backup_workers(config: JobConfig, trace: Trace) -> JobOutcome:
    """Run steps that end without the last few workers, whose tasks are done again later."""
    dropped = round(config.backup_share * config.num_workers)
    return _run_steps(_Cluster(config, trace), lambda step_s, tasks_W: None, dropped)


def run_lb_bsp(config: JobConfig, trace: Trace) -> JobOutcome:
    """Run LB-BSP (Chen et al., 2020): shares in proportion to the speed of the last steps."""
    # All workers know the speeds at once and at no cost; new shares take effect as late as with the
    # other methods. No worker is ever restarted.
    return _run_lb_bsp(config.actions_take_steps, config, trace)


def run_lb_bsp_at_once(config: JobConfig, trace: Trace) -> JobOutcome:
    """Run LB-BSP with shares in force in the very next step."""
    # A bound, not a method: no trainer that sends ids ahead can do so.
    return _run_lb_bsp(0, config, trace)


def _run_lb_bsp(take_steps: int, config: JobConfig, trace: Trace) -> JobOutcome:
    speeds_W = np.zeros(config.num_workers)
    equal_W = np.full(config.num_workers, config.tasks_per_worker)
    pending = deque([equal_W] * take_steps)

    def balance(step_s: Floats, tasks_W: Ints) -> Ints:
        # Workers without a task keep the speed that was known of them.
        seen_W = np.divide(tasks_W, step_s, out=speeds_W.copy(), where=step_s > 0)
        # An exponential mean, with weight 1/2 on the newest step.
        speeds_W[:] = np.where(speeds_W > 0, (speeds_W + seen_W) / 2, seen_W)
        # A speed of 0 would get no task, and stay unknown for ever.
        known_W = np.maximum(speeds_W, 1e-9).tolist()
        shares = proportional_split(config.tasks_per_step, known_W, config.min_tasks)
        pending.append(np.array(shares))
        return pending.popleft()

    return _run_steps(_Cluster(config, trace), balance, 0)


def _run_steps(
    cluster: _Cluster, rebalance: Callable[[Floats, Ints], Ints | None], dropped: int
) -> JobOutcome:
    """Run steps that all workers take together until the data ends."""
    config = cluster.config
    shares_W = np.full(config.num_workers, config.tasks_per_worker)
    num_steps = 0
    while not cluster.data.finished:
        tasks_W = cluster.take(shares_W)
        step_s = cluster.step_s(tasks_W, cluster.compute_s(tasks_W))
        ends_s = _end_of_step(step_s, dropped)
        cluster.now_s += ends_s
        cluster.finish(np.where(step_s <= ends_s, tasks_W, 0))
        num_steps += 1
        balanced_W = rebalance(step_s, tasks_W)
        shares_W = shares_W if balanced_W is None else balanced_W
    return JobOutcome(cluster.now_s, num_steps, 0, 0)


def _end_of_step(step_s: Floats, dropped: int) -> float:
    """Return when all but the last `dropped` of the workers with tasks are done."""
    busy_s = np.sort(step_s[step_s > 0])
    return float(busy_s[-1 - dropped] if len(busy_s) > dropped else busy_s[-1])


def run_antdt(
    policy: str, config: JobConfig, trace: Trace, log: Callable[[str], object] | None = None
) -> JobOutcome:
    """Run AntDT: the monitor and the controller of the service, with the policy named."""
    return _GovernedJob(policy, config, trace, log).run()


@final
class _GovernedJob:
    """A synchronous job whose shares and processes a Controller decides about."""

    def __init__(
        self, policy: str, config: JobConfig, trace: Trace, log: Callable[[str], object] | None
    ) -> None:
        self.config = config
        self.cluster = _Cluster(config, trace)
        self.monitor = Monitor(config.monitor, 0.0)
        controlled = replace(
            config.controller,
            policy=policy,
            dry_run=False,
            synchronous=True,
            min_tasks=config.min_tasks,
            hold_windows=config.hold_windows,
            restart_cost_s=config.restart_cost_s,
            restart_stops_job=config.restart_stops_job,
        )
        self.controller = Controller(controlled, find_policy(policy), log, config.monitor.window_s)
        self.names = [f"w{worker}" for worker in range(config.num_workers)]
        shares = equal_shares(config.tasks_per_step, self.names)
        self.shares_W = np.array([shares[name] for name in self.names])
        self.pending: list[tuple[int, Ints]] = []  # (step, shares from that step on)
        self.back_s = np.zeros(config.num_workers)  # when a restarted worker works again
        self.processes = [0] * config.num_workers
        self.totals: dict[str, Any] = {
            "steps": np.zeros(config.num_workers, dtype=np.int64),
            "tasks": np.zeros(config.num_workers, dtype=np.int64),
            "compute_ms": np.zeros(config.num_workers),
            "data_wait_ms": np.zeros(config.num_workers),
        }
        self.news_s = np.zeros((3, config.num_workers))  # tasks, own time, wall time
        self.usual_s = np.zeros(config.num_workers)  # own time per task
        self.num_steps = self.num_adjustments = self.num_restarts = 0
        for name in self.names:
            self.monitor.observe(name, "p0", Report())

    def run(self) -> JobOutcome:
        """Run to the end of the data."""
        cluster, config = self.cluster, self.config
        next_heartbeat_s = config.heartbeat_s
        while not cluster.data.finished:
            while self.pending and self.pending[0][0] <= self.num_steps:
                self.shares_W = self.pending.pop(0)[1]
            here_W = self.back_s <= cluster.now_s
            # All are restarting: nothing happens until the first of them is back.
            if not here_W.any():
                cluster.now_s = float(self.back_s.min())
                continue
            tasks_W = cluster.take(np.where(here_W, self.shares_W, 0))
            compute_s = cluster.compute_s(tasks_W)
            step_s = cluster.step_s(tasks_W, compute_s)
            # A step without a task takes no time: the clock would stand still for ever.
            if not tasks_W.any():  # what is left is on its way back from a restart
                cluster.now_s = float(self.back_s[self.back_s > cluster.now_s].min())
                continue
            # BSP: a step is as long as its slowest worker.
            cluster.now_s += float(step_s.max())
            cluster.finish(tasks_W)
            self.num_steps += 1
            self.totals["steps"] += here_W
            self.totals["tasks"] += tasks_W
            self.totals["compute_ms"] += 1000 * compute_s
            self.totals["data_wait_ms"] += 1000 * (step_s - compute_s)
            if cluster.now_s >= next_heartbeat_s or self._has_changed_pace(tasks_W, step_s):
                next_heartbeat_s = cluster.now_s + config.heartbeat_s
                self._report(here_W)
                if self.monitor.close_window(cluster.now_s):
                    self._control()
        return JobOutcome(cluster.now_s, self.num_steps, self.num_adjustments, self.num_restarts)

    def _has_changed_pace(self, tasks_W: Ints, step_s: Floats) -> bool:
        """Return whether any worker became much slower or faster, as in WorkerAgent."""
        # Then all workers report after this step.
        self.news_s += np.stack([tasks_W, step_s, np.full(len(step_s), step_s.max())])
        done_W, own_s, wall_s = self.news_s
        if wall_s.max() < CHANGE_AFTER_S:
            return False
        new_ms_W = np.divide(own_s, done_W, out=self.usual_s.copy(), where=done_W > 0)
        ratio_W = np.divide(
            new_ms_W, self.usual_s, out=np.ones_like(new_ms_W), where=self.usual_s > 0
        )
        self.usual_s = new_ms_W
        self.news_s[:] = 0.0
        return bool((np.maximum(ratio_W, 1 / ratio_W) >= CHANGE_RATIO).any())

    def _report(self, here_W: NDArray[np.bool_]) -> None:
        columns = [total.tolist() for total in self.totals.values()]  # in the order of Report
        for worker, report in enumerate(zip(*columns, strict=True)):
            # A worker that restarts reports nothing: it would look as if it stood still.
            if here_W[worker]:
                process = f"p{self.processes[worker]}"
                self.monitor.observe(self.names[worker], process, Report(*report))

    def _control(self) -> None:
        cluster = self.cluster
        step_s = cluster.now_s / max(1, self.num_steps)
        remaining_s = cluster.tasks_left / self.config.tasks_per_step * step_s
        health = self.monitor.health
        # As in the governor: no share can be planned for workers that are not judged yet.
        if len(health) < len(self.names):
            return
        snapshot = self.controller.snapshot(
            health, self.num_steps, self.config.tasks_per_step, remaining_s, cluster.now_s
        )
        for decision, allowed, _ in self.controller.decide(snapshot):
            if allowed:
                self._apply(decision)

    def _apply(self, decision: Decision) -> None:
        if decision.kind == "ADJUST_BS":
            shares_W = np.array([int(decision.parameters[name]) for name in self.names])
            self.pending.append((self.num_steps + self.config.actions_take_steps, shares_W))
            self.num_adjustments += 1
        elif decision.kind == "KILL_RESTART":
            self._restart(self.names.index(decision.worker_id))
        elif decision.kind == "EXCLUDE":
            self.back_s[self.names.index(decision.worker_id)] = float("inf")

    def _restart(self, worker: int) -> None:
        cluster = self.cluster
        back_s = cluster.now_s + self.config.restart_cost_s
        if self.config.restart_stops_job:
            self.back_s[:] = back_s
        self.back_s[worker] = back_s
        self.processes[worker] += 1
        # A process counts from its own start.
        for total in self.totals.values():
            total[worker] = 0
        self.monitor.observe(self.names[worker], f"p{self.processes[worker]}", Report())
        cluster.trace.restart(worker)
        cluster.data.restart(worker, self.processes[worker], cluster.now_s)
        self.num_restarts += 1
