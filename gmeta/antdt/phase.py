"""What a job is doing now, as far as its workers' calls show it."""

from typing import TYPE_CHECKING, Literal, get_args

# For types alone: at run time it would lengthen the longest chain of imports.
if TYPE_CHECKING:
    from gmeta.antdt.ledger.ledger import Ledger

# waiting: no worker has come yet. running: at least one is heard from. ended: none is, and nothing
# is left to train. gone: none is, although something is left.
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
    if len(silent) < len(present):
        return "running"
    tables = ledger.state.tables.values()
    return "ended" if tables and all(table.finished for table in tables) else "gone"


def present_workers(ledger: "Ledger") -> list[str]:
    """Return the workers of the present generation."""
    # Those left over from a larger job before a restart no longer report: not waited for.
    state = ledger.state
    return [n for n, worker in state.workers.items() if worker.generation == state.generation]
