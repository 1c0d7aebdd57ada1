"""Every command of the ledger, and its reply. Values are checked before they get here."""

from typing import NamedTuple

from gmeta.antdt.metric_readings import MetricReading, RunReport
from gmeta.antdt.model import Caller, DatasetSpec, Grant, Outcome


class StartService(NamedTuple):
    """The first command of every service process; `service_epoch` was claimed from the store."""

    service_epoch: int
    job: str


class Tick(NamedTuple):
    """Time passed: leases that are due expire."""


class RegisterDataset(NamedTuple):
    """Idempotent by name and spec digest."""

    spec: DatasetSpec


class Register(NamedTuple):
    """A worker process announces itself; `rdzv_round` None joins the current generation."""

    worker_id: str
    incarnation: str
    rdzv_round: int | None


# The caller comes first in every call of a worker, and the call's number second if it has one:
# fences and checksums rely on it.
class LeaseShards(NamedTuple):
    """Asks for up to `max_shards` shards of one epoch."""

    caller: Caller
    seq: int
    dataset: str
    epoch: int
    max_shards: int


class Heartbeat(NamedTuple):
    """Renews exactly the tokens it names."""

    caller: Caller
    tokens: tuple[int, ...]
    report: tuple[float, ...]
    readings: tuple[MetricReading, ...] = ()
    run: RunReport | None = None


class ReportProgress(NamedTuple):
    """(token, units_done from the front of the shard) of what is in the model."""

    caller: Caller
    items: tuple[tuple[int, int], ...]


class Complete(NamedTuple):
    """Reports whole shards that are in the model."""

    caller: Caller
    seq: int
    tokens: tuple[int, ...]


class Release(NamedTuple):
    """Gives shards back; no attempt is counted."""

    caller: Caller
    seq: int
    tokens: tuple[int, ...]


class Fail(NamedTuple):
    """Reports a shard that cannot be processed; an attempt is counted."""

    caller: Caller
    seq: int
    token: int
    failure_class: str
    message: str


class PrepareCheckpoint(NamedTuple):
    """Asks for the manifest of this step boundary."""

    caller: Caller
    checkpoint_id: str
    step: int


class CommitCheckpoint(NamedTuple):
    """The checkpoint folder was renamed into place."""

    caller: Caller
    checkpoint_id: str
    digest: str


class Restore(NamedTuple):
    """Rolls to the manifest ("" for the very beginning) and starts a new generation."""

    caller: Caller
    manifest_json: str
    restore_id: str


class PostAction(NamedTuple):
    """From the controller: an action for one worker's agent, or for all if `worker_id` is ""."""

    worker_id: str
    action_id: str
    kind: int
    apply_at_step: int
    parameters: dict[str, float]


class BackUp(NamedTuple):
    """From the controller: another worker may do a slow worker's shards of speculative datasets."""

    # The service carries it out itself, so no agent acknowledges it.
    action_id: str
    worker_id: str


class AckAction(NamedTuple):
    """The agent's answer to an action."""

    caller: Caller
    action_id: str
    result: int
    message: str


class Requeue(NamedTuple):
    """From an operator: quarantined or skipped shards become READY."""

    request_id: str
    dataset: str
    shard_indices: tuple[int, ...]


class Skip(NamedTuple):
    """From an operator: these shards are not to be trained."""

    request_id: str
    dataset: str
    shard_indices: tuple[int, ...]
    reason: str


class Drain(NamedTuple):
    """From an operator: no further grants to one worker, or to all if `worker_id` is ""."""

    request_id: str
    worker_id: str
    undo: bool


class DatasetReply(NamedTuple):
    """Answer to RegisterDataset."""

    num_shards: int
    digest: str
    created: bool


class RegisterReply(NamedTuple):
    """Answer to Register."""

    service_epoch: int
    run_generation: int
    last_seq: int
    leases: tuple[Grant, ...]


class GrantReply(NamedTuple):
    """Answer to LeaseShards: shards."""

    last_seq: int
    grants: tuple[Grant, ...]


class Wait(NamedTuple):
    """Answer to LeaseShards: nothing now; `cause` has the numbers of the proto."""

    last_seq: int
    cause: int
    retry_after_ms: int
    message: str


class End(NamedTuple):
    """Answer to LeaseShards: every shard of the epoch is done or was skipped."""

    last_seq: int


class HeartbeatReply(NamedTuple):
    """Answer to Heartbeat: tokens that the worker no longer holds, and open actions."""

    revoked: tuple[int, ...]
    actions: tuple[PostAction, ...]


class Outcomes(NamedTuple):
    """Answer to Complete, Release, Fail (last_seq set), Progress and AckAction (last_seq 0)."""

    last_seq: int
    outcomes: tuple[Outcome, ...]
    quarantined: bool = False


class ManifestReply(NamedTuple):
    """Answer to PrepareCheckpoint."""

    manifest_json: str
    digest: str


class RestoreReply(NamedTuple):
    """Answer to Restore."""

    run_generation: int
    digest: str


class TickReply(NamedTuple):
    """Answer to Tick: (token, worker) of every lease that expired now."""

    expired: tuple[tuple[int, str], ...]


class ChangeReply(NamedTuple):
    """Answer to operator commands, BackUp and CommitCheckpoint: how many shards changed."""

    num_changed: int


# Wait.Cause of the proto.
CAUSE_IN_FLIGHT, CAUSE_QUARANTINED, CAUSE_DRAINING, CAUSE_EARLIER_EPOCH = 1, 2, 3, 4

Command = (
    StartService
    | Tick
    | RegisterDataset
    | Register
    | LeaseShards
    | Heartbeat
    | ReportProgress
    | Complete
    | Release
    | Fail
    | PrepareCheckpoint
    | CommitCheckpoint
    | Restore
    | PostAction
    | BackUp
    | AckAction
    | Requeue
    | Skip
    | Drain
)
Reply = (
    DatasetReply
    | RegisterReply
    | GrantReply
    | Wait
    | End
    | HeartbeatReply
    | Outcomes
    | ManifestReply
    | RestoreReply
    | ChangeReply
    | TickReply
    | None
)
