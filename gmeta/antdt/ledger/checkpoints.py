"""Prepare, Commit and Restore: when a manifest may be made, confirmed and taken back."""

from collections.abc import Iterable

from gmeta.access.errors import RefusedError
from gmeta.antdt.errors import ManifestError
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.ledger import events as ev
from gmeta.antdt.ledger.state import LedgerState
from gmeta.antdt.ledger.table import ShardTable, check_capacity
from gmeta.antdt.manifests.shard_manifest import (
    DatasetManifest,
    Exceptional,
    ShardManifest,
    parse_manifest,
)
from gmeta.antdt.model import Checkpoint, ShardState


def prepared_before(
    state: LedgerState, command: cmd.PrepareCheckpoint
) -> ev.CheckpointPrepared | None:
    """Return the manifest prepared under this id, None for a new id. Raise RefusedError."""
    checkpoint = state.checkpoints.get(command.checkpoint_id)
    # An id of an older generation belongs to a lineage that was rolled back: prepared anew.
    if checkpoint is None or checkpoint.generation != state.generation:
        return None
    if checkpoint.step != command.step:
        raise RefusedError(
            "ALREADY_EXISTS",
            "WRONG_STATE",
            f"checkpoint {command.checkpoint_id!r} was prepared at step {checkpoint.step}, the "
            f"call says {command.step}; an id stands for one step. Put the step into the id.",
        )
    return ev.CheckpointPrepared(
        command.checkpoint_id, command.step, checkpoint.digest, checkpoint.manifest_json
    )


def build_manifest(
    state: LedgerState, command: cmd.PrepareCheckpoint, num_events: int, head: bytes
) -> ShardManifest:
    """Return the manifest of every dataset's state at this moment."""
    holders: dict[str, dict[int, str]] = {name: {} for name in state.tables}
    for lease in state.leases.values():
        holders[lease.dataset][lease.position] = lease.worker_id  # of two leases, the later one's
    return ShardManifest(
        state.job,
        command.checkpoint_id,
        command.step,
        state.generation,
        state.lineage,
        num_events,
        head.hex(),
        tuple(describe_table(table, holders[name]) for name, table in sorted(state.tables.items())),
    )


def find_checkpoint(state: LedgerState, checkpoint_id: str) -> Checkpoint:
    """Return a prepared checkpoint. Raise RefusedError for one that is not held any more."""
    checkpoint = state.checkpoints.get(checkpoint_id)
    if checkpoint is None:
        raise RefusedError(
            "NOT_FOUND",
            "UNKNOWN_CHECKPOINT",
            f"checkpoint {checkpoint_id!r:.130} is not among the last {len(state.checkpoints)} "
            "prepared ones "
            f"{list(state.checkpoints)}. Audit an older one offline: gmeta shards audit FOLDER.",
        )
    return checkpoint


def is_new_commit(state: LedgerState, command: cmd.CommitCheckpoint) -> bool:
    """Return False for a repeated commit. Raise RefusedError when id and digest do not fit."""
    checkpoint = find_checkpoint(state, command.checkpoint_id)
    if checkpoint.digest != command.digest:
        raise RefusedError(
            "FAILED_PRECONDITION",
            "WRONG_STATE",
            f"checkpoint {command.checkpoint_id!r} was prepared with digest "
            f"{checkpoint.digest[:12]}, the call commits "
            f"{command.digest[:12]!r}. Commit the manifest that PrepareCheckpoint returned.",
        )
    return not checkpoint.committed


def check_restore(state: LedgerState, manifest_json: str) -> str:
    """Return the digest of a manifest that fits this service, "" for none. Raise RefusedError."""
    if not manifest_json:
        return ""
    try:
        manifest = parse_manifest(manifest_json)
    except ManifestError as error:
        raise RefusedError("INVALID_ARGUMENT", "BAD_MANIFEST", str(error)) from error
    if manifest.job != state.job:
        raise RefusedError(
            "FAILED_PRECONDITION",
            "BAD_MANIFEST",
            f"the manifest belongs to job {manifest.job!r}, this service serves {state.job!r}. "
            "Restore the job's own checkpoint, or start the service with --job.",
        )
    # Before anything is rolled back: positions hold only in the same cut of the same data.
    for entry in manifest.datasets:
        table = state.tables.get(entry.spec.name)
        if table is not None and table.spec != entry.spec:
            raise RefusedError(
                "FAILED_PRECONDITION",
                "SPEC_CONFLICT",
                f"the manifest's dataset {entry.spec.name!r} is {entry.spec}, registered is "
                f"{table.spec}. The data or its cut changed since the checkpoint: train from the "
                "old data, or begin without the checkpoint.",
            )
    tables = state.tables
    check_capacity(tables, [x.spec for x in manifest.datasets if x.spec.name not in tables])
    return manifest.digest


def describe_table(table: ShardTable, holders: dict[int, str]) -> DatasetManifest:
    """Return the manifest entry of a table; `holders` maps a DOING position to its worker."""
    # Shards in no list are untouched, so ten million of them need no list.
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
