"""AntDT-DD, for dedicated clusters of unequal hardware (arXiv 2404.09679): the split of a step, in
micro-batches that fit each worker's memory, whose slowest worker ends first."""

from collections.abc import Sequence

from gmeta.antdt.policies.interface import ControllerConfig, Decision, Snapshot, WorkerView
from gmeta.antdt.policies.task_split import Speed, improve_split


def decide(snapshot: Snapshot, config: ControllerConfig) -> Sequence[Decision]:
    """Return ADJUST_BS with tasks and micro-batches of every worker, once all speeds are known."""
    active = snapshot.to_split
    # A split by guessed speeds would only be corrected in the next window.
    if not active or any(worker.health.verdict == "unknown" for worker in active):
        return []
    speeds = [_speed(worker, config) for worker in active]
    shares = [worker.tasks_per_step for worker in active]
    better = improve_split(
        shares, snapshot.tasks_per_step, speeds, config.min_tasks, config.min_gain
    )
    if better is None:
        return []
    parameters: dict[str, float] = {}
    for worker, speed, num_tasks in zip(active, speeds, better.shares, strict=True):
        name = worker.health.worker_id
        parameters[name] = float(num_tasks)
        parameters[f"micro:{name}"] = float(speed.micro_batches(num_tasks))
    reason = f"the slowest share takes {better.now_ms:.0f} ms, this split {better.then_ms:.0f} ms"
    return [Decision("ADJUST_BS", "", parameters, reason)]


def _speed(worker: WorkerView, config: ControllerConfig) -> Speed:
    """Return the time of a step as overhead and time per task, from the long windows."""
    health = worker.health
    num_tasks = max(1, worker.tasks_per_step)
    step_ms = num_tasks * 1000 / health.tasks_per_s_long
    now = Speed(0.0, health.overhead_ms, config.max_micro_batch).micro_batches(num_tasks)
    # A tenth at least is left for the tasks, or more of them would seem to cost nothing.
    overhead_ms = min(health.overhead_ms, 0.9 * step_ms / now)
    task_ms = (step_ms - now * overhead_ms) / num_tasks
    return Speed(task_ms, overhead_ms, config.max_micro_batch)
