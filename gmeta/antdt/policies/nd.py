"""AntDT-ND, for clusters shared with other jobs (arXiv 2404.09679): rebalance around workers that
are slow now, restart elsewhere those that stay slow."""

from collections.abc import Sequence, Set
from statistics import median

from gmeta.antdt.policies.interface import ControllerConfig, Decision, Snapshot, WorkerView
from gmeta.antdt.policies.task_split import Speed, improve_split
from gmeta.antdt.reports import STRAGGLERS

USUAL_RATIO = 1.25  # a window that is not slower than this is noise


def decide(snapshot: Snapshot, config: ControllerConfig) -> Sequence[Decision]:
    """Return restarts that pay, else new shares; backups where the job is not synchronous."""
    decisions = _restarts(snapshot, config)
    # Restarts beyond the hour's budget are reported but held back: their workers stay in the job,
    # and its batches must still be balanced around them.
    budget = config.restarts_per_hour(len(snapshot.workers)) - snapshot.restarts_last_hour
    restarted = {decision.worker_id for decision in decisions[: max(0, budget)]}
    if not (restarted and config.restart_stops_job):
        decisions += _adjustment(snapshot, config)
        if not config.synchronous:
            decisions += _backups(snapshot, restarted)
    return decisions


def _backups(snapshot: Snapshot, restarted: Set[str]) -> list[Decision]:
    """Return the backups, slowest worker first."""
    # Free of cost: the workers that do such a shard as well have nothing else to do.
    candidates = (worker for worker in snapshot.stragglers if worker.to_back_up)
    slow = [worker for worker in candidates if worker.health.worker_id not in restarted]
    return [
        Decision(
            "BACKUP_WORKERS",
            worker.health.worker_id,
            {},
            f"{worker.health.verdict} straggler ({worker.health.cause}) with {worker.to_back_up} "
            f"of the last shards: {worker.health.evidence}",
        )
        for worker in sorted(slow, key=lambda w: w.health.ratio, reverse=True)
    ]


def _restarts(snapshot: Snapshot, config: ControllerConfig) -> list[Decision]:
    """Return the restarts that pay, worst worker first."""
    active = snapshot.active
    if not active:
        return []
    # What a restarted worker is expected to do: the median, which stragglers do not lower.
    typical = median(worker.health.tasks_per_s_long for worker in active)
    total_tasks_per_s = sum(worker.health.tasks_per_s for worker in active)
    decisions = []
    slow = [w for w in snapshot.stragglers if w.health.verdict == "persistent"]
    for worker in sorted(slow, key=lambda w: w.health.ratio, reverse=True):
        if worker.restarts >= config.restarts_per_worker:
            continue
        # By ratio: it includes what a slow link costs, which the speed does not.
        won_tasks_per_s = typical - typical / worker.health.ratio
        # While a process restarts, the others wait for it if all ranks take each step together.
        stopped = total_tasks_per_s if config.restart_stops_job else worker.health.tasks_per_s
        cost_tasks = config.restart_cost_s * stopped
        # What is won begins after the restart.
        won_tasks = won_tasks_per_s * max(0.0, snapshot.remaining_s - config.restart_cost_s)
        # A restart pays if the speed won until the end of the job is worth more tasks.
        if won_tasks > cost_tasks:
            reason = (
                f"persistent straggler ({worker.health.cause}): {worker.health.evidence}; a "
                f"restart costs {cost_tasks:.0f} tasks and wins {won_tasks:.0f}"
            )
            decisions.append(Decision("KILL_RESTART", worker.health.worker_id, {}, reason))
    return decisions


def _adjustment(snapshot: Snapshot, config: ControllerConfig) -> list[Decision]:
    """Return new shares when a worker is slow or the shares are still unequal from before."""
    active = snapshot.to_split
    if not active:
        return []
    shares = [worker.tasks_per_step for worker in active]
    # Shares are equal but for the remainder: if nobody is slow there is nothing to give back.
    if not snapshot.stragglers and max(shares) - min(shares) <= 1:
        return []
    tasks_per_s = [_tasks_per_s(worker, bool(snapshot.stragglers)) for worker in active]
    times_ms = zip(tasks_per_s, _overheads_ms(active), strict=True)
    speeds = [Speed(1000 / v, overhead_ms) for v, overhead_ms in times_ms]
    better = improve_split(
        shares, snapshot.tasks_per_step, speeds, config.min_tasks, config.min_gain
    )
    if better is None:
        return []
    parameters = {
        worker.health.worker_id: float(share)
        for worker, share in zip(active, better.shares, strict=True)
    }
    slow = ", ".join(
        f"{health.worker_id} ({health.verdict}, {health.cause}) {worker.tasks_per_step} to "
        f"{parameters[health.worker_id]:.0f} tasks"
        for worker in snapshot.stragglers[:5]
        for health in [worker.health]
    )
    more = len(snapshot.stragglers) - 5
    reason = (
        f"the slowest share takes {better.now_ms:.0f} ms, balanced {better.then_ms:.0f} ms; slow: "
        f"{slow or 'nobody any more'}{f' and {more} more' if more > 0 else ''}"
    )
    return [Decision("ADJUST_BS", "", parameters, reason)]


def _tasks_per_s(worker: WorkerView, somebody_is_slow: bool) -> float:
    """Return a worker's speed, from windows that suit its state."""
    health = worker.health
    usual, newest = health.tasks_per_s_long, health.tasks_per_s_newest
    # Became fast: an average would follow only after some windows.
    if newest >= USUAL_RATIO * usual:
        return newest
    if health.verdict in STRAGGLERS:
        return health.tasks_per_s
    # Others by their long mean: noise and hiccups move no batch. 0: the newest window has no work
    # in it, as when a GPU has not finished the step yet.
    return newest if somebody_is_slow and 0 < USUAL_RATIO * newest <= usual else usual


def _overheads_ms(active: Sequence[WorkerView]) -> list[float]:
    """Return what a step takes beyond its tasks: collectives, and the host's work around them."""
    # It is hidden in the time that a worker waits for its peers. But the slowest worker waits for
    # nobody: its wait is its overhead. A worker that computes slowly is as slow in its overhead, so
    # the others' is shorter by as much, and nobody's is longer than its wait.
    factors = [w.health.ratio if w.health.cause == "compute" else 1.0 for w in active]
    usual_ms = min(w.health.peer_wait_ms / x for w, x in zip(active, factors, strict=True))
    return [usual_ms * factor for factor in factors]
