"""What a policy sees and what it may ask for. A policy is one function, `decide(snapshot, config)`,
that returns decisions and keeps no state: everything it needs is in the snapshot."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from gmeta.antdt.reports import STRAGGLERS, WorkerHealth
from gmeta_keys import key

ActionKind = Literal[
    "NONE", "ADJUST_BS", "ADJUST_LR", "BACKUP_WORKERS", "KILL_RESTART", "EXCLUDE"
]  # the kinds of the proto, by number from 1


@dataclass(frozen=True)
class ControllerConfig:
    """What the controller may do, and how often; the [controller] section of the config."""

    policy: str = key("none", "nd, dd, none, or FILE.py:FUNCTION with a policy of your own")
    dry_run: bool = key(False, "decide and log, but post no action")
    synchronous: bool = key(
        True, "all ranks take every step together (torchrun); false: each by itself"
    )
    min_tasks: int = key(1, "smallest share of a worker in a step", min=1)
    max_micro_batch: int = key(0, "dd: tasks that fit a worker's memory; 0: any", min=0)
    min_gain: float = key(0.05, "change batches only for a step shorter by this part", min=0.0)
    hold_windows: int = key(
        6,
        "where slowness passes quickly, change batches only once the same workers were to get "
        "fewer for up to so many windows; 0: at once",
        min=0,
    )
    cooldown_s: float = key(1.0, "time between two changes of the batches", min=0.0)
    restart_cost_s: float = key(90.0, "from the end of a process to its next step", min=0.0)
    restart_stops_job: bool = key(
        True, "a restart of one rank stops all (torchrun); false: only that worker"
    )
    restarts_per_worker: int = key(1, "KILL_RESTART at most so often for one worker", min=0)
    restart_share_per_hour: float = key(
        0.1, "part of the workers that may be restarted within an hour", min=0.0
    )
    backup_share: float = key(
        0.25, "part of the workers whose last shards others do at a time", min=0.0
    )

    def restarts_per_hour(self, num_workers: int) -> int:
        """Return the restarts an hour of all workers together."""
        # At least one, or a small job could never restart any.
        return max(1, int(self.restart_share_per_hour * num_workers))


@dataclass(frozen=True)
class WorkerView:
    """One worker, as a policy sees it."""

    health: WorkerHealth
    tasks_per_step: int  # its share of a step now
    restarts: int = 0  # by the controller
    excluded: bool = False
    to_back_up: int = 0  # last shards of speculative datasets that it alone holds
    backed_up: int = 0  # last shards that another worker may do too, or does


@dataclass(frozen=True)
class Snapshot:
    """Everything that a decision depends on; the log keeps it as JSON, and replay reads it."""

    now_s: float
    step: int
    workers: tuple[WorkerView, ...]
    tasks_per_step: int = 0  # of all workers together; 0: unknown, so batches stay
    remaining_s: float = float("inf")  # of the job, as far as known
    last_adjust_s: float = float("-inf")
    restarts_last_hour: int = 0
    # Workers that every evaluation since `held_since_s` wanted to give fewer tasks.
    held: tuple[str, ...] = ()
    held_since_s: float = float("-inf")
    hold_s: float = 0.0  # how long they must have wanted it

    @property
    def active(self) -> tuple[WorkerView, ...]:
        """Return the workers that take part and whose speed is known."""
        return tuple(w for w in self.workers if not w.excluded and w.health.tasks_per_s > 0)

    @property
    def to_split(self) -> tuple[WorkerView, ...]:
        """Return the workers to divide a step's tasks among; none while a speed is unknown."""
        takes_part = [worker for worker in self.workers if not worker.excluded]
        is_known = self.tasks_per_step and len(self.active) == len(takes_part)
        return self.active if is_known and len(takes_part) > 1 else ()

    @property
    def stragglers(self) -> tuple[WorkerView, ...]:
        """Return the slow ones of the active workers."""
        return tuple(w for w in self.active if w.health.verdict in STRAGGLERS)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        raw = asdict(self)
        # JSON has no infinity: null stands for it, and `from_json` puts the default in its place.
        for name in ("remaining_s", "last_adjust_s", "held_since_s"):
            if abs(raw[name]) == float("inf"):
                raw[name] = None
        return raw

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Snapshot":
        """Return the snapshot from what `to_json` returned."""
        workers = tuple(
            WorkerView(**{**one, "health": WorkerHealth(**one["health"])}) for one in raw["workers"]
        )
        known = {name: value for name, value in raw.items() if value is not None}
        return cls(**{**known, "workers": workers, "held": tuple(raw.get("held", ()))})


class Decision(NamedTuple):
    """An action that a policy wants, and why."""

    kind: ActionKind
    worker_id: str = ""
    # ADJUST_BS: worker -> tasks of each step (and "micro:WORKER" -> micro-batches). ADJUST_LR:
    # {"factor": x}. The other kinds name `worker_id` alone.
    parameters: dict[str, float] = {}  # noqa: RUF012 (never changed)
    reason: str = ""

    @property
    def shares(self) -> dict[str, float]:
        """Return the tasks of each worker that an ADJUST_BS names."""
        return {name: n for name, n in self.parameters.items() if not name.startswith("micro:")}


Policy = Callable[[Snapshot, ControllerConfig], Sequence[Decision]]
