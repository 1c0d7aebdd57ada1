"""What workers report of themselves, what the monitor says of them, and its settings."""

from dataclasses import dataclass
from operator import add, sub
from typing import Literal, NamedTuple

from gmeta_keys import key

# Fields of the report's message (each with _ms) and of DatasetStatus, in the order shown.
SPENT = ("compute", "data_wait", "communication", "peer_wait")
SHARD_STATES = ("todo", "doing", "done_open", "done_committed", "skipped", "quarantined")

Verdict = Literal["unknown", "healthy", "transient", "persistent", "deterministic"]
Cause = Literal["", "compute", "reader", "network"]
CAUSES: tuple[Cause, ...] = ("compute", "reader", "network")
STRAGGLERS = ("transient", "persistent", "deterministic")


@dataclass(frozen=True)
class MonitorConfig:
    """When a worker counts as slow; the [monitor] section of the service's config."""

    window_s: float = key(2.5, "length of a window", min=0.05)
    slow_ratio: float = key(1.5, "slow: own time per task over the median of the others", min=1.01)
    recovered_ratio: float = key(1.25, "a straggler has recovered below this ratio", min=1.0)
    floor_ms: float = key(0.1, "slow only if so many ms per task above it", min=0.0)
    short_windows: int = key(3, "windows that a verdict looks back", min=1)
    short_slow: int = key(2, "so many slow ones of them: a transient straggler", min=1)
    long_windows: int = key(240, "windows that tell transient from persistent", min=2)
    long_slow: int = key(200, "so many slow ones of them: a persistent one", min=2)
    steady_spread: float = key(
        0.2,
        "slow since its first window and (p90 - p10) / median of the ratio below this: "
        "a deterministic straggler",
        min=0.0,
    )


class Report(NamedTuple):
    """Totals of one worker process since its start."""

    # Totals, not differences: a lost or repeated report does no harm.
    step: int = 0
    tasks_done: int = 0
    compute_ms: float = 0.0
    data_wait_ms: float = 0.0
    communication_ms: float = 0.0  # own transfers
    peer_wait_ms: float = 0.0  # waiting for slower ranks

    def since(self, before: "Report") -> "Report":
        """Return what was added since an earlier report."""
        return Report._make(map(sub, self, before))

    def plus(self, later: "Report") -> "Report":
        """Return the totals with what was added later."""
        return Report._make(map(add, self, later))

    @property
    def own_ms(self) -> tuple[float, float, float]:
        """Return the rank's own time by cause, in the order of CAUSES."""
        return (self.compute_ms, self.data_wait_ms, self.communication_ms)


@dataclass(frozen=True)
class WorkerHealth:
    """What the monitor says about one worker, with its evidence."""

    worker_id: str
    verdict: Verdict
    cause: Cause = ""
    ratio: float = 1.0  # own time per task over the others' median, in the short windows
    tasks_per_s: float = 0.0  # by compute and data wait alone, in the short windows
    tasks_per_s_long: float = 0.0
    tasks_per_s_newest: float = 0.0  # in the newest window alone
    overhead_ms: float = 0.0  # of a step, beside its tasks; needs batches of two sizes
    slow_for_s: float = 0.0
    evidence: str = ""
    peer_wait_ms: float = 0.0  # of a step, the least of the short windows
