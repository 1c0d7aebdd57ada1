"""What a shard manifest says, against sets of units that are counted one by one."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gmeta.antdt.errors import ManifestError
from gmeta.antdt.ledger.checkpoints import describe_table
from gmeta.antdt.ledger.state import restore_table
from gmeta.antdt.ledger.table import ShardTable
from gmeta.antdt.manifests.audit import audit_manifest, check_descends
from gmeta.antdt.manifests.shard_manifest import (
    DatasetManifest,
    Exceptional,
    ShardManifest,
    parse_manifest,
)
from gmeta.antdt.model import DatasetSpec, ShardState
from tests.antdt.trained import trained_ranges
from tests.support.refusals import catch_message

SPEC = DatasetSpec("d", num_units=22, units_per_shard=4, seed=3, num_epochs=2)
TOUCHED = Exceptional(0, 0, 0, "", "")


def manifest(*datasets: DatasetManifest) -> ShardManifest:
    return ShardManifest("job", "c", 1, 1, "", 7, "00", datasets)


def units(entry: DatasetManifest) -> list[int]:
    return [unit for start, end in trained_ranges(entry) for unit in range(start, end)]


def random_table(seed: int) -> tuple[ShardTable, set[int]]:
    """A table with shards in every state, and the units of them that are in the model."""
    draw = random.Random(seed)
    table, trained = ShardTable(SPEC, epoch=draw.randrange(2)), set[int]()
    for position in range(SPEC.num_shards):
        state = draw.choice(list(ShardState))
        first, length = (f(table.order.index_of(position)) for f in (SPEC.start_of, SPEC.length_of))
        units_done = length if state is ShardState.DONE else draw.randrange(length)
        trained |= set(range(first, first + units_done))
        table.states[position] = state
        if state is not ShardState.DONE:
            table.attempts[position] = draw.randrange(1, 5)
            table.notes[position] = "a note"
            if units_done:
                table.units_done[position] = units_done
    table.recount()
    return table, trained


@pytest.mark.parametrize("seed", range(20))
def test_a_manifest_holds_each_trained_unit_once_and_rebuilds_the_table(seed: int) -> None:
    table, trained = random_table(seed)
    written = manifest(describe_table(table, {}))
    read = parse_manifest(written.to_json())
    assert read == written
    (entry,) = read.datasets
    assert sorted(units(entry)) == sorted(trained)
    again = ShardTable(SPEC)
    restore_table(again, entry)
    # What was in somebody's hands is free again.
    in_hand = bytes([ShardState.DOING])
    assert again.states == table.states.replace(in_hand, bytes([ShardState.READY]))
    expected = (table.epoch, table.units_done, table.attempts)
    assert (again.epoch, again.units_done, again.attempts) == expected


def test_a_checkpoint_continues_another_where_it_holds_all_of_its_units() -> None:
    found = set()
    for seed in range(60):
        draw = random.Random(seed)
        table, _ = random_table(seed)
        parent = describe_table(table, {})
        position = draw.randrange(SPEC.num_shards)
        is_done = draw.random() < 0.5
        table.states[position] = ShardState.DONE if is_done else ShardState.READY
        table.units_done.pop(position, None)
        if not is_done:
            table.units_done[position] = draw.randrange(4)
        table.recount()
        child = describe_table(table, {})
        continues = set(units(parent)) <= set(units(child))
        found.add(continues)
        if continues:
            check_descends(manifest(child), manifest(parent))
        else:
            with pytest.raises(ManifestError, match="dataset d went back"):
                check_descends(manifest(child), manifest(parent))
    assert found == {True, False}


def test_a_later_epoch_holds_the_earlier_one_and_not_the_other_way_round() -> None:
    earlier = manifest(DatasetManifest(SPEC, 0, done=((0, 6),)))
    later = manifest(DatasetManifest(SPEC, 1))
    check_descends(later, earlier)
    assert catch_message(ManifestError, check_descends, earlier, later) == (
        "checkpoint c does not continue c: dataset d went back. The two belong to different "
        "lineages: compare checkpoints of one run, the older one second."
    )


def test_a_checkpoint_without_the_dataset_does_not_continue_one_with_it() -> None:
    untouched = manifest(DatasetManifest(SPEC, 0))
    check_descends(untouched, manifest())
    with pytest.raises(ManifestError, match="dataset d went back"):
        check_descends(manifest(), untouched)


def test_an_audit_of_no_dataset_and_of_an_untouched_one_is_ok() -> None:
    nothing = audit_manifest(manifest())
    assert (nothing.ok, nothing.lines[-1]) == (True, "OK: no unit is in the model twice")
    untouched = audit_manifest(manifest(DatasetManifest(SPEC, 0)))
    assert (untouched.ok, untouched.lines[3:]) == (
        True,
        (
            "dataset d (22 units in 6 shards, fingerprint none), epoch 1 of 2:",
            "  0 units in the model exactly once (0 whole shards, 0 in part)",
            "  22 units still to train",
            "OK: no unit is in the model twice",
        ),
    )


def test_an_audit_counts_the_front_of_a_skipped_shard_as_trained() -> None:
    skipped = Exceptional(0, 3, 0, "corrupt", "")
    report = audit_manifest(manifest(DatasetManifest(SPEC, 1, done=((1, 6),), skipped=(skipped,))))
    shard = ShardTable(SPEC, epoch=1).order.index_of(0)
    in_shard = SPEC.length_of(shard)
    assert report.lines[4:] == (
        f"  {22 - in_shard + 3} units in the model exactly once (5 whole shards, 0 in part)",
        "  epoch 1 finished before", f"  skipped by an operator: shard {shard}: corrupt",
        "  epoch finished", "OK: no unit is in the model twice",
    )  # fmt: skip


def edited(change: Callable[[dict[str, Any]], Any]) -> ShardManifest:
    """What `parse_manifest` makes of an edited manifest whose digest was made to fit again."""
    entry = DatasetManifest(SPEC, 0, done=((0, 2),), partial=(TOUCHED._replace(position=3),))
    body = json.loads(manifest(entry).to_json())
    change(body["datasets"][0])
    # Parsed without a look at any number, to get the digest of what it has become.
    parts = body["datasets"][0]
    altered = replace(
        entry,
        done=tuple(tuple(run) for run in parts["done"]),
        partial=tuple(Exceptional(*item) for item in parts["partial"]),
    )
    return parse_manifest(manifest(altered).to_json())


TWICE = (
    "the manifest lists a shard of dataset d twice or outside 0..5: a unit would be trained twice "
    "or never. Use a manifest that the service wrote."
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry["done"].append([1, 3]), TWICE),
        (lambda entry: entry["done"].append([5, 7]), TWICE),
        (lambda entry: entry["partial"].append([1, 0, 0, "", ""]), TWICE),
        (lambda entry: entry["partial"].append([3, 0, 0, "", ""]), TWICE),
        (
            lambda entry: entry["partial"].append([4, 5, 0, "", ""]),
            "the manifest says that 5 units of the shard at position 4 of dataset d are trained; "
            "it has 4. Use a manifest that the service wrote.",
        ),
        (
            lambda entry: entry["partial"].append(["4", 0, 0, "", ""]),
            "the manifest has a field that does not fit: ",
        ),
    ],
)
def test_a_manifest_that_trains_a_unit_twice_or_never_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    assert edited(lambda entry: None).datasets[0].num_done == 2
    refusal = catch_message(ManifestError, edited, change)
    assert refusal.startswith(message)
    assert message.endswith(": ") or refusal == message
