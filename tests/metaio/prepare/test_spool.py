"""The spool: rows dealt to buckets come back whole, and a file cut short is noticed."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from metaio.hashing import splitmix64
from metaio.prepare.episodes.encoded_rows import EncodedRows, allocate_rows, concatenate_rows
from metaio.prepare.episodes.spool import BucketPlan, Spool
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.schema_file import parse_schema

SCHEMA: Schema = parse_schema(
    {
        "task": {"column": "user"},
        "label": {"column": "click"},
        "single": [{"column": "item", "hash": 100}, {"column": "shop", "hash": 100}],
        "multi": [{"column": "tags", "hash": 50}, {"column": "likes", "hash": 50}],
        "episodes": {"by": "random", "query_rows": 1, "min_rows": 2, "max_rows": 9},
    }
)
PLAN = BucketPlan((3, 1))


def random_rows(num_rows: int, seed: int) -> EncodedRows:
    rng = np.random.default_rng(seed)
    lengths_NM = rng.integers(0, 4, (num_rows, 2)).astype(np.int32)
    rows = allocate_rows(SCHEMA, num_rows, int(lengths_NM.sum()))
    for array in vars(rows).values():
        array[...] = rng.integers(0, 1 << 20, array.shape)
    rows.lengths_NM[:] = lengths_NM
    rows.task_hash_N[:] = splitmix64(rows.task_N.view(np.uint64))
    rows.split_N[:] = rng.integers(0, 2, num_rows)
    return rows


def lines(rows: EncodedRows) -> list[tuple[Any, ...]]:
    """Every row as a tuple, its lists included."""
    ends: npt.NDArray[np.int64] = np.cumsum(rows.lengths_NM.sum(axis=1))
    found = []
    for index, end in enumerate(ends.tolist()):
        values = rows.values_V[end - int(rows.lengths_NM[index].sum()) : end].tolist()
        own = [part[index].tolist() for name, part in vars(rows).items() if not name.endswith("_V")]
        found.append((*map(str, own), *values))
    return found


def test_each_bucket_gets_back_its_rows_in_the_order_they_came(tmp_path: Path) -> None:
    parts = [random_rows(count, seed) for seed, count in enumerate((50, 0, 1, 200))]
    spool = Spool(tmp_path / "spool", SCHEMA, PLAN)
    for rows in parts:
        spool.append(rows)
        spool.flush()
    whole = concatenate_rows(SCHEMA, parts)
    buckets = PLAN.assign(whole.split_N, whole.task_hash_N).tolist()
    for bucket in range(4):
        wanted = [line for line, own in zip(lines(whole), buckets, strict=True) if own == bucket]
        assert wanted
        assert lines(spool.pop_bucket(bucket)) == wanted
    spool.close()


def test_a_bucket_without_rows_is_empty_and_no_parts_join_to_none(tmp_path: Path) -> None:
    assert Spool(tmp_path / "spool", SCHEMA, PLAN).pop_bucket(2).num_rows == 0
    assert concatenate_rows(SCHEMA, []).ids_NF.shape == (0, 2)


def test_a_bucket_belongs_to_the_split_that_lists_it() -> None:
    assert [PLAN.find_split(bucket) for bucket in range(4)] == [0, 0, 0, 1]


def test_a_spool_file_cut_short_is_refused(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", SCHEMA, BucketPlan((1, 1)))
    spool.append(random_rows(50, 0))
    spool.flush()
    path = tmp_path / "spool" / "000000"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match=re.escape(f"{path} was cut short while it was in use")):
        spool.pop_bucket(0)
