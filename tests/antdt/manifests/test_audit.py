"""An audit counts runs of shards, never single ones, and counts what single ones would give."""

import random
import re
import tracemalloc

import pytest

from gmeta.antdt.errors import ManifestError
from gmeta.antdt.manifests.audit import audit_manifest, check_descends
from gmeta.antdt.manifests.shard_manifest import (
    DatasetManifest,
    Exceptional,
    ShardManifest,
    parse_manifest,
)
from gmeta.antdt.model import DatasetSpec
from gmeta.antdt.order import ShardOrder
from tests.antdt.trained import trained_ranges

HUGE = DatasetSpec("d", 10**9 - 7, 10, seed=5, num_epochs=3)  # 10**8 shards, the last one short


def manifest(entry: DatasetManifest) -> ShardManifest:
    return ShardManifest("job", "c", 1, 1, "", 7, "00", (entry,))


def counted(entry: DatasetManifest) -> tuple[int, int]:
    """Units in the model and still to train, as the audit says."""
    text = "\n".join(audit_manifest(manifest(entry)).lines)
    trained = re.search(r"(\d+) units in the model", text)
    left = re.search(r"(\d+) units still to train", text)
    assert trained is not None
    return int(trained[1]), int(left[1]) if left else 0


@pytest.mark.parametrize("seed", range(40))
def test_an_audit_counts_what_counting_unit_by_unit_gives(seed: int) -> None:
    draw = random.Random(seed)
    spec = DatasetSpec("d", draw.randint(1, 60), draw.randint(1, 7), seed, shuffle=seed % 3 > 0)
    order = ShardOrder(spec.num_shards, spec.seed, 0, spec.shuffle)
    lists: dict[str, list[Exceptional]] = {"partial": [], "skipped": [], "quarantined": []}
    done, num_skipped = [], 0
    for position in range(spec.num_shards):
        length = spec.length_of(order.index_of(position))
        name = draw.choice(["done", "done", "", *lists])
        if name == "done":
            done.append((position, position + 1))
        elif name:
            item = Exceptional(position, draw.randrange(length), 1, "note", "")
            lists[name].append(item)
            num_skipped += length - item.units_done if name == "skipped" else 0
    entry = DatasetManifest(spec, 0, tuple(done), *map(tuple, lists.values()))
    units = [unit for start, end in trained_ranges(entry) for unit in range(start, end)]
    assert len(units) == len(set(units))
    left = spec.num_units - len(units) - num_skipped
    finished = len(done) + len(lists["skipped"]) == spec.num_shards
    assert counted(entry) == (len(units), 0 if finished else left)


def test_an_audit_looks_at_each_run_of_many_shards_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("index_of", "position_of"):
        real = getattr(ShardOrder, name)
        monkeypatch.setattr(
            ShardOrder, name, lambda self, at, real=real: calls.append(at) or real(self, at)
        )
    skipped = tuple(Exceptional(p, 0, 0, "corrupt", "") for p in (10, 11))
    entry = DatasetManifest(HUGE, 1, ((0, 10), (12, 99_000_000)), (), skipped)
    text = manifest(entry).to_json()
    tracemalloc.start()
    report = audit_manifest(parse_manifest(text))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.ok
    assert counted(entry)[0] in (989_999_980, 989_999_973)  # without or with the short shard
    assert len(calls) <= 10
    assert peak_bytes < 1 << 20


def test_a_whole_epoch_of_a_hundred_million_shards_is_all_of_its_units() -> None:
    assert counted(DatasetManifest(HUGE, 2, ((0, HUGE.num_shards),))) == (HUGE.num_units, 0)


def test_a_checkpoint_of_many_runs_is_compared_run_by_run() -> None:
    spec = DatasetSpec("d", 600_000, 1)
    runs = tuple((at, at + 2) for at in range(0, 600_000, 3))
    check_descends(
        manifest(DatasetManifest(spec, 0, runs)), manifest(DatasetManifest(spec, 0, runs))
    )
    without = runs[:100_000] + runs[100_001:]
    with pytest.raises(ManifestError, match="dataset d went back"):
        check_descends(
            manifest(DatasetManifest(spec, 0, without)), manifest(DatasetManifest(spec, 0, runs))
        )
