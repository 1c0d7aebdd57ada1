"""What a shard manifest proves offline: which units the model has seen, and none of them twice."""

from collections.abc import Iterable
from dataclasses import dataclass

from gmeta.antdt.errors import ManifestError
from gmeta.antdt.manifests.shard_manifest import DatasetManifest, ShardManifest, covers
from gmeta.antdt.model import MAX_EPOCHS
from gmeta.antdt.order import ShardOrder


@dataclass(frozen=True)
class AuditReport:
    """`ok` means every unit of every finished part exactly once, and no shard quarantined."""

    ok: bool
    lines: tuple[str, ...]


def audit_manifest(manifest: ShardManifest) -> AuditReport:
    """Return a report that accounts for every unit; not ok with quarantined shards."""
    # `parse_manifest` has already refused a shard that is listed twice or outside its dataset.
    lines = [
        f"checkpoint {manifest.checkpoint_id} of job {manifest.job}: step {manifest.step}, "
        f"generation {manifest.generation}",
        f"digest {manifest.digest} matches; parent {manifest.parent or 'none'}",
        f"ledger: {manifest.ledger_events} events, head {manifest.ledger_head}",
    ]
    problems = []
    for entry in manifest.datasets:
        lines.extend(_account(entry))
        if entry.quarantined:
            problems.append(
                f"dataset {entry.spec.name}: {len(entry.quarantined)} quarantined shards wait for "
                "an operator"
            )
    verdict = f"NOT OK: {'; '.join(problems)}" if problems else "OK: no unit is in the model twice"
    return AuditReport(not problems, (*lines, verdict))


def check_descends(child: ShardManifest, parent: ShardManifest) -> None:
    """Raise ManifestError unless `child` is a later manifest of the lineage of `parent`."""
    by_name = {entry.spec.name: entry for entry in child.datasets}
    for old in parent.datasets:
        new = by_name.get(old.spec.name)
        # Within one lineage a dataset only moves on: no epoch and no shard goes back.
        if new is None or new.spec != old.spec or _before(new, old):
            raise ManifestError(
                f"checkpoint {child.checkpoint_id} does not continue {parent.checkpoint_id}: "
                f"dataset {old.spec.name} went back. The two belong to different lineages: "
                "compare checkpoints of one run, the older one second."
            )


def _before(new: DatasetManifest, old: DatasetManifest) -> bool:
    """Return whether `new` lacks something that `old` has trained."""
    if new.epoch != old.epoch:
        return new.epoch < old.epoch

    runs = sorted(new.done)
    # Shards that are partly in the model: as much of each must be, or all of it by now.
    units_done = {item.position: item.units_done for item in new.exceptions}
    return not all(covers(runs, start, end) for start, end in old.done) or any(
        item.units_done > units_done.get(item.position, 0)
        and not covers(runs, item.position, item.position + 1)
        for item in old.exceptions
    )


def _account(entry: DatasetManifest) -> list[str]:
    spec = entry.spec
    # By arithmetic over the runs: all shards but the dataset's last have one length.
    last_index = spec.num_shards - 1
    order = ShardOrder(spec.num_shards, spec.seed, entry.epoch, spec.shuffle)
    last = order.position_of(last_index)
    num_short = spec.units_per_shard - spec.length_of(last_index)

    def num_units(runs: Iterable[tuple[int, int]]) -> int:
        return sum(
            (end - start) * spec.units_per_shard - (num_short if start <= last < end else 0)
            for start, end in runs
        )

    # The front of skipped and quarantined shards may be in the model: it counts as trained.
    num_trained = num_units(entry.done) + sum(x.units_done for x in entry.exceptions)
    num_skipped = num_units((x.position, x.position + 1) for x in entry.skipped)
    num_skipped -= sum(x.units_done for x in entry.skipped)
    left = spec.num_units - num_trained - num_skipped
    # A job that decides itself when to stop registers without a limit.
    epochs = f" of {spec.num_epochs}" if spec.num_epochs < MAX_EPOCHS else ""
    # People count epochs from 1, as the trainers' lines and the live page do.
    lines = [
        f"dataset {spec.name} ({spec.num_units} units in {spec.num_shards} shards, fingerprint "
        f"{spec.fingerprint or 'none'}), epoch {entry.epoch + 1}{epochs}:",
        f"  {num_trained} units in the model exactly once ({entry.num_done} whole shards, "
        f"{sum(1 for x in entry.partial if x.units_done)} in part)",
    ]
    if entry.epoch:
        before = "epoch 1" if entry.epoch == 1 else f"epochs 1 to {entry.epoch}"
        lines.append(f"  {before} finished before")
    # By the number that `gmeta shards requeue` and `skip` take.
    lines += [
        f"  skipped by an operator: shard {order.index_of(x.position)}: {x.note}"
        for x in entry.skipped
    ]
    lines += [
        f"  quarantined after {x.attempts} attempts: shard {order.index_of(x.position)}: {x.note}"
        for x in entry.quarantined
    ]
    finished = entry.num_done + len(entry.skipped) == spec.num_shards
    lines.append("  epoch finished" if finished else f"  {left} units still to train")
    return lines
