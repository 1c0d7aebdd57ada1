"""Which results of workers count: units, shards, returns, failures. Nothing is changed here."""

from collections.abc import Iterable

from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger import events as ev
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.model import Outcome, Worker


def judge_progress(
    state: LedgerState, worker: Worker, items: Iterable[tuple[int, int]]
) -> tuple[list[Outcome], dict[int, int]]:
    """Return the outcome of each (token, units done), and the units of the tokens that moved."""
    moved: dict[int, int] = {}
    outcomes = []
    for token, units_done in items:
        outcome = _judge_item(state, worker, token, units_done, moved.get(token))
        if outcome == Outcome.ACCEPTED:
            moved[token] = units_done
        outcomes.append(outcome)
    return outcomes, moved


def _judge_item(
    state: LedgerState, worker: Worker, token: int, units_done: int, units_moved: int | None
) -> Outcome:
    if token not in worker.tokens:
        return Outcome.FENCED
    lease = state.leases[token]
    table = state.tables[lease.dataset]
    units_known = table.units_done.get(lease.position, 0) if units_moved is None else units_moved
    # Two leases of a shard progress each on its own: only the whole shard counts.
    if table.spec.speculative or units_done > table.length_at(lease.position):
        return Outcome.INVALID
    return Outcome.ACCEPTED if units_done > units_known else Outcome.ALREADY


def build_give_back(
    state: LedgerState, worker: Worker, command: cmd.Complete | cmd.Release, call_crc: int
) -> ev.ShardsCompleted | ev.ShardsReleased:
    """Return the event of a Complete or Release."""
    # Also where none of its tokens counts: the call's number is used up.
    is_whole = isinstance(command, cmd.Complete)
    items: list[tuple[int, int]] = []
    accepted: set[int] = set()
    for token in command.tokens:
        if token in worker.tokens:
            # A token named twice in one call counts once.
            outcome = Outcome.ALREADY if token in accepted else Outcome.ACCEPTED
            accepted.add(token)
        else:
            was_done = is_whole and state.closed.get(token) == worker.worker_id
            outcome = Outcome.ALREADY if was_done else Outcome.FENCED
        items.append((token, int(outcome)))
    kind = ev.ShardsCompleted if is_whole else ev.ShardsReleased
    return kind(worker.worker_id, command.seq, call_crc, items)


def build_failure(
    state: LedgerState, worker: Worker, command: cmd.Fail, call_crc: int
) -> ev.ShardFailed | None:
    """Return the event of a Fail; None where the worker does not hold the shard."""
    if command.token not in worker.tokens:
        return None
    lease = state.leases[command.token]
    table = state.tables[lease.dataset]
    exhausted = table.attempts.get(lease.position, 0) + 1 > table.spec.max_attempts
    # While another worker holds the shard too, it may still be completed.
    quarantined = exhausted and command.token not in state.backups.twins
    note = f"{command.failure_class}: {command.message}"
    return ev.ShardFailed(worker.worker_id, command.seq, call_crc, command.token, note, quarantined)
