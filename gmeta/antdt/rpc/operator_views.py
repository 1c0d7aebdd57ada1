"""What operators see, read from the ledger as protobuf: status, shards one by one, audits."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from gmeta.antdt.ledger.ledger import Ledger
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.ledger.table import ShardTable, find_table
from gmeta.antdt.manifests.audit import audit_manifest
from gmeta.antdt.manifests.shard_manifest import covers, parse_manifest
from gmeta.antdt.model import MAX_SHARDS, ShardState, argument_refusal
from gmeta.antdt.rpc.proto_types import encode_spec
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb

MAX_WORKERS_SHOWN = 1000
MAX_PAGE = 1000
DEFAULT_PAGE = 100
MAX_BACKED_UP_SHOWN = 100
_WIRE_STATE = {
    ShardState.READY: pb.SHARD_STATE_TODO,
    ShardState.DOING: pb.SHARD_STATE_DOING,
    ShardState.DONE: pb.SHARD_STATE_DONE_OPEN,
    ShardState.SKIPPED: pb.SHARD_STATE_SKIPPED,
    ShardState.QUARANTINED: pb.SHARD_STATE_QUARANTINED,
}
_LEDGER_STATE = {wire: state for state, wire in _WIRE_STATE.items()} | {
    pb.SHARD_STATE_DONE_COMMITTED: ShardState.DONE
}


def status(ledger: Ledger, now_s: float, shown_workers: Sequence[str] | None = None) -> Any:
    """Return a StatusResponse for `now_s`, with the first of `shown_workers`, or of all by name."""
    state = ledger.state
    names = sorted(state.workers) if shown_workers is None else shown_workers
    return pb.StatusResponse(
        job=state.job,
        service_epoch=state.service_epoch,
        run_generation=state.generation,
        draining=state.draining,
        ledger_events=ledger.num_events,
        ledger_head=ledger.head.hex(),
        datasets=[_dataset_status(state, table) for table in state.tables.values()],
        workers=[_worker_status(ledger, name, now_s) for name in names[:MAX_WORKERS_SHOWN]],
        checkpoints=[
            pb.CheckpointStatus(
                checkpoint_id=c.checkpoint_id,
                step=c.step,
                digest=c.digest,
                committed=c.committed,
                run_generation=c.generation,
            )
            for c in state.checkpoints.values()
        ],
        num_workers=len(state.workers),
        num_leases=len(state.leases),
    )


def _dataset_status(state: LedgerState, table: ShardTable) -> Any:
    todo, doing, done, skipped, quarantined = table.counts
    committed = min(table.num_committed, done)
    return pb.DatasetStatus(
        spec=encode_spec(table.spec),
        epoch=table.epoch,
        num_shards=table.spec.num_shards,
        todo=todo,
        doing=doing,
        done_open=done - committed,
        done_committed=committed,
        skipped=skipped,
        quarantined=quarantined,
        finished=table.finished,
        backed_up=islice(_backed_up(state, table), MAX_BACKED_UP_SHOWN),
    )


def _backed_up(state: LedgerState, table: ShardTable) -> Iterator[Any]:
    for token, other in state.backups.twins.items():
        lease = state.leases[token]
        if token < other and lease.dataset == table.spec.name:
            holders = (lease.worker_id, state.leases[other].worker_id)
            yield _shard_info(table, lease.position, holders)


def _worker_status(ledger: Ledger, worker_id: str, now_s: float) -> Any:
    worker = ledger.state.workers[worker_id]
    message = pb.WorkerStatus(
        worker_id=worker_id,
        incarnation=worker.incarnation,
        num_leases=len(worker.tokens),
        draining=worker.draining,
        run_generation=worker.generation,
    )
    seen = ledger.seen.get(worker_id)
    if seen is not None:
        message.silent_ms = max(0, int((now_s - seen.seen_s) * 1000))
        if seen.report:
            report = dict(zip(REPORT_FIELDS, seen.report, strict=True))
            message.report.CopyFrom(pb.WorkerReport(**report))
    return message


REPORT_FIELDS = tuple(pb.WorkerReport.DESCRIPTOR.fields_by_name)


def list_shards(ledger: Ledger, dataset: str, state: int, page_size: int, page_token: str) -> Any:
    """Return a ListShardsResponse; its page token is the next position. Raise RefusedError."""
    table = find_table(ledger.state.tables, dataset)
    size = page_size or DEFAULT_PAGE
    # A token is a position: with more digits it is none, nor a number that int() takes.
    is_token = (page_token or "0").isdecimal() and len(page_token) <= len(str(MAX_SHARDS))
    if size > MAX_PAGE or not is_token:
        raise argument_refusal(
            f"page_size is {page_size} and page_token {page_token[:20]!r}; allowed are 1 to "
            f"{MAX_PAGE} and a token of the page before. Begin again without a token."
        )
    # An open enum of the proto: any number can come.
    if state and state not in _LEDGER_STATE:
        raise argument_refusal(
            f"state is {state}; allowed are {min(_LEDGER_STATE)} to {max(_LEDGER_STATE)}, or none "
            "for all. Correct the request."
        )
    holders: dict[int, list[str]] = {}
    # Once for the whole page, not once for each shard.
    for lease in ledger.state.leases.values():  # in the order of the grants
        if lease.dataset == dataset:
            holders.setdefault(lease.position, []).append(lease.worker_id)
    response = pb.ListShardsResponse(epoch=table.epoch)
    for position in _matching(table, state, int(page_token or 0)):
        if len(response.shards) == size:
            response.next_page_token = str(position)
            break
        response.shards.append(_shard_info(table, position, holders.get(position, ())))
    return response


def _matching(table: ShardTable, state: int, start: int) -> Iterator[int]:
    if not state:
        yield from range(start, table.spec.num_shards)
        return
    runs: Iterable[tuple[int, int]] = [(0, table.spec.num_shards)]
    if state == pb.SHARD_STATE_DONE_COMMITTED:
        runs = table.committed
    elif state == pb.SHARD_STATE_DONE_OPEN:
        # Between the committed runs, which may hold millions of shards of the other state.
        edges = [0, *chain.from_iterable(table.committed), table.spec.num_shards]
        runs = zip(edges[::2], edges[1::2], strict=True)
    for left, right in runs:
        yield from table.positions_in(_LEDGER_STATE[state], max(left, start), right)


def _wire_state(table: ShardTable, position: int) -> int:
    state = table.state_of(position)
    if state == ShardState.DONE and covers(table.committed, position, position + 1):
        return int(pb.SHARD_STATE_DONE_COMMITTED)
    return int(_WIRE_STATE[state])


def _shard_info(table: ShardTable, position: int, holders: Sequence[str]) -> Any:
    worker_id, backup, *_ = (*holders, "", "")
    index = table.order.index_of(position)
    length = table.spec.length_of(index)
    done = table.state_of(position) == ShardState.DONE
    return pb.ShardInfo(
        shard_index=index,
        position=position,
        state=_wire_state(table, position),
        start_unit=table.spec.start_of(index),
        num_units=length,
        units_done=length if done else table.units_done.get(position, 0),
        attempts=table.attempts.get(position, 0),
        worker_id=worker_id,
        note=table.notes.get(position, ""),
        backup_worker_id=backup,
    )


def audit(manifest_json: str) -> Any:
    """Return the AuditResponse of a manifest."""
    # Needs no ledger, so that it can run outside the writer's thread.
    report = audit_manifest(parse_manifest(manifest_json))
    return pb.AuditResponse(ok=report.ok, lines=report.lines, manifest_json=manifest_json.encode())
