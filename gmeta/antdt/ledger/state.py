"""The ledger's state and how each event changes it, in the live service and in recovery alike.
Nothing is decided here: an event that got this far is a fact."""

from collections.abc import Callable
from typing import Any, final

from gmeta.antdt.ledger import events as ev
from gmeta.antdt.ledger.table import ShardTable
from gmeta.antdt.manifests.shard_manifest import DatasetManifest, parse_manifest
from gmeta.antdt.metric_readings import MetricHistory, RunReport
from gmeta.antdt.model import (
    MAX_ACTIONS,
    TOKEN_COUNTER_MASK,
    Backups,
    Checkpoint,
    DatasetSpec,
    LedgerLease,
    Outcome,
    ShardState,
    Worker,
)

MAX_CHECKPOINTS = 16  # manifests kept for Audit and for a retried Prepare
# Completed tokens that a late retry still finds ALREADY; older ones are FENCED.
MAX_CLOSED_TOKENS = 16_384
MAX_RETIRED = 256  # earlier incarnations remembered for each worker
MAX_REQUESTS = 256  # operator requests remembered for retries


@final
class LedgerState:
    """All that is durable, in memory."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.service_epoch = 0
        self.generation = 1
        self.rdzv_round = 0
        self.token_counter = 0  # within this service epoch
        self.draining = False
        self.lineage = ""  # digest of the last manifest prepared or restored
        self.restore_id = ""
        self.restored_digest = ""
        self.tables: dict[str, ShardTable] = {}
        self.workers: dict[str, Worker] = {}
        self.leases: dict[int, LedgerLease] = {}
        self.backups = Backups()
        self.closed: dict[int, str] = {}  # completed token -> worker, oldest first
        self.checkpoints: dict[str, Checkpoint] = {}
        self.requests: dict[str, int] = {}  # operator request -> shards changed
        self.actions: dict[str, ev.ActionPosted] = {}
        self.acked: dict[str, int] = {}
        self.readings = MetricHistory()
        self.run: RunReport | None = None  # what the trainer said last
        self.run_generation = 0  # in this generation

    def evolve(self, event: ev.Event) -> None:
        """Apply one fact."""
        _EVOLVE[type(event)](self, event)

    def drop_lease(self, token: int) -> LedgerLease:
        """End a lease and return it. The caller decides what becomes of the shard."""
        lease = self.leases.pop(token)
        self.workers[lease.worker_id].tokens.discard(token)
        self.backups.drop(token)
        return lease

    def _return(self, token: int, counts_attempt: bool, note: str = "") -> None:
        # Looked up before the lease is dropped, which ends the pair.
        still_held = token in self.backups.twins
        lease = self.drop_lease(token)
        table = self.tables[lease.dataset]
        table.give_back(lease.position, counts_attempt, note, still_held)

    def _record_call(self, event: ev.NumberedEvent) -> None:
        worker = self.workers[event.worker_id]
        worker.last_seq = event.seq
        worker.last_call = [event]

    def _service_started(self, event: ev.ServiceStarted) -> None:
        # Tokens carry the epoch in their upper bits, so counting from 0 repeats none.
        self.service_epoch = event.service_epoch
        self.job = event.job
        self.token_counter = 0

    def _dataset_added(self, event: ev.DatasetAdded) -> None:
        spec = DatasetSpec(**event.spec)  # type: ignore[arg-type]
        self.tables[spec.name] = ShardTable(spec)

    def _generation_started(self, event: ev.GenerationStarted) -> None:
        self.generation = event.generation
        self.rdzv_round = event.rdzv_round
        self.actions.clear()  # they were for the processes before
        for token in list(self.leases):
            self._return(token, counts_attempt=False)

    def _worker_registered(self, event: ev.WorkerRegistered) -> None:
        worker = self.workers.get(event.worker_id)
        if worker is None or worker.incarnation != event.incarnation:
            retired = [] if worker is None else [*worker.retired, worker.incarnation][-MAX_RETIRED:]
            for token in [] if worker is None else list(worker.tokens):
                self._return(token, counts_attempt=False)
            # The restart that they demanded has happened: the new process must not end again.
            self._drop_actions(event.worker_id)
            fresh = Worker(event.worker_id, event.incarnation, self.generation, retired)
            # An operator drains a worker id, not its process.
            fresh.draining = worker is not None and worker.draining
            self.workers[event.worker_id] = fresh
        else:
            # The same process in a new round: what it held went back when the round began.
            worker.generation = self.generation

    def _leases_granted(self, event: ev.LeasesGranted | ev.BackupGranted) -> None:
        table = self.tables[event.dataset]
        worker = self.workers[event.worker_id]
        for token, (position, _, _) in enumerate(event.items, event.first_token):
            table.set_state(position, ShardState.DOING)
            self.leases[token] = LedgerLease(token, event.dataset, position, event.worker_id)
            worker.tokens.add(token)
        last_token = event.first_token + len(event.items) - 1
        self.token_counter = last_token & TOKEN_COUNTER_MASK
        self._record_call(event)

    def _backup_granted(self, event: ev.BackupGranted) -> None:
        self._leases_granted(event)  # the shard is DOING already, and stays so
        self.backups.pair(event.beside, event.first_token)

    def _backups_wanted(self, event: ev.BackupsWanted) -> None:
        self.backups.wanted.update(event.tokens)

    def _units_progressed(self, event: ev.UnitsProgressed) -> None:
        for token, units_done in event.items:
            lease = self.leases[token]
            self.tables[lease.dataset].units_done[lease.position] = units_done

    def _shards_completed(self, event: ev.ShardsCompleted) -> None:
        for token, outcome in event.items:
            if outcome == Outcome.ACCEPTED:
                twin = self.backups.twins.get(token)
                lease = self.drop_lease(token)
                if twin is not None:
                    self.drop_lease(twin)  # it came second
                self.tables[lease.dataset].set_state(lease.position, ShardState.DONE)
                self.closed[token] = event.worker_id
        _forget_oldest(self.closed, MAX_CLOSED_TOKENS)
        self._record_call(event)

    def _shards_released(self, event: ev.ShardsReleased) -> None:
        for token, outcome in event.items:
            if outcome == Outcome.ACCEPTED:
                self._return(token, counts_attempt=False)
        self._record_call(event)

    def _shard_failed(self, event: ev.ShardFailed) -> None:
        self._return(event.token, counts_attempt=True, note=event.note)
        self._record_call(event)

    def _leases_expired(self, event: ev.LeasesExpired) -> None:
        for token in event.tokens:
            worker_id = self.leases[token].worker_id
            self._return(token, counts_attempt=True, note=f"lease of {worker_id} expired")

    def _epoch_opened(self, event: ev.EpochOpened) -> None:
        self.tables[event.dataset].open_epoch(event.epoch)

    def _checkpoint_prepared(self, event: ev.CheckpointPrepared) -> None:
        self.lineage = event.digest
        # The id may be of a rolled back lineage; put in anew it is the newest, and is kept.
        self.checkpoints.pop(event.checkpoint_id, None)
        self.checkpoints[event.checkpoint_id] = Checkpoint(
            event.checkpoint_id, self.generation, event.step, event.digest, event.manifest_json
        )
        _forget_oldest(self.checkpoints, MAX_CHECKPOINTS)

    def _checkpoint_committed(self, event: ev.CheckpointCommitted) -> None:
        checkpoint = self.checkpoints[event.checkpoint_id]
        checkpoint.committed = True
        for entry in parse_manifest(checkpoint.manifest_json).datasets:
            table = self.tables[entry.spec.name]
            # The epoch may have ended since Prepare: its positions mean nothing in the next one.
            if table.epoch == entry.epoch:
                table.committed = list(entry.done)

    def _state_restored(self, event: ev.StateRestored) -> None:
        entries = parse_manifest(event.manifest_json).datasets if event.manifest_json else ()
        by_name = {entry.spec.name: entry for entry in entries}
        for token in list(self.leases):
            self.drop_lease(token)
        for entry in entries:
            if entry.spec.name not in self.tables:
                self._dataset_added(ev.DatasetAdded(entry.spec.to_dict()))
        # Also datasets that the manifest does not know: at that step nothing of them was trained.
        for name, table in self.tables.items():
            restore_table(table, by_name.get(name))
        self.generation = event.generation
        self.actions.clear()
        self.lineage = self.restored_digest = event.digest
        # It is on disk, since it is restored, even where a crash came before its commit.
        for checkpoint in self.checkpoints.values():
            checkpoint.committed |= checkpoint.digest == event.digest
        self.restore_id = event.restore_id
        self.workers[event.worker_id].generation = event.generation

    def _action_posted(self, event: ev.ActionPosted) -> None:
        if not event.worker_id:
            self._drop_actions("", event.kind)
        self.actions[event.action_id] = event

    def _drop_actions(self, worker_id: str, kind: int | None = None) -> None:
        self.actions = {
            action_id: action
            for action_id, action in self.actions.items()
            if action.worker_id != worker_id or kind not in (None, action.kind)
        }

    def _action_acked(self, event: ev.ActionAcked) -> None:
        del self.actions[event.action_id]
        # Remembered, so that an acknowledgement sent twice is ALREADY and not an unknown action.
        self.acked[event.action_id] = event.result
        _forget_oldest(self.acked, MAX_ACTIONS)

    def _readings_taken(self, event: ev.ReadingsTaken) -> None:
        self.readings.add(event.items, self.generation)

    def _run_reported(self, event: ev.RunReported) -> None:
        self.run, self.run_generation = RunReport._make(event), self.generation

    def _record_request(self, request_id: str, num_changed: int) -> None:
        self.requests[request_id] = num_changed
        _forget_oldest(self.requests, MAX_REQUESTS)

    def _shards_requeued(self, event: ev.ShardsRequeued) -> None:
        table = self.tables[event.dataset]
        for position in event.positions:
            table.attempts.pop(position, None)
            table.notes.pop(position, None)
            table.set_state(position, ShardState.READY)
        self._record_request(event.request_id, len(event.positions))

    def _shards_skipped(self, event: ev.ShardsSkipped) -> None:
        table = self.tables[event.dataset]
        skipped = set(event.positions)
        leases = [(t, x.position) for t, x in self.leases.items() if x.dataset == event.dataset]
        held_tokens = [token for token, position in leases if position in skipped]
        # Not given back: that would make the shards READY, and count them as such.
        for token in held_tokens:
            self.drop_lease(token)
        for position in event.positions:
            table.set_state(position, ShardState.SKIPPED)
            table.notes[position] = event.reason
        self._record_request(event.request_id, len(event.positions))

    def _drain_set(self, event: ev.DrainSet) -> None:
        num_released = 0
        if event.worker_id:
            worker = self.workers[event.worker_id]
            worker.draining = event.draining
            tokens = list(worker.tokens) if event.draining else []
            for token in tokens:
                self._return(token, counts_attempt=False)
            num_released = len(tokens)
        else:
            # Nothing goes back: what is in hand is finished, only no more is handed out.
            self.draining = event.draining
        self._record_request(event.request_id, num_released)


def restore_table(table: ShardTable, entry: DatasetManifest | None) -> None:
    """Make `table` what `entry` says, None: nothing trained."""
    table.open_epoch(0 if entry is None else entry.epoch)
    if entry is None:
        return
    for start, end in entry.done:
        table.states[start:end] = bytes([ShardState.DONE]) * (end - start)
    set_aside = ((ShardState.SKIPPED, entry.skipped), (ShardState.QUARANTINED, entry.quarantined))
    for state, items in set_aside:
        for item in items:
            table.states[item.position] = state
    # Shards that were in flight are READY again, from their offset on.
    for item in entry.exceptions:
        if item.units_done:
            table.units_done[item.position] = item.units_done
        if item.attempts:
            table.attempts[item.position] = item.attempts
        if item.note:
            table.notes[item.position] = item.note
    table.recount()
    table.committed = sorted(entry.done)
    table.mark_all_dirty()


def _forget_oldest(memory: dict[Any, Any], most: int) -> None:
    while len(memory) > most:
        del memory[next(iter(memory))]


_EVOLVE: dict[type[ev.Event], Callable[..., None]] = {
    ev.ServiceStarted: LedgerState._service_started,
    ev.DatasetAdded: LedgerState._dataset_added,
    ev.GenerationStarted: LedgerState._generation_started,
    ev.WorkerRegistered: LedgerState._worker_registered,
    ev.LeasesGranted: LedgerState._leases_granted,
    ev.BackupsWanted: LedgerState._backups_wanted,
    ev.BackupGranted: LedgerState._backup_granted,
    ev.UnitsProgressed: LedgerState._units_progressed,
    ev.ShardsCompleted: LedgerState._shards_completed,
    ev.ShardsReleased: LedgerState._shards_released,
    ev.ShardFailed: LedgerState._shard_failed,
    ev.LeasesExpired: LedgerState._leases_expired,
    ev.EpochOpened: LedgerState._epoch_opened,
    ev.CheckpointPrepared: LedgerState._checkpoint_prepared,
    ev.CheckpointCommitted: LedgerState._checkpoint_committed,
    ev.StateRestored: LedgerState._state_restored,
    ev.ActionPosted: LedgerState._action_posted,
    ev.ActionAcked: LedgerState._action_acked,
    ev.ShardsRequeued: LedgerState._shards_requeued,
    ev.ShardsSkipped: LedgerState._shards_skipped,
    ev.DrainSet: LedgerState._drain_set,
    ev.ReadingsTaken: LedgerState._readings_taken,
    ev.RunReported: LedgerState._run_reported,
}
