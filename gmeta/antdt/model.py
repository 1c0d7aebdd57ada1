"""The nouns of the ledger: datasets, callers, grants, leases, workers, and their limits."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from gmeta.access.errors import RefusedError

DEFAULT_MAX_ATTEMPTS = 5
MAX_SHARDS = 100_000_000  # of one dataset; one byte each in memory
MAX_SHARDS_IN_ALL = 200_000_000  # of all datasets of a service
MAX_UNITS = 1 << 48
MAX_EPOCHS = 1_000_000
MAX_COUNTED_ATTEMPTS = (1 << 32) - 1  # of a shard: what the wire can carry
MAX_NAME_CHARS = 128
MAX_NOTE_CHARS = 1024
MAX_SHARDS_PER_LEASE_CALL = 256
MAX_ITEMS_PER_CALL = 65_536
MAX_OPERATOR_SHARDS = 1000
# A bound, so that one heartbeat can name all leases. A rank holds those of batches made ahead, too.
MAX_LEASES_PER_WORKER = MAX_ITEMS_PER_CALL
MAX_WORKERS = 65_536
MAX_DATASETS = 1024
MAX_ACTIONS = 1024
# The lower bits of a token count the grants of one service start, those above are its epoch.
TOKEN_COUNTER_BITS = 40  # 1e12 grants a service start
TOKEN_COUNTER_MASK = (1 << TOKEN_COUNTER_BITS) - 1

# No spaces or quotes: names stand in logs, metrics and shell commands as they are.
_NAME = re.compile(r"[A-Za-z0-9_.:@/-]{1,128}")


class ShardState(IntEnum):
    """One byte per shard; READY is zero, so a fresh epoch needs no page."""

    READY = 0
    DOING = 1
    DONE = 2
    SKIPPED = 3
    QUARANTINED = 4

    @property
    def display_name(self) -> str:
        """Return the word that `gmeta shards ls` shows."""
        return "todo" if self is ShardState.READY else self.name.lower()


class Outcome(IntEnum):
    """What became of one item of a batch; the numbers are those of the proto."""

    ACCEPTED = 1
    ALREADY = 2
    FENCED = 3
    INVALID = 4


class Caller(NamedTuple):
    """Who calls; all four parts are fences."""

    worker_id: str
    incarnation: str
    service_epoch: int
    run_generation: int


class Grant(NamedTuple):
    """One leased shard: train units `start_unit + units_done` up to `start_unit + num_units`."""

    token: int
    dataset: str
    epoch: int
    shard_index: int
    start_unit: int
    num_units: int
    units_done: int
    attempts: int
    speculative: bool = False


@dataclass(frozen=True)
class DatasetSpec:
    """What a dataset is, in units that may not be split (episodes). Every field is checked."""

    name: str
    num_units: int
    units_per_shard: int
    seed: int = 0
    num_epochs: int = 1
    fingerprint: str = ""
    shuffle: bool = True
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    # A shard's result may be discarded, so two workers may do the same shard: the first to complete
    # it counts. It counts as a whole, without progress within it.
    speculative: bool = False

    def __post_init__(self) -> None:
        check_name("dataset name", self.name)
        check_range("num_units", self.num_units, 1, MAX_UNITS)
        check_range("units_per_shard", self.units_per_shard, 1, MAX_UNITS)
        check_range("seed", self.seed, 0, (1 << 64) - 1)
        check_range("num_epochs", self.num_epochs, 1, MAX_EPOCHS)
        check_range("max_attempts", self.max_attempts, 1, 1000)
        check_text("fingerprint", self.fingerprint, MAX_NOTE_CHARS)
        check_type("shuffle", self.shuffle, bool)
        check_type("speculative", self.speculative, bool)
        if self.num_shards > MAX_SHARDS:
            raise argument_refusal(
                f"dataset {self.name} would have {self.num_shards} shards; at most {MAX_SHARDS} "
                f"are allowed. Use units_per_shard >= {-(-self.num_units // MAX_SHARDS)}."
            )

    @property
    def num_shards(self) -> int:
        """Return the number of shards of an epoch; the last one may be short."""
        return -(-self.num_units // self.units_per_shard)

    def start_of(self, shard_index: int) -> int:
        """Return the first unit of the shard."""
        return shard_index * self.units_per_shard

    def length_of(self, shard_index: int) -> int:
        """Return how many units the shard has."""
        return min(self.units_per_shard, self.num_units - self.start_of(shard_index))

    @property
    def digest(self) -> str:
        """Return a digest of the spec: equal digests are equal datasets, cut in the same way."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for ledger and manifests."""
        plain = asdict(self)
        # Specs without it keep the digest that they had before the field existed.
        if not self.speculative:
            del plain["speculative"]
        return plain


@dataclass(slots=True)
class LedgerLease:
    """A shard in a worker's hands."""

    token: int
    dataset: str
    position: int
    worker_id: str
    deadline_s: float = 0.0  # on the server's monotonic clock, so never stored


@dataclass(slots=True)
class Worker:
    """A worker id, the one process that speaks for it, and that process's last numbered call."""

    worker_id: str
    incarnation: str
    generation: int
    retired: list[str] = field(default_factory=list)
    last_seq: int = 0
    # The event of that call, from which its reply is rebuilt.
    last_call: list[Any] = field(default_factory=list)
    tokens: set[int] = field(default_factory=set)
    draining: bool = False


@dataclass(slots=True)
class Backups:
    """Which shards may be leased a second time, and which two leases are of one shard."""

    wanted: set[int] = field(default_factory=set)  # tokens whose shard another worker may do too
    # For each token the other token of its shard; `LedgerState.drop_lease` keeps it true.
    twins: dict[int, int] = field(default_factory=dict)

    def pair(self, token: int, other: int) -> None:
        """Record that the two tokens are leases of one shard."""
        # The two are equals: the first to complete the shard counts, and if one ends in another
        # way, the other goes on as if it had always been the only one.
        self.twins[token], self.twins[other] = other, token

    def drop(self, token: int) -> None:
        """Forget a lease that ended."""
        self.wanted.discard(token)
        other = self.twins.pop(token, None)
        if other is not None:
            del self.twins[other]


@dataclass(slots=True)
class Checkpoint:
    """A prepared manifest that the service still holds."""

    checkpoint_id: str
    generation: int
    step: int
    digest: str
    manifest_json: str
    committed: bool = False


def argument_refusal(message: str) -> RefusedError:
    """Return INVALID_ARGUMENT with reason BAD_ARGUMENT."""
    return RefusedError("INVALID_ARGUMENT", "BAD_ARGUMENT", message)


def check_type(what: str, value: object, kind: type) -> None:
    """Raise RefusedError unless `value` is exactly of `kind`."""
    # Not isinstance: JSON's `true` and `1.0` are no integers.
    if type(value) is not kind:
        raise argument_refusal(
            f"{what} is {value!r:.80}; allowed is a value of type {kind.__name__}. Correct the "
            "request."
        )


def check_range(what: str, value: int, low: int, high: int) -> None:
    """Raise RefusedError unless `value` is an integer from `low` to `high`."""
    check_type(what, value, int)
    if not low <= value <= high:
        raise argument_refusal(
            f"{what} is {value}; allowed is {low} to {high}. Correct the request."
        )


def check_name(what: str, value: str) -> None:
    """Raise RefusedError unless `value` is a short printable name."""
    check_type(what, value, str)
    if not _NAME.fullmatch(value):
        excerpt = value[:MAX_NAME_CHARS]
        raise argument_refusal(
            f"{what} is {excerpt!r}; allowed are 1 to {MAX_NAME_CHARS} letters, digits and _.:@/- "
            ". Choose such a name."
        )


def check_text(what: str, value: str, max_chars: int) -> None:
    """Raise RefusedError unless `value` is text of at most `max_chars` characters."""
    check_type(what, value, str)
    if len(value) > max_chars:
        raise argument_refusal(
            f"{what} has {len(value)} characters; at most {max_chars} are allowed. Shorten it."
        )
