"""Group commit: a batch of commands becomes one durable transaction, and no reply leaves before it.
Without threads and clock, so that the fault suite drives the very code that serves."""

import logging
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import NamedTuple, final

from gmeta.access.errors import RefusedError
from gmeta.antdt.errors import StoreError, StoreFailedError, StoreTakenError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger.ledger import DEFAULT_LEASE_TTL_S, Ledger, extend_chain
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.model import TOKEN_COUNTER_BITS
from gmeta.antdt.storage.request import Answer, LedgerView, Request, refusal_of
from gmeta.antdt.storage.snapshot import load_state, mark_stored, take_snapshot
from gmeta.antdt.storage.store import Store, damage_error
from gmeta.antdt.storage.store_records import RecordBatch
from gmeta_keys.translate_errors import format_foreign_error, translate_errors

SNAPSHOT_EVERY_EVENTS = 20_000  # this many take about 0.2 s to replay after a crash

_log = logging.getLogger("gmeta.antdt")


class CommitGroup(NamedTuple):
    """The answers of one batch; with `needs_sync` only the early ones may leave before a sync."""

    answers: list[Answer]
    needs_sync: bool


@final
class Committer:
    """A ledger and its store, kept in step."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        job: str = "default",
        lease_ttl_s: float = DEFAULT_LEASE_TTL_S,
        snapshot_every_events: int = SNAPSHOT_EVERY_EVENTS,
    ) -> None:
        """Claim the store and recover. Raise StoreError."""
        self._store = store
        self._clock = clock
        self._job = job
        self._lease_ttl_s = lease_ttl_s
        self._snapshot_every = snapshot_every_events
        self._in_step = True
        # Once this is set, nothing is answered from here any more.
        self.take_over_error: StoreTakenError | None = None
        # Claimed before anything is read: from here on an older service can append nothing that the
        # reading would miss.
        self.service_epoch = store.claim()
        self.ledger = self._recover_ledger()
        known, epoch = self.ledger.state.service_epoch, self.service_epoch
        # Tokens carry the epoch: a smaller one would repeat them, a larger one does not fit.
        if not known < epoch < 1 << (63 - TOKEN_COUNTER_BITS):
            raise damage_error(
                f"the store counts service epoch {epoch}, and its ledger knows {known}"
            )
        applied = self.ledger.apply(cmd.StartService(self.service_epoch, job), clock())
        self._append(applied.records)
        store.sync()

    def commit(self, requests: Sequence[Request]) -> list[Answer]:
        """Apply the requests in order, make their events durable, then return the answers."""
        group = self.append(requests)
        if group.needs_sync:
            self._store.sync()
        return group.answers

    def append(self, requests: Sequence[Request]) -> CommitGroup:
        """Apply and store the requests; answers that are not `is_early` wait for `Store.sync`."""
        try:
            answers, records, needs_sync = self._apply_all(requests)
            if records:
                self._append(records)
        except StoreError as error:
            self._fall_back(error)
            return CommitGroup([refusal_of(error)] * len(requests), False)
        self.ledger.numbers.mark_durable()
        if self.ledger.num_events - self._snapshot_at >= self._snapshot_every:
            self.try_snapshot()
        return CommitGroup(answers, needs_sync)

    def sync(self) -> None:
        """Make everything appended so far survive a power cut. Raise StoreError."""
        self._store.sync()

    def snapshot(self) -> None:
        """Store a snapshot, so that the next start replays nothing. Raise StoreError."""
        ledger = self.ledger
        self._store.write_snapshot(take_snapshot(ledger.state, ledger.num_events, ledger.head))
        mark_stored(ledger.state)
        self._snapshot_at = ledger.num_events

    def _apply_all(self, requests: Sequence[Request]) -> tuple[list[Answer], list[bytes], bool]:
        """Return the answers, the records and whether they need a sync."""
        failed: dict[int, RefusedError] = {}
        while True:
            self._catch_up()
            answers: list[Answer] = []
            records: list[bytes] = []
            any_sync = False
            now_s = self._clock()
            for number, request in enumerate(requests):
                if number in failed:
                    answers.append(failed[number])
                    continue
                if isinstance(request, LedgerView):
                    answers.append(self._answer_view(request, now_s))
                    continue
                try:
                    with translate_errors(partial(_log_defect, "command_failed"), RefusedError):
                        reply, new, needs_sync = self.ledger.apply(request, now_s)
                    answers.append(reply)
                except DefectError as error:
                    # INTERNAL for its caller alone: what it may have half changed is forgotten with
                    # the ledger, and the group is applied again without it.
                    failed[number] = error
                    self._in_step = False
                    break
                except RefusedError as error:
                    # A refused call may have found leases expired: their expiry is a fact.
                    new, needs_sync = self.ledger.take_records()
                    answers.append(error)
                records += new
                any_sync = any_sync or needs_sync
            else:
                return answers, records, any_sync

    def _answer_view(self, question: LedgerView, now_s: float) -> Answer:
        """Return what the view returns, or a defect of it as a refusal."""
        # It has changed nothing, so the other calls of the group go on.
        try:
            with translate_errors(partial(_log_defect, "view_failed"), RefusedError):
                return question.view(self.ledger, now_s)
        except RefusedError as error:
            return error

    def _append(self, records: Sequence[bytes]) -> None:
        first_event = self.ledger.num_events - len(records)
        self._store.append(RecordBatch(first_event, records, self.ledger.head))

    def _recover_ledger(self) -> Ledger:
        """Return the ledger as the store has it. Raise StoreError."""
        snapshot, batches = self._store.load()
        if snapshot is None:
            ledger = Ledger(LedgerState(self._job), self._lease_ttl_s)
        else:
            state = load_state(snapshot)
            ledger = Ledger(state, self._lease_ttl_s, snapshot.num_events, snapshot.head)
        for batch in batches:
            if batch.first_event != ledger.num_events:
                raise _broken_chain_error(f"event {ledger.num_events} is missing")
            # Checked first: the state may be unable to take an altered record.
            if batch.head != reduce(extend_chain, batch.records, ledger.head):
                num_after = ledger.num_events + len(batch.records)
                raise _broken_chain_error(f"the records before event {num_after} were altered")
            for record in batch.records:
                _replay(ledger, record)
        if ledger.state.job != self._job:
            raise StoreFailedError(
                f"the store belongs to job {ledger.state.job!r}, this service is for "
                f"{self._job!r}. Start it with that --job, or name another --store."
            )
        # This much is in the snapshot; what was replayed counts towards the next one.
        self._snapshot_at = 0 if snapshot is None else snapshot.num_events
        ledger.renew_all(self._clock())
        return ledger

    def _catch_up(self) -> None:
        if self.take_over_error is not None:
            raise self.take_over_error
        if not self._in_step:
            # What no event holds is kept: it belongs to this service epoch, which goes on.
            old, self.ledger = self.ledger, self._recover_ledger()
            self.ledger.seen = old.seen
            self.ledger.started_s = old.started_s
            self.ledger.numbers.take_over(old.numbers)
            self._in_step = True

    def _fall_back(self, error: StoreError) -> None:
        """Have memory forget the batch that the store did not take."""
        if isinstance(error, StoreTakenError):
            self.take_over_error = error
        # The batch that the store refused is still in memory: the ledger is read back from the
        # store before the next batch.
        self._in_step = False
        _log.error("store_failed", extra={"fields": {"error": str(error)}})

    def try_snapshot(self) -> None:
        """Store a snapshot, or log that the store cannot take one now."""
        # After a store failed, memory still holds what it refused: that must not be stored.
        if not self._in_step:
            return
        try:
            self.snapshot()
        except StoreError as error:
            # Everything is in the log already; without a snapshot the next start only takes longer.
            self._snapshot_at = self.ledger.num_events
            _log.warning("snapshot_failed", extra={"fields": {"error": str(error)}})


class DefectError(RefusedError):
    """A call met a defect of the service."""


def _log_defect(name: str, error: Exception) -> DefectError:
    """Log a defect with its traceback; return its caller's refusal."""
    _log.error(name, exc_info=error, extra={"fields": {"error": repr(error)}})
    return DefectError(
        "INTERNAL",
        "INTERNAL",
        f"the service could not answer: {format_foreign_error(error)}. That is a defect of the "
        "service, which goes on; report it with the traceback from its log.",
    )


def _replay(ledger: Ledger, record: bytes) -> None:
    """Take a stored record back in. Raise StoreFailedError where the state does not fit it."""
    # Such as a manifest that an older version did not check.
    with translate_errors(
        lambda error: StoreFailedError(
            f"the store's event {ledger.num_events + 1} cannot be applied: {record[:80]!r}: "
            f"{str(error).rstrip('.') or repr(error)}. Restore the store from a backup, or delete "
            "it: the manifest in a checkpoint rebuilds the service."
        ),
        StoreError,
    ):
        ledger.replay(record)


def _broken_chain_error(what: str) -> StoreFailedError:
    return StoreFailedError(
        f"the ledger's hash chain is broken: {what}. The store was damaged or edited: restore it "
        "from a backup, or delete it: the manifest in a checkpoint rebuilds the service."
    )
