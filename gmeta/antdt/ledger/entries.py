"""A table as an entry of a manifest, and back."""

from collections.abc import Iterable

from gmeta.antdt.ledger.table import ShardTable
from gmeta.antdt.manifests.manifest import DatasetManifest, Exceptional
from gmeta.antdt.model import ShardState


def describe_table(table: ShardTable, holders: dict[int, str]) -> DatasetManifest:
    """Return the manifest entry of a live table; `holders` maps a DOING position to its worker."""
    # Whoever stands in no list is untouched, so ten million shards make no list.
    touched = set(table.units_done) | set(table.attempts) | set(holders)
    states = table.states
    partial = [p for p in touched if states[p] in (ShardState.READY, ShardState.DOING)]

    def entries(positions: Iterable[int]) -> tuple[Exceptional, ...]:
        return tuple(
            Exceptional(
                p,
                table.units_done.get(p, 0),
                table.attempts.get(p, 0),
                table.notes.get(p, ""),
                holders.get(p, ""),
            )
            for p in sorted(positions)
        )

    return DatasetManifest(
        table.spec,
        table.epoch,
        tuple(table.done_intervals()),
        entries(partial),
        entries(table.positions_in(ShardState.SKIPPED)),
        entries(table.positions_in(ShardState.QUARANTINED)),
    )


def restore_table(table: ShardTable, entry: DatasetManifest | None) -> None:
    """Make `table` exactly what `entry` says (None: nothing trained); shards in flight are READY
    with their offset."""
    table.open_epoch(0 if entry is None else entry.epoch)
    if entry is None:
        return
    for start, end in entry.done:
        table.states[start:end] = bytes([ShardState.DONE]) * (end - start)
    for state, items in (
        (ShardState.SKIPPED, entry.skipped),
        (ShardState.QUARANTINED, entry.quarantined),
    ):
        for item in items:
            table.states[item.position] = state
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
