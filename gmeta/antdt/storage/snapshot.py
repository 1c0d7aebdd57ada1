"""A ledger's state as bytes and back: one JSON document for everything small, and the pages that
changed since the last one."""

import json
from dataclasses import asdict
from typing import Any

from gmeta.antdt.errors import StoreFailedError
from gmeta.antdt.ledger import events as ev
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.ledger.table import ShardTable
from gmeta.antdt.model import Checkpoint, DatasetSpec, Lease, Worker
from gmeta.antdt.storage.stored import Snapshot

# Attributes of LedgerState that are JSON as they are.
_PLAIN = (
    "service_epoch",
    "generation",
    "rdzv_round",
    "token_counter",
    "draining",
    "lineage",
    "restore_id",
    "restored_digest",
    "requests",
    "acked",
)


def take_snapshot(state: LedgerState, num_events: int, head: bytes) -> Snapshot:
    """The state after `num_events` events, whose chain ends in `head`. Reads, changes nothing; call
    `mark_stored` once the snapshot is durable."""
    document: dict[str, Any] = {name: getattr(state, name) for name in _PLAIN}
    document["job"] = state.job
    document["tables"] = [_table_document(table) for table in state.tables.values()]
    document["workers"] = [_worker_document(worker) for worker in state.workers.values()]
    document["leases"] = [
        [x.token, x.dataset, x.position, x.worker_id] for x in state.leases.values()
    ]
    document["backups_wanted"] = sorted(state.backups.wanted)
    # The map has each pair both ways.
    document["twins"] = [pair for pair in state.backups.twins.items() if pair[0] < pair[1]]
    document["closed"] = list(state.closed.items())
    document["checkpoints"] = [asdict(checkpoint) for checkpoint in state.checkpoints.values()]
    document["actions"] = list(state.actions.values())
    tables = state.tables.items()
    return Snapshot(
        num_events,
        head,
        json.dumps(document, separators=(",", ":")),
        {
            (name, number): table.page(number)
            for name, table in tables
            for number in table.dirty_pages
        },
        frozenset(name for name, table in tables if table.cleared),
    )


def mark_stored(state: LedgerState) -> None:
    """The last snapshot is durable: its pages are clean."""
    for table in state.tables.values():
        table.dirty_pages.clear()
        table.cleared = False


def load_state(snapshot: Snapshot) -> LedgerState:
    """The state of a snapshot. Leases have no deadline until StartService gives them one.
    Raises StoreFailedError for a document that is none of ours."""
    try:
        return _load_state(snapshot)
    except (ValueError, KeyError, TypeError) as error:
        raise StoreFailedError(
            f"the snapshot of the store after {snapshot.num_events} events cannot be read "
            f"({error!r}): the store is damaged. Restore it from a backup, or delete it: the "
            "manifest in a checkpoint rebuilds the service."
        ) from error


def _load_state(snapshot: Snapshot) -> LedgerState:
    document = json.loads(snapshot.document)
    state = LedgerState(document["job"])
    for name in _PLAIN:
        setattr(state, name, document[name])
    for item in document["tables"]:
        table = _load_table(item, snapshot)
        state.tables[table.spec.name] = table
    for item in document["workers"]:
        worker = _load_worker(item)
        state.workers[worker.worker_id] = worker
    for token, dataset, position, worker_id in document["leases"]:
        state.leases[token] = Lease(token, dataset, position, worker_id)
        # A worker's entry does not list them: two lists could disagree.
        state.workers[worker_id].tokens.add(token)
    # A store of version 1 has neither.
    state.backups.wanted.update(document.get("backups_wanted", ()))
    for token, other in document.get("twins", ()):
        state.backups.pair(token, other)
    state.closed = dict(document["closed"])
    state.checkpoints = {
        item["checkpoint_id"]: Checkpoint(**item) for item in document["checkpoints"]
    }
    state.actions = {item[1]: ev.ActionPosted(*item) for item in document["actions"]}
    return state


def _table_document(table: ShardTable) -> dict[str, Any]:
    return {
        "spec": table.spec.to_dict(),
        "epoch": table.epoch,
        "units_done": list(table.units_done.items()),
        "attempts": list(table.attempts.items()),
        "notes": list(table.notes.items()),
        "committed": table.committed,
    }


def _load_table(item: dict[str, Any], snapshot: Snapshot) -> ShardTable:
    table = ShardTable(DatasetSpec(**item["spec"]), item["epoch"])
    name, num_shards = table.spec.name, table.spec.num_shards
    table.load_pages(
        [(number, page) for (owner, number), page in snapshot.pages.items() if owner == name]
    )
    if len(table.states) != num_shards or sum(table.counts) != num_shards:
        raise StoreFailedError(
            f"the pages of dataset {name!r} do not describe its {num_shards} shards: the store is "
            "damaged. Restore it from a backup, or delete it: the manifest in a checkpoint "
            "rebuilds the service."
        )
    table.units_done = dict(item["units_done"])
    table.attempts = dict(item["attempts"])
    table.notes = dict(item["notes"])
    table.committed = [(start, end) for start, end in item["committed"]]
    table.cleared = False
    return table


def _worker_document(worker: Worker) -> list[Any]:
    last_call = [ev.encode(event).decode() for event in worker.last_call]
    return [
        worker.worker_id,
        worker.incarnation,
        worker.generation,
        worker.retired,
        worker.last_seq,
        last_call,
        worker.draining,
    ]


def _load_worker(item: list[Any]) -> Worker:
    worker_id, incarnation, generation, retired, last_seq, last_call, draining = item
    calls: list[Any] = [ev.decode(record.encode()) for record in last_call]
    return Worker(worker_id, incarnation, generation, retired, last_seq, calls, set(), draining)
