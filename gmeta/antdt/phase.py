"""What a job is doing now, as far as its workers' calls show it."""

from typing import TYPE_CHECKING, Literal, get_args

from gmeta.antdt.model import MAX_EPOCHS

# For types alone: at run time it would lengthen the longest chain of imports.
if TYPE_CHECKING:
    from gmeta.antdt.ledger.ledger import Ledger
    from gmeta.antdt.ledger.table import ShardTable

# waiting: no worker has come yet. running: at least one is heard from. ended: the trainer says so,
# or none is heard from and nothing is left to train. gone: none is, although something is left.
Phase = Literal["waiting", "running", "ended", "gone"]
PHASES: tuple[Phase, ...] = get_args(Phase)


def silent_workers(ledger: "Ledger", now_s: float) -> frozenset[str]:
    """Return the present workers that were not heard from for longer than a lease lives."""
    # By then whatever they held is handed out again.
    return frozenset(
        name
        for name in present_workers(ledger)
        # Workers that have not called since the service began get the same time from then on.
        if now_s - (ledger.seen[name].seen_s if name in ledger.seen else ledger.started_s)
        > ledger.lease_ttl_s
    )


def phase_of(ledger: "Ledger", silent: frozenset[str]) -> Phase:
    """Return what the job is doing; `silent` is what `silent_workers` returned."""
    present = present_workers(ledger)
    if not present:
        return "waiting"
    state = ledger.state
    # The trainer's own word, also after a restart of this service; resumed, it is another
    # generation's.
    told = state.run.status if state.run and state.run_generation == state.generation else ""
    is_trained = bool(state.tables) and all(map(_is_trained, state.tables.values()))
    if told == "finished":
        return "ended"
    # Nobody has called since the service began again, and nothing is left that one would call for.
    nobody_came = not any(name in ledger.seen for name in present)
    if len(silent) < len(present) and not (is_trained and nobody_came and not told):
        return "running"
    return "ended" if is_trained and not told else "gone"


def _is_trained(table: "ShardTable") -> bool:
    """Return whether no epoch is left; where their number is open, whether this one is done."""
    spec = table.spec
    return table.finished and (spec.num_epochs >= MAX_EPOCHS or table.epoch + 1 == spec.num_epochs)


def present_workers(ledger: "Ledger") -> list[str]:
    """Return the workers of the present generation."""
    # Those left over from a larger job before a restart no longer report: not waited for.
    state = ledger.state
    return [n for n, worker in state.workers.items() if worker.generation == state.generation]
