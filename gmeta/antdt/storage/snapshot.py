"""A ledger's state as bytes and back: one JSON document, and the pages that changed since."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from gmeta.access.errors import RefusedError
from gmeta.antdt.ledger import events as ev
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.ledger.table import ShardTable
from gmeta.antdt.metric_readings import MetricHistory, RunReport
from gmeta.antdt.model import Checkpoint, DatasetSpec, LedgerLease, Worker, check_range
from gmeta.antdt.storage.store import damage_error
from gmeta.antdt.storage.store_records import StoredSnapshot

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


def take_snapshot(state: LedgerState, num_events: int, head: bytes) -> StoredSnapshot:
    """Return the state after `num_events` events, whose chain ends in `head`."""
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
    document["readings"] = state.readings.to_json()
    document["run"] = [state.run, state.run_generation]
    # Nothing is marked clean here: `mark_stored` does so once the snapshot is durable.
    tables = state.tables.items()
    pages = {(name, n): table.page(n) for name, table in tables for n in table.dirty_pages}
    cleared = frozenset(name for name, table in tables if table.cleared)
    text = json.dumps(document, separators=(",", ":"))
    return StoredSnapshot(num_events, head, text, pages, cleared)


def mark_stored(state: LedgerState) -> None:
    """Mark all pages clean: the last snapshot is durable."""
    for table in state.tables.values():
        table.dirty_pages.clear()
        table.cleared = False


def load_state(snapshot: StoredSnapshot) -> LedgerState:
    """Return the state of a snapshot, without deadlines. Raise StoreFailedError."""
    try:
        return _load_state(snapshot)
    except (ValueError, KeyError, TypeError, RefusedError) as error:
        what = f"the snapshot of the store after {snapshot.num_events} events cannot be read"
        raise damage_error(f"{what} ({error!r})") from error


def _load_state(snapshot: StoredSnapshot) -> LedgerState:
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
        state.leases[token] = LedgerLease(token, dataset, position, worker_id)
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
    # A store of version 3 has neither.
    state.readings = MetricHistory.from_json(document.get("readings", [0, []]))
    run, state.run_generation = document.get("run", [None, 0])
    state.run = None if run is None else RunReport._make(run)
    return state


def _table_document(table: ShardTable) -> dict[str, Any]:
    return {
        "spec": table.spec.to_dict(),
        "epoch": table.epoch,
        "digest": _digest(table),
        "units_done": list(table.units_done.items()),
        "attempts": list(table.attempts.items()),
        "notes": list(table.notes.items()),
        "committed": table.committed,
    }


def _load_table(item: dict[str, Any], snapshot: StoredSnapshot) -> ShardTable:
    spec = DatasetSpec(**item["spec"])
    check_range("epoch", item["epoch"], 0, spec.num_epochs - 1)
    table = ShardTable(spec, item["epoch"])
    name, num_shards = table.spec.name, table.spec.num_shards
    table.load_pages(
        [(number, page) for (owner, number), page in snapshot.pages.items() if owner == name]
    )
    digest = item.get("digest")  # a store of version 2 has none
    if sum(table.counts) != num_shards or digest not in (None, _digest(table)):
        raise damage_error(f"the pages of dataset {name!r} do not describe its {num_shards} shards")
    table.units_done = dict(item["units_done"])
    table.attempts = dict(item["attempts"])
    table.notes = dict(item["notes"])
    table.committed = [(start, end) for start, end in item["committed"]]
    table.cleared = False
    return table


def _digest(table: ShardTable) -> str:
    # Of the states, not of the pages: it also reveals a missing page, or an older one.
    return hashlib.sha256(table.states).hexdigest()


def _worker_document(worker: Worker) -> list[Any]:
    calls = [ev.encode(event).decode() for event in worker.last_call]
    process = [worker.worker_id, worker.incarnation, worker.generation, worker.retired]
    return [*process, worker.last_seq, calls, worker.draining]


def _load_worker(item: list[Any]) -> Worker:
    worker_id, incarnation, generation, retired, last_seq, last_call, draining = item
    calls: list[Any] = [ev.decode(record.encode()) for record in last_call]
    return Worker(worker_id, incarnation, generation, retired, last_seq, calls, set(), draining)
