"""How full hashed tables are: counted in parts by several workers, as Spark's, and added up."""

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from metaio import Features, FeatureSpec, TableSpec
from metaio.format.block import Block, build_block
from metaio.prepare import job as jobs
from metaio.prepare.job import HashedShardUse, HashedTableUse
from tests.metaio.conftest import make_rows

FEATURES = Features(
    tables=(TableSpec("item", 500), TableSpec("tag", 40), TableSpec("age", 8)),
    single=(FeatureSpec("item", "item"), FeatureSpec("age", "age")),
    multi=(FeatureSpec("tags", "tag"),),
    dense=(),
)


def job(*hashed: str) -> Any:
    columns = [
        SimpleNamespace(
            table_name=table.name, hash=table.num_rows if table.name in hashed else None
        )
        for table in FEATURES.tables
    ]
    return SimpleNamespace(schema=SimpleNamespace(sparse=columns), features=FEATURES)


def blocks(number: int) -> list[Block]:
    return [
        build_block(FEATURES, make_rows(6, seed, features=FEATURES, max_rows=4))
        for seed in range(number)
    ]


def ids_of(table: int, parts: list[Block]) -> set[int]:
    """Of the blocks, one by one."""
    found: set[int] = set()
    for block in parts:
        begin, end = block.unique_offsets_B1[table : table + 2]
        found |= set(block.unique_ids_U[begin:end].tolist())
    return found


def counted(parts: list[Block]) -> HashedTableUse:
    use = HashedTableUse(job("item", "tag"))
    for block in parts:
        use.add(block)
    return use


@pytest.mark.parametrize("num_workers", [1, 3])
def test_parts_that_travelled_add_up_to_the_whole(num_workers: int) -> None:
    parts = blocks(6)
    total = counted([])
    for worker in range(num_workers):
        own = HashedShardUse(job("item", "tag"))
        for block in parts[worker::num_workers]:
            own.add(block)
        total.add_distinct(pickle.loads(pickle.dumps(own.distinct())))
    assert set(total.used) == {0, 1}  # age has a vocabulary, in which no two values share a row
    for table, used in total.used.items():
        assert set(np.flatnonzero(used).tolist()) == ids_of(table, parts)
        assert len(used) == FEATURES.tables[table].num_rows
    assert total.report() == counted(parts).report()


@pytest.mark.parametrize("num_values", [0, 1, 20_000, 200_000])
def test_the_values_behind_the_rows_are_estimated_from_how_many_are_used(num_values: int) -> None:
    use, num_rows = counted([]), 50_000
    rows = np.random.default_rng(0).integers(1, num_rows + 1, num_values)
    use.used = {0: np.zeros(num_rows + 1, dtype=np.bool_)}
    use.used[0][rows] = True
    found = use.report()["item"]
    assert (found["rows"], found["rows_used"]) == (num_rows, len(set(rows.tolist())))
    assert found["values_estimated"] == pytest.approx(num_values, rel=0.02)
    sharing = found["values_estimated"] - found["rows_used"]
    assert found["values_sharing_a_row_estimated"] == pytest.approx(sharing, abs=1)


def test_the_row_of_unknown_ids_is_nobodys_and_a_full_table_has_an_estimate() -> None:
    use = counted([])
    use.used = {0: np.array([True, False, False]), 1: np.ones(3, dtype=np.bool_)}
    report = use.report()
    assert report["item"] == {
        "rows": 2, "rows_used": 0, "values_estimated": 0, "values_sharing_a_row_estimated": 0,
    }  # fmt: skip
    assert (report["tag"]["rows_used"], report["tag"]["values_estimated"]) == (2, 3)


def test_a_table_too_large_to_count_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_COUNTED_ROWS", 40)
    assert set(HashedTableUse(job("item", "tag")).used) == {1}
    assert len(HashedShardUse(job("item", "tag")).distinct()) == 1
