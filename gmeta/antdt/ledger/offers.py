"""The answer to a Lease call: shards, WAIT with its cause, or END, and when END is allowed."""

from gmeta.access.errors import RefusedError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger import events as ev
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.ledger.table import ShardTable
from gmeta.antdt.model import (
    MAX_LEASES_PER_WORKER,
    TOKEN_COUNTER_BITS,
    TOKEN_COUNTER_MASK,
    ShardState,
    Worker,
    argument_refusal,
)

WAIT_RETRY_MS = 200  # the longest a worker sits idle after the last shard of a slower one came back
OPERATOR_RETRY_MS = 1000  # waiting for a person


def refuse_grant(
    state: LedgerState, worker: Worker, table: ShardTable, epoch: int, seq: int
) -> cmd.Wait | cmd.End | None:
    """Return WAIT, END or None (grant), by epoch and drain. Raise RefusedError: no such epoch."""
    spec = table.spec
    if epoch >= spec.num_epochs:
        raise argument_refusal(
            f"epoch {epoch} of dataset {spec.name!r} was asked for; it has epochs 0 to "
            f"{spec.num_epochs - 1}. "
            "Stop at the last END, or register the dataset with more epochs."
        )
    if epoch < table.epoch:
        return cmd.End(seq)
    # Once an epoch is finished, the first Lease of the next one opens it.
    if epoch > table.epoch + (1 if table.finished else 0):
        text = (
            f"epoch {table.epoch} of dataset {spec.name!r} is not finished, {epoch} comes after it"
        )
        return cmd.Wait(seq, cmd.CAUSE_EARLIER_EPOCH, WAIT_RETRY_MS, text)
    if epoch == table.epoch and table.finished:
        return cmd.End(seq)
    # After END: a drained worker, too, must learn that the epoch is over.
    if state.draining or worker.draining:
        who = "the service" if state.draining else f"worker {worker.worker_id}"
        text = (
            f"{who} is draining: no shard is handed out. Lift it with 'gmeta shards drain --undo'."
        )
        return cmd.Wait(seq, cmd.CAUSE_DRAINING, OPERATOR_RETRY_MS, text)
    return None


def wait_for_others(table: ShardTable, seq: int) -> cmd.Wait:
    """Return the WAIT for an epoch in which nothing is READY and not everything is done."""
    doing, quarantined = table.counts[ShardState.DOING], table.counts[ShardState.QUARANTINED]
    # First: shards in workers' hands may still come back, and need nobody's decision.
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
    """Return a grant of free shards, else of a slow worker's, else None. RefusedError at limits."""
    positions = table.next_ready(command.max_shards)
    if positions:
        return grant(state, worker, table, command, call_crc, positions)
    # One at a time, so that the last shards spread over all idle workers.
    held_token = _lease_to_double(state, worker, table)
    if held_token is None:
        return None
    position = state.leases[held_token].position
    grant_event = grant(state, worker, table, command, call_crc, [position])
    return ev.BackupGranted(*grant_event, held_token)


def leases_to_back_up(state: LedgerState, worker: Worker) -> list[int]:
    """Return those leases of a slow worker that may each get a second one."""
    # Those of speculative datasets with nothing left to hand out, without a second lease yet.
    free = worker.tokens - state.backups.wanted - state.backups.twins.keys()
    tables, leases = state.tables, state.leases
    return [token for token in sorted(free) if _is_at_its_tail(tables[leases[token].dataset])]


def _is_at_its_tail(table: ShardTable) -> bool:
    return table.spec.speculative and not table.counts[ShardState.READY]


# Speculative execution (Dean and Ghemawat, MapReduce, OSDI 2004, section 3.6): at the tail of a
# speculative dataset a shard that a slow worker holds is offered too.
def _lease_to_double(state: LedgerState, worker: Worker, table: ShardTable) -> int | None:
    """Return the dataset's oldest lease that this worker may share, None for a slow worker."""
    backups = state.backups
    if not backups.wanted.isdisjoint(worker.tokens):
        return None
    # Tokens rise with time: the shard that was held longest comes first.
    for token in sorted(backups.wanted - backups.twins.keys()):
        lease = state.leases[token]
        # A shard that failed too often while it had two leases gets no second one again.
        is_exhausted = table.attempts.get(lease.position, 0) > table.spec.max_attempts
        if lease.dataset == table.spec.name and not is_exhausted:
            return token
    return None


def grant(
    state: LedgerState,
    worker: Worker,
    table: ShardTable,
    command: cmd.LeaseShards,
    call_crc: int,
    positions: list[int],
) -> ev.LeasesGranted:
    """Return the event that hands `positions` to the worker. Raise RefusedError at the limits."""
    if len(worker.tokens) + len(positions) > MAX_LEASES_PER_WORKER:
        raise RefusedError(
            "RESOURCE_EXHAUSTED",
            "LIMIT",
            f"worker {worker.worker_id!r} holds {len(worker.tokens)} leases and asks for "
            f"{len(positions)} more; at most {MAX_LEASES_PER_WORKER} are allowed. Complete or "
            "release some first, or cut the dataset into larger shards.",
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
