"""The job and the cluster that are simulated, and the outcome."""

from dataclasses import dataclass, field
from typing import NamedTuple

from gmeta.antdt.policies.interface import ControllerConfig
from gmeta.antdt.reports import MonitorConfig


@dataclass(frozen=True)
class JobConfig:
    """The job and the cluster; times are of a healthy worker."""

    num_workers: int = 1000
    tasks_per_worker: int = 32  # of a step with equal shares
    num_steps: int = 3600  # with equal shares
    task_ms: float = 30.0
    read_ms: float = 0.0  # of a task, during the computation
    overhead_ms: float = 40.0  # of a step, whatever its tasks
    jitter: float = 0.05  # standard deviation of the logarithm of each step's time
    steps_per_shard: int = 4  # a shard has the tasks of this many steps of an equal share
    heartbeat_s: float = 2.5
    actions_take_steps: int = 2  # with the old shares after a decision, as in the trainer
    restart_cost_s: float = 90.0
    restart_stops_job: bool = False
    backup_share: float = 0.05  # of the workers: the last ones, which are not waited for
    min_tasks: int = 1
    hold_windows: int = ControllerConfig.hold_windows
    seed: int = 0
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)  # all else

    @property
    def tasks_per_step(self) -> int:
        """Return the tasks of one step of all workers together."""
        return self.num_workers * self.tasks_per_worker

    @property
    def healthy_s(self) -> float:
        """Return the job completion time without stragglers, noise or tail."""
        return self.num_steps * (self.overhead_ms + self.tasks_per_worker * self.task_ms) / 1000


class JobOutcome(NamedTuple):
    """What became of a job."""

    completion_s: float
    num_steps: int
    num_adjustments: int
    num_restarts: int
