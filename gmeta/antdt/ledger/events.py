"""The facts that the ledger records: all that is stored, and all that recovery needs. An event is
one line of JSON, `[tag, field, ...]`. Deadlines, heartbeats and WAIT leave no event."""

import json
from typing import NamedTuple

from gmeta.antdt.errors import StoreFailedError


class ServiceStarted(NamedTuple):
    """A service process took over."""

    service_epoch: int
    job: str


class DatasetAdded(NamedTuple):
    """Fields of the DatasetSpec."""

    spec: dict[str, str | int | bool]


class GenerationStarted(NamedTuple):
    """A new rendezvous round: every lease of the earlier ones went back."""

    generation: int
    rdzv_round: int


class WorkerRegistered(NamedTuple):
    """A process speaks for `worker_id` from now on; leases of an earlier process went back."""

    worker_id: str
    incarnation: str


class LeasesGranted(NamedTuple):
    """Tokens count up from `first_token`; `items` are (position, units_done, attempts)."""

    worker_id: str
    seq: int
    call_crc: int
    dataset: str
    epoch: int
    first_token: int
    items: list[tuple[int, int, int]]


class BackupsWanted(NamedTuple):
    """A worker is slow: these of its leases may each get a second one beside them."""

    action_id: str
    tokens: list[int]


class BackupGranted(NamedTuple):
    """As LeasesGranted, for one shard that the lease `beside` holds already."""

    worker_id: str
    seq: int
    call_crc: int
    dataset: str
    epoch: int
    first_token: int
    items: list[tuple[int, int, int]]
    # Last, so that the fields before it are those of LeasesGranted.
    beside: int


class UnitsProgressed(NamedTuple):
    """(token, units_done), only items that moved."""

    items: list[tuple[int, int]]


class ShardsCompleted(NamedTuple):
    """(token, outcome) of every item of the call."""

    worker_id: str
    seq: int
    call_crc: int
    items: list[tuple[int, int]]


class ShardsReleased(NamedTuple):
    """(token, outcome) of every item of the call."""

    worker_id: str
    seq: int
    call_crc: int
    items: list[tuple[int, int]]


class ShardFailed(NamedTuple):
    """One attempt at a shard failed."""

    worker_id: str
    seq: int
    call_crc: int
    token: int
    note: str
    quarantined: bool


class LeasesExpired(NamedTuple):
    """These were not renewed in time; each counts as an attempt."""

    tokens: list[int]


class EpochOpened(NamedTuple):
    """The epoch before it is finished."""

    dataset: str
    epoch: int


class CheckpointPrepared(NamedTuple):
    """A manifest was handed out."""

    checkpoint_id: str
    step: int
    digest: str
    manifest_json: str


class CheckpointCommitted(NamedTuple):
    """The checkpoint is durable."""

    checkpoint_id: str


class StateRestored(NamedTuple):
    """Everything is as the manifest says ("" is the very beginning)."""

    restore_id: str
    worker_id: str
    generation: int
    digest: str
    manifest_json: str


class ActionPosted(NamedTuple):
    """An action waits for a worker's agent."""

    worker_id: str
    action_id: str
    kind: int
    apply_at_step: int
    parameters: dict[str, float]


class ActionAcked(NamedTuple):
    """The agent answered."""

    action_id: str
    result: int
    message: str


class ShardsRequeued(NamedTuple):
    """An operator made these READY."""

    request_id: str
    dataset: str
    positions: list[int]


class ShardsSkipped(NamedTuple):
    """An operator took these out of training."""

    request_id: str
    dataset: str
    positions: list[int]
    reason: str


class ReadingsTaken(NamedTuple):
    """(step, wall time in s, numbers by name) of the model, for people."""

    items: list[tuple[int, float, dict[str, float]]]


class RunReported(NamedTuple):
    """Fields of the RunReport: the trainer's run began, or ended."""

    status: str
    folder: str
    total_steps: int
    wall_s: float


class DrainSet(NamedTuple):
    """An operator stopped grants, or allows them again; "" is the whole service."""

    request_id: str
    worker_id: str
    draining: bool


Event = (
    ServiceStarted
    | DatasetAdded
    | GenerationStarted
    | WorkerRegistered
    | LeasesGranted
    | BackupsWanted
    | BackupGranted
    | UnitsProgressed
    | ShardsCompleted
    | ShardsReleased
    | ShardFailed
    | LeasesExpired
    | EpochOpened
    | CheckpointPrepared
    | CheckpointCommitted
    | StateRestored
    | ActionPosted
    | ActionAcked
    | ShardsRequeued
    | ShardsSkipped
    | DrainSet
    | ReadingsTaken
    | RunReported
)

# Answers to a worker's numbered calls.
NumberedEvent = LeasesGranted | BackupGranted | ShardsCompleted | ShardsReleased | ShardFailed

# Stores hold them: a tag keeps its meaning, and its fields their order, for ever.
_TAG_OF: dict[type[Event], str] = {
    ServiceStarted: "start",
    DatasetAdded: "dataset",
    GenerationStarted: "generation",
    WorkerRegistered: "worker",
    LeasesGranted: "grant",
    BackupsWanted: "backups",
    BackupGranted: "backup",
    UnitsProgressed: "progress",
    ShardsCompleted: "complete",
    ShardsReleased: "release",
    ShardFailed: "fail",
    LeasesExpired: "expire",
    EpochOpened: "epoch",
    CheckpointPrepared: "prepare",
    CheckpointCommitted: "commit",
    StateRestored: "restore",
    ActionPosted: "action",
    ActionAcked: "ack",
    ShardsRequeued: "requeue",
    ShardsSkipped: "skip",
    DrainSet: "drain",
    ReadingsTaken: "readings",
    RunReported: "run",
}
_TYPE_OF = {tag: kind for kind, tag in _TAG_OF.items()}
# Made once: json.dumps would make an encoder for each event.
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)

# A grant that is lost in a power cut is fenced by the next service epoch, the controller decides
# again, and nothing is decided by readings; all other events must not be lost.
NEEDS_NO_SYNC = (
    *(LeasesGranted, BackupGranted, BackupsWanted, LeasesExpired, ActionPosted),
    *(ReadingsTaken, RunReported),
)


def encode(event: Event) -> bytes:
    """Return the event as one line of JSON, without a line break."""
    return _ENCODER.encode((_TAG_OF[type(event)], *event)).encode()


def decode(record: bytes) -> Event:
    """Return the event of one stored line. Raise StoreFailedError for any other line."""
    try:
        tag, *fields = json.loads(record)
        kind = _TYPE_OF[tag]
        return kind(*fields)  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreFailedError(
            f"the ledger holds the record {record[:80]!r}, which is none of {sorted(_TYPE_OF)}: "
            f"the store is damaged ({error}). Restore it from a backup, or delete it: the "
            "manifest in a checkpoint rebuilds the service."
        ) from error
