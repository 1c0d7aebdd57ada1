"""Numbered calls: the last one, if repeated, gets its stored answer; the next is new; any other is
refused. So a lost answer neither costs nor doubles a shard."""

import zlib
from typing import Any, NamedTuple, final

from gmeta.access.errors import RefusedError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger import events as ev
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.model import Outcome, Worker


class Unrecorded(NamedTuple):
    """The last numbered call of a worker, when it left no event."""

    incarnation: str
    seq: int
    call_crc: int
    reply: cmd.Reply


@final
class CallNumbers:
    """Which call of a worker comes next, and what the last one was answered."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state
        # Lease calls answered with WAIT or END use their number too, or a late copy of one could be
        # granted shards that nobody knows of. They leave no event: after a restart every worker
        # registers and takes the ledger's number.
        self._unrecorded: dict[str, Unrecorded] = {}
        self._unstored: dict[str, Unrecorded] = {}  # those since the last `stored`

    def mark_durable(self) -> None:
        """Keep the replies so far: the store has all events that they depend on."""
        self._unrecorded.update(self._unstored)
        self._unstored.clear()

    def take_over(self, older: "CallNumbers") -> None:
        """Keep the calls without an event when the ledger is read back in one service epoch."""
        # `_unstored` is left out: its replies stood beside events that the store did not take, and
        # an END may have been due to a completion among those.
        self._unrecorded = older._unrecorded

    def last_seq(self, worker: Worker) -> int:
        """Return the number of the worker's last answered call."""
        unrecorded = self._newer_unrecorded(worker)
        return unrecorded.seq if unrecorded else worker.last_seq

    def answered_before(self, worker: Worker, command: Any, call_crc: int) -> cmd.Reply:
        """Return None for a new call, the stored reply for the last one. Raise RefusedError."""
        last_seq = self.last_seq(worker)
        if command.seq == last_seq + 1:
            return None
        last_crc, last_reply = self._last_call(worker)
        if command.seq != last_seq or last_reply is None:
            raise RefusedError(
                "OUT_OF_RANGE",
                "BAD_SEQ",
                f"worker {worker.worker_id!r} sent call number {command.seq}; allowed are "
                f"{last_seq} "
                f"(the last one again) and {last_seq + 1}. Number calls one by one, one at a time.",
            )
        if last_crc != call_crc:
            raise RefusedError(
                "INVALID_ARGUMENT",
                "BAD_SEQ",
                f"worker {worker.worker_id!r} used call number {command.seq} for two different "
                "calls; a number may only be repeated with the same content. Count one up for "
                "each new call.",
            )
        return last_reply

    def note_unrecorded(self, worker: Worker, seq: int, call_crc: int, reply: cmd.Reply) -> None:
        """Remember the reply to a call that left no event."""
        self._unstored[worker.worker_id] = Unrecorded(worker.incarnation, seq, call_crc, reply)

    def reply_of(self, event: Any) -> cmd.Reply:
        """Return the reply to a numbered call, rebuilt from its event alone."""
        # So a retry after a crash gets the same reply.
        if isinstance(event, ev.LeasesGranted | ev.BackupGranted):
            table = self._state.tables[event.dataset]
            # Its grants would need the earlier epoch's order, and their tokens are closed by now.
            if table.epoch != event.epoch:
                return cmd.End(event.seq)
            grants = (
                table.grant(event.first_token + i, *item) for i, item in enumerate(event.items)
            )
            return cmd.GrantReply(event.seq, tuple(grants))
        if isinstance(event, ev.ShardFailed):
            return cmd.Outcomes(event.seq, (Outcome.ACCEPTED,), event.quarantined)
        return cmd.Outcomes(event.seq, tuple(Outcome(outcome) for _, outcome in event.items))

    def _newer_unrecorded(self, worker: Worker) -> Unrecorded | None:
        name = worker.worker_id
        call = self._unstored.get(name) or self._unrecorded.get(name)
        is_newer = call and call.incarnation == worker.incarnation and call.seq > worker.last_seq
        return call if is_newer else None

    def _last_call(self, worker: Worker) -> tuple[int, cmd.Reply]:
        unrecorded = self._newer_unrecorded(worker)
        if unrecorded:
            return unrecorded.call_crc, unrecorded.reply
        event: Any = worker.last_call[0] if worker.last_call else None
        return (0, None) if event is None else (event.call_crc, self.reply_of(event))


def checksum_call(command: Any) -> int:
    """Return a checksum by which two calls with one number differ."""
    # From the third field on, without caller and number (commands.py): the caller's service epoch
    # changes when the service restarts.
    return zlib.crc32(repr((type(command).__name__, command[2:])).encode())
