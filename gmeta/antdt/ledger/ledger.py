"""The pure state machine of the service, `apply(command, now) -> events`: no I/O, no clock."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, final

from gmeta.antdt.ledger import checkpoints, offers
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger import events as ev
from gmeta.antdt.ledger import operator_actions as operate
from gmeta.antdt.ledger import worker_results as results
from gmeta.antdt.ledger.call_numbers import CallNumbers, checksum_call
from gmeta.antdt.ledger.fences import check_caller, check_process, check_registration
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.ledger.table import find_table, is_new_dataset
from gmeta.antdt.model import Grant, Outcome, Worker

# What a dead worker held, whose agent is silent too, is handed out again within this time.
DEFAULT_LEASE_TTL_S = 30.0
GENESIS = b"\0" * 32  # the head of a chain without events


class AppliedCommand(NamedTuple):
    """A command's reply, the records to store before it, and whether these need a sync."""

    reply: cmd.Reply
    records: list[bytes]
    needs_sync: bool


class WorkerSeen(NamedTuple):
    """Volatile: when a worker last called, and its last report."""

    seen_s: float
    report: tuple[float, ...]


@final
class Ledger:
    """Owns a LedgerState, the live deadlines and the hash chain; one caller at a time."""

    def __init__(
        self, state: LedgerState, lease_ttl_s: float, num_events: int = 0, head: bytes = GENESIS
    ) -> None:
        self.state = state
        self.lease_ttl_s = lease_ttl_s
        self.num_events = num_events
        self.head = head
        self.seen: dict[str, WorkerSeen] = {}
        self.started_s = 0.0  # when this process's service began, on the same clock
        self.numbers = CallNumbers(state)
        self._next_deadline_s = float("inf")
        self._expired: tuple[tuple[int, str], ...] = ()
        self._records: list[bytes] = []
        self._needs_sync = False

    def replay(self, record: bytes) -> None:
        """Take one stored record back in."""
        self.state.evolve(ev.decode(record))
        self._chain(record)

    def renew_all(self, now_s: float) -> None:
        """Give every lease a full ttl."""
        # After a recovery: deadlines are never stored, so nobody knows how old a lease is.
        self._renew(list(self.state.leases), now_s)

    def apply(self, command: cmd.Command, now_s: float) -> AppliedCommand:
        """Decide and apply one command at monotonic time `now_s`. Raise RefusedError."""
        # First: no call may be judged by an expired lease. What expires here stays expired, even if
        # the command is refused (see take_records).
        if now_s >= self._next_deadline_s:
            self._expire(now_s)
        reply = _DECIDE[type(command)](self, command, now_s)
        return AppliedCommand(reply, *self.take_records())

    def take_records(self) -> tuple[list[bytes], bool]:
        """Return the records since the last call, and whether they need a sync."""
        records, needs_sync = self._records, self._needs_sync
        self._records, self._needs_sync = [], False
        return records, needs_sync

    def _emit(self, event: ev.Event) -> None:
        # Live service and recovery share state.evolve, so what is replayed is what happened.
        record = ev.encode(event)
        self.state.evolve(event)
        self._chain(record)
        self._records.append(record)
        self._needs_sync = self._needs_sync or not isinstance(event, ev.NEEDS_NO_SYNC)

    def _chain(self, record: bytes) -> None:
        self.head = extend_chain(self.head, record)
        self.num_events += 1

    def _expire(self, now_s: float) -> None:
        leases = self.state.leases
        due = sorted(token for token, lease in leases.items() if lease.deadline_s <= now_s)
        if due:
            self._expired += tuple((token, leases[token].worker_id) for token in due)
            self._emit(ev.LeasesExpired(due))
        # Renewals only make deadlines later: nothing is due before the earliest one now.
        self._next_deadline_s = min(
            (lease.deadline_s for lease in leases.values()), default=float("inf")
        )

    def _renew(self, tokens: Iterable[int], now_s: float) -> None:
        """Give live leases one full ttl from now."""
        deadline_s = now_s + self.lease_ttl_s
        for token in tokens:
            self.state.leases[token].deadline_s = deadline_s
        # An older deadline may be the earliest still: its scan finds nothing due and looks further.
        self._next_deadline_s = min(self._next_deadline_s, deadline_s)

    def _look_up_call(self, command: Any, now_s: float) -> tuple[Worker, int, cmd.Reply]:
        """Return the worker, the call's checksum, and the stored reply of a repeated call."""
        worker = check_caller(self.state, command.caller)
        self._note_seen(worker.worker_id, now_s)
        call_crc = checksum_call(command)
        return worker, call_crc, self.numbers.answered_before(worker, command, call_crc)

    def _note_seen(self, worker_id: str, now_s: float, report: tuple[float, ...] = ()) -> None:
        old = self.seen.get(worker_id)
        self.seen[worker_id] = WorkerSeen(now_s, report or (old.report if old else ()))

    def _start_service(self, command: cmd.StartService, now_s: float) -> cmd.Reply:
        # Deadlines are on one process's clock and never stored, so all begin anew here.
        self._emit(ev.ServiceStarted(*command))
        self.started_s = now_s
        self.renew_all(now_s)
        return None

    def _tick(self, command: cmd.Tick, now_s: float) -> cmd.Reply:
        expired, self._expired = self._expired, ()
        return cmd.TickReply(expired)

    def _register_dataset(self, command: cmd.RegisterDataset, now_s: float) -> cmd.Reply:
        spec = command.spec
        is_new = is_new_dataset(self.state.tables, spec)
        if is_new:
            self._emit(ev.DatasetAdded(spec.to_dict()))
        return cmd.DatasetReply(spec.num_shards, spec.digest, is_new)

    def _register(self, command: cmd.Register, now_s: float) -> cmd.Reply:
        state = self.state
        worker_id, incarnation, rdzv_round = command
        check_registration(state, worker_id, incarnation, rdzv_round)
        # First the generation: the worker is registered into the new one.
        if rdzv_round is not None and rdzv_round > state.rdzv_round:
            self._emit(ev.GenerationStarted(state.generation + 1, rdzv_round))
        worker = state.workers.get(worker_id)
        new = (incarnation, state.generation)
        if worker is None or (worker.incarnation, worker.generation) != new:
            if worker is not None and worker.incarnation != incarnation:
                # Totals count from the process's own start: those of the one before would be
                # higher, and the monitor would take nothing in until they were passed.
                self.seen.pop(worker_id, None)
            self._emit(ev.WorkerRegistered(worker_id, incarnation))
        worker = state.workers[worker_id]
        self._note_seen(worker_id, now_s)
        # A worker that registers again lives: none of its leases may expire meanwhile.
        self._renew(worker.tokens, now_s)
        leases = tuple(self._live_grant(token) for token in sorted(worker.tokens))
        return cmd.RegisterReply(
            state.service_epoch, state.generation, self.numbers.last_seq(worker), leases
        )

    def _live_grant(self, token: int) -> Grant:
        lease = self.state.leases[token]
        table = self.state.tables[lease.dataset]
        position = lease.position
        return table.grant(
            token, position, table.units_done.get(position, 0), table.attempts.get(position, 0)
        )

    def _lease(self, command: cmd.LeaseShards, now_s: float) -> cmd.Reply:
        worker, call_crc, reply = self._look_up_call(command, now_s)
        if reply is None:
            reply = self._offer(worker, command, call_crc)
        # Only these: a lease whose grant never reached the worker must be able to expire.
        if isinstance(reply, cmd.GrantReply):
            self._renew([x.token for x in reply.grants if x.token in worker.tokens], now_s)
        return reply

    def _offer(self, worker: Worker, command: cmd.LeaseShards, call_crc: int) -> cmd.Reply:
        table = find_table(self.state.tables, command.dataset)
        nothing = offers.refuse_grant(self.state, worker, table, command.epoch, command.seq)
        if nothing is None:
            if command.epoch > table.epoch:
                self._emit(ev.EpochOpened(command.dataset, command.epoch))
            granted = offers.next_grant(self.state, worker, table, command, call_crc)
            if granted is not None:
                self._emit(granted)
                return self.numbers.reply_of(worker.last_call[0])
            nothing = offers.wait_for_others(table, command.seq)
        self.numbers.note_unrecorded(worker, command.seq, call_crc, nothing)
        return nothing

    def _heartbeat(self, command: cmd.Heartbeat, now_s: float) -> cmd.Reply:
        worker = check_caller(self.state, command.caller)
        self._note_seen(worker.worker_id, now_s, command.report)
        if new := self.state.readings.select_new(command.readings, self.state.generation):
            self._emit(ev.ReadingsTaken(new))
        known = (self.state.run, self.state.run_generation)
        if command.run is not None and known != (command.run, self.state.generation):
            self._emit(ev.RunReported(*command.run))
        # Only those that it names: a grant that never reached it must be able to expire.
        live = [token for token in command.tokens if token in worker.tokens]
        self._renew(live, now_s)
        revoked = tuple(token for token in command.tokens if token not in worker.tokens)
        actions = (operate.action_for(x, worker.worker_id) for x in self.state.actions.values())
        return cmd.HeartbeatReply(revoked, tuple(mine for mine in actions if mine is not None))

    def _progress(self, command: cmd.ReportProgress, now_s: float) -> cmd.Reply:
        worker = check_caller(self.state, command.caller)
        self._note_seen(worker.worker_id, now_s)
        outcomes, moved = results.judge_progress(self.state, worker, command.items)
        if moved:
            self._emit(ev.UnitsProgressed(list(moved.items())))
            self._renew(moved, now_s)
        return cmd.Outcomes(0, tuple(outcomes))

    def _give_back(self, command: cmd.Complete | cmd.Release, now_s: float) -> cmd.Reply:
        worker, call_crc, earlier_reply = self._look_up_call(command, now_s)
        if earlier_reply is not None:
            return earlier_reply
        self._emit(results.build_give_back(self.state, worker, command, call_crc))
        return self.numbers.reply_of(worker.last_call[0])

    def _fail(self, command: cmd.Fail, now_s: float) -> cmd.Reply:
        worker, call_crc, earlier_reply = self._look_up_call(command, now_s)
        if earlier_reply is not None:
            return earlier_reply
        failed = results.build_failure(self.state, worker, command, call_crc)
        if failed is None:
            # Nothing happened, so there is no event, and the next call has the same number.
            return cmd.Outcomes(self.numbers.last_seq(worker), (Outcome.FENCED,))
        self._emit(failed)
        return self.numbers.reply_of(worker.last_call[0])

    def _prepare(self, command: cmd.PrepareCheckpoint, now_s: float) -> cmd.Reply:
        check_caller(self.state, command.caller)
        earlier = checkpoints.prepared_before(self.state, command)
        if earlier is None:
            # Made before its own event: a manifest cannot state a chain's head that covers itself.
            manifest = checkpoints.build_manifest(self.state, command, self.num_events, self.head)
            earlier = ev.CheckpointPrepared(
                command.checkpoint_id, command.step, manifest.digest, manifest.to_json()
            )
            self._emit(earlier)
        return cmd.ManifestReply(earlier.manifest_json, earlier.digest)

    def _commit(self, command: cmd.CommitCheckpoint, now_s: float) -> cmd.Reply:
        check_caller(self.state, command.caller)
        if checkpoints.is_new_commit(self.state, command):
            self._emit(ev.CheckpointCommitted(command.checkpoint_id))
        return cmd.ChangeReply(0)

    def _restore(self, command: cmd.Restore, now_s: float) -> cmd.Reply:
        state = self.state
        worker = check_process(state, command.caller)
        # A repeated call still carries the generation that its first copy ended, so it is
        # recognised here, before that fence.
        repeated = command.restore_id == state.restore_id and worker.generation == state.generation
        if not repeated:
            check_caller(state, command.caller)
            digest = checkpoints.check_restore(state, command.manifest_json)
            made_by = (command.restore_id, worker.worker_id, state.generation + 1)
            self._emit(ev.StateRestored(*made_by, digest, command.manifest_json))
        return cmd.RestoreReply(state.generation, state.restored_digest)

    def _operate(self, command: cmd.Requeue | cmd.Skip | cmd.Drain, now_s: float) -> cmd.Reply:
        # Operators' clients retry too; a repeated Drain must not release what was leased since.
        if command.request_id not in self.state.requests:
            self._emit(operate.decide(self.state, command))
        return cmd.ChangeReply(self.state.requests[command.request_id])

    def _post_action(self, command: cmd.PostAction, now_s: float) -> cmd.Reply:
        if operate.is_new_action(self.state, command):
            self._emit(ev.ActionPosted(*command))
        return None

    def _back_up(self, command: cmd.BackUp, now_s: float) -> cmd.Reply:
        state = self.state
        worker = state.workers.get(command.worker_id)
        tokens = worker and offers.leases_to_back_up(state, worker)
        if tokens:
            self._emit(ev.BackupsWanted(command.action_id, tokens))
        return cmd.ChangeReply(len(tokens or ()))

    def _ack_action(self, command: cmd.AckAction, now_s: float) -> cmd.Reply:
        worker = check_caller(self.state, command.caller)
        if command.action_id in self.state.acked:
            return cmd.Outcomes(0, (Outcome.ALREADY,))
        operate.check_ack(self.state, worker, command.action_id)
        if not self.state.actions[command.action_id].worker_id:
            # A global action stays open until a newer one replaces it: late workers need it too.
            return cmd.Outcomes(0, (Outcome.ACCEPTED,))
        self._emit(ev.ActionAcked(command.action_id, command.result, command.message))
        return cmd.Outcomes(0, (Outcome.ACCEPTED,))


def extend_chain(head: bytes, record: bytes) -> bytes:
    """Return the head of the chain with one more record."""
    return hashlib.sha256(head + record).digest()


_DECIDE: dict[type[Any], Callable[[Ledger, Any, float], cmd.Reply]] = {
    cmd.StartService: Ledger._start_service,
    cmd.Tick: Ledger._tick,
    cmd.RegisterDataset: Ledger._register_dataset,
    cmd.Register: Ledger._register,
    cmd.LeaseShards: Ledger._lease,
    cmd.Heartbeat: Ledger._heartbeat,
    cmd.ReportProgress: Ledger._progress,
    cmd.Complete: Ledger._give_back,
    cmd.Release: Ledger._give_back,
    cmd.Fail: Ledger._fail,
    cmd.PrepareCheckpoint: Ledger._prepare,
    cmd.CommitCheckpoint: Ledger._commit,
    cmd.Restore: Ledger._restore,
    cmd.PostAction: Ledger._post_action,
    cmd.BackUp: Ledger._back_up,
    cmd.AckAction: Ledger._ack_action,
    cmd.Requeue: Ledger._operate,
    cmd.Skip: Ledger._operate,
    cmd.Drain: Ledger._operate,
}
