"""What a Lease call may be answered with: shards, WAIT with its cause, or END, and when END is
allowed."""

from collections.abc import Sequence
from dataclasses import asdict

from gmeta.antdt.errors import RefusedError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger import events as ev
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.ledger.table import ShardTable
from gmeta.antdt.model import (
    MAX_DATASETS,
    MAX_LEASES_PER_WORKER,
    MAX_SHARDS_IN_ALL,
    TOKEN_COUNTER_BITS,
    TOKEN_COUNTER_MASK,
    DatasetSpec,
    ShardState,
    Worker,
    bad_argument,
)

WAIT_RETRY_MS = 200  # the longest a worker sits idle after the last shard of a slower one came back
OPERATOR_RETRY_MS = 1000  # waiting for a person


def is_new_dataset(state: LedgerState, spec: DatasetSpec) -> bool:
    """Return False for the same spec again. Raise RefusedError for another spec under the name."""
    table = state.tables.get(spec.name)
    if table is None:
        check_room(state, [spec])
        return True
    if table.spec != spec:
        differing = [
            name for name, value in asdict(spec).items() if getattr(table.spec, name) != value
        ]
        old = {name: getattr(table.spec, name) for name in differing}
        new = {name: getattr(spec, name) for name in differing}
        raise RefusedError(
            "ALREADY_EXISTS",
            "SPEC_CONFLICT",
            f"dataset {spec.name!r} is registered with {old}, the call says {new}; a name stands "
            "for one dataset. "
            "Register the other data under another name, or start a service with an empty store.",
        )
    return False


def check_room(state: LedgerState, specs: Sequence[DatasetSpec]) -> None:
    """Raise RefusedError unless the service has room for these datasets beside its own: their
    number is bounded, and the shards of all together, which are its memory."""
    num_shards = sum(table.spec.num_shards for table in state.tables.values())
    num_shards += sum(spec.num_shards for spec in specs)
    if len(state.tables) + len(specs) > MAX_DATASETS:
        told = f"{len(state.tables)} datasets are registered; at most {MAX_DATASETS}"
    elif num_shards > MAX_SHARDS_IN_ALL:
        told = f"all datasets would have {num_shards} shards; at most {MAX_SHARDS_IN_ALL}"
    else:
        return
    told += " are allowed. Start another service."
    raise RefusedError("RESOURCE_EXHAUSTED", "LIMIT", told)


def hold_back(
    state: LedgerState, worker: Worker, table: ShardTable, epoch: int, seq: int
) -> cmd.Wait | cmd.End | None:
    """Return WAIT or END where the epoch or a drain allows no grant at all, else None. Raise
    RefusedError for an epoch that the dataset does not have."""
    spec = table.spec
    if epoch >= spec.num_epochs:
        raise bad_argument(
            f"epoch {epoch} of dataset {spec.name!r} was asked for; it has epochs 0 to "
            f"{spec.num_epochs - 1}. "
            "Stop at the last END, or register the dataset with more epochs."
        )
    if epoch < table.epoch:
        return cmd.End(seq)
    if epoch > table.epoch + (1 if table.finished else 0):
        text = (
            f"epoch {table.epoch} of dataset {spec.name!r} is not finished, {epoch} comes after it"
        )
        return cmd.Wait(seq, cmd.CAUSE_EARLIER_EPOCH, WAIT_RETRY_MS, text)
    if epoch == table.epoch and table.finished:
        return cmd.End(seq)
    # Behind END: also who is drained must learn that the epoch is over.
    if state.draining or worker.draining:
        who = "the service" if state.draining else f"worker {worker.worker_id}"
        text = (
            f"{who} is draining: no shard is handed out. Lift it with 'gmeta shards drain --undo'."
        )
        return cmd.Wait(seq, cmd.CAUSE_DRAINING, OPERATOR_RETRY_MS, text)
    return None


def nothing_left(table: ShardTable, seq: int) -> cmd.Wait:
    """Return the WAIT for an epoch in which nothing is READY and not everything is done."""
    doing, quarantined = table.counts[ShardState.DOING], table.counts[ShardState.QUARANTINED]
    # First: what is in hand may still come back, and needs nobody's decision.
    if doing:
        text = f"shards of dataset {table.spec.name!r} in workers' hands: {doing}"
        return cmd.Wait(seq, cmd.CAUSE_IN_FLIGHT, WAIT_RETRY_MS, text)
    text = (
        f"shards of dataset {table.spec.name!r} quarantined because they failed too often: "
        f"{quarantined}. Look with 'gmeta shards ls --state quarantined', then 'gmeta shards "
        "requeue' or 'gmeta shards skip' them."
    )
    return cmd.Wait(seq, cmd.CAUSE_QUARANTINED, OPERATOR_RETRY_MS, text)


def next_grant(
    state: LedgerState, worker: Worker, table: ShardTable, command: cmd.LeaseShards, call_crc: int
) -> ev.LeasesGranted | ev.BackupGranted | None:
    """Return the grant of shards that nobody holds; where there are none, of one that a slow worker
    holds and that this one may do as well (one, so that the last shards spread over all idle
    workers). None where there is neither. Raise RefusedError at the limits."""
    positions = table.next_ready(command.max_shards)
    if positions:
        return grant(state, worker, table, command, call_crc, positions)
    beside = state.backups.next_for(worker, table, state.leases)
    if beside is None:
        return None
    position = state.leases[beside].position
    granted = grant(state, worker, table, command, call_crc, [position])
    return ev.BackupGranted(*granted, beside)


def grant(
    state: LedgerState,
    worker: Worker,
    table: ShardTable,
    command: cmd.LeaseShards,
    call_crc: int,
    positions: list[int],
) -> ev.LeasesGranted:
    """Return the event that hands `positions` to the worker under new tokens. Raise RefusedError at
    the limits."""
    if len(worker.tokens) + len(positions) > MAX_LEASES_PER_WORKER:
        raise RefusedError(
            "RESOURCE_EXHAUSTED",
            "LIMIT",
            f"worker {worker.worker_id!r} holds {len(worker.tokens)} leases and asks for "
            f"{len(positions)} more; at most "
            f"{MAX_LEASES_PER_WORKER} are allowed. Complete or release some first, or cut the "
            "dataset into larger shards (data.tasks_per_shard).",
        )
    if state.token_counter + len(positions) >= TOKEN_COUNTER_MASK:
        raise RefusedError(
            "RESOURCE_EXHAUSTED",
            "LIMIT",
            f"this service process granted {state.token_counter} leases; at most "
            f"{TOKEN_COUNTER_MASK} are allowed. "
            "Restart it: a new service epoch starts a new count.",
        )
    # The epoch in the upper bits: no token of an earlier service process is given out again.
    first_token = (state.service_epoch << TOKEN_COUNTER_BITS) | (state.token_counter + 1)
    items = [(p, table.units_done.get(p, 0), table.attempts.get(p, 0)) for p in positions]
    return ev.LeasesGranted(
        worker.worker_id, command.seq, call_crc, table.spec.name, table.epoch, first_token, items
    )
