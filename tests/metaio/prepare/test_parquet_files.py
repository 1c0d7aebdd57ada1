"""Rows that pyarrow reads by itself, against the same rows through DuckDB."""

import base64
import datetime
import decimal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import DataError, open_dataset
from metaio.prepare.engines.local import prepare
from metaio.prepare.schema.schema_file import parse_schema
from metaio.prepare.source import parquet_files
from metaio.prepare.source.source import DuckSource
from tests.metaio.prepare.test_local import changed, raw_table

NOON = datetime.datetime(2026, 3, 1, 12)
COLUMNS = {
    "byte": pa.array([-1, None, 3], pa.int8()), "large": pa.array([1 << 63, 0, None], pa.uint64()),
    "single": pa.array([0.5, None, float("nan")], pa.float32()), "word": pa.array(["é", "", None]),
    "flag": pa.array([True, None, False]),
    "day": pa.array([NOON.date(), None, NOON.date()], pa.date32()),
    "local": pa.array([NOON, None, NOON], pa.timestamp("us")),
    "money": pa.array([decimal.Decimal("1.25"), None, decimal.Decimal("-3.50")]),
    "numbers": pa.array([[1, None], [], None], pa.list_(pa.int64())),
    "words": pa.array([["a", "b"], None, []], pa.list_(pa.string())),
    "wide_word": pa.array(["x", None, "y"], pa.large_string()),
    "coded": pa.array(["x", None, "y"]).dictionary_encode(),
}  # fmt: skip
BY_DUCKDB = {"wide_word", "coded"}


def source_of(path: Path, column: str) -> DuckSource:
    schema = parse_schema(
        {
            "task": {"column": "user"}, "label": {"column": "clicked"},
            "single": [{"column": column, "hash": 9}], "episodes": {"query_rows": 1},
        }
    )  # fmt: skip
    return DuckSource([str(path)], schema, memory_bytes=1 << 28, threads=1)


@pytest.mark.parametrize("column", COLUMNS)
def test_pyarrow_gives_the_rows_of_duckdb_or_leaves_them_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    table = pa.table({"user": [1, 2, 3], "clicked": [0, 1, 0], column: COLUMNS[column]})
    path = tmp_path / "raw.parquet"
    pq.write_table(table, path)
    with source_of(path, column) as source:
        types = source.arrow_types([column, "user"])
        assert parquet_files.holds(str(path), types) == (column not in BY_DUCKDB)
        found = pa.Table.from_batches(source.batches([column, "user"]))
    monkeypatch.setattr(parquet_files, "holds", lambda name, types: False)
    with source_of(path, column) as source:
        by_duckdb = pa.Table.from_batches(source.batches([column, "user"]))
    # As text: NaN is not equal to itself.
    assert str(found.sort_by("user").to_pylist()) == str(by_duckdb.sort_by("user").to_pylist())
    assert found.schema.types == by_duckdb.schema.types


def test_a_dataset_is_alike_whoever_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raw").mkdir()
    for index in range(2):
        table = raw_table(seed=index)
        pq.write_table(table, tmp_path / "raw" / f"{index}.parquet", row_group_size=300)
    prepare([str(tmp_path / "raw")], str(tmp_path / "pyarrow"), changed())
    monkeypatch.setattr(parquet_files, "holds", lambda name, types: False)
    prepare([str(tmp_path / "raw")], str(tmp_path / "duckdb"), changed())
    found, wanted = (open_dataset(str(tmp_path / name)) for name in ("pyarrow", "duckdb"))
    assert found.manifest.splits == wanted.manifest.splits
    assert found.fingerprint == wanted.fingerprint


def test_files_that_only_duckdb_can_read_are_left_to_it(tmp_path: Path) -> None:
    table = pa.table({"user": [1], "day": [2]})
    pq.write_table(table, tmp_path / "raw.parquet")
    name, types = str(tmp_path / "raw.parquet"), {"user": pa.int64()}
    assert parquet_files.holds(name, types)
    assert not parquet_files.holds(f"s3://bucket{name}", types)
    assert not parquet_files.holds(name, {"user": pa.int32()})
    assert not parquet_files.holds(name, {"absent": pa.int64()})
    assert not parquet_files.holds(str(tmp_path / "absent.parquet"), types)


def test_what_is_no_schema_of_arrow_tells_of_no_durations() -> None:
    kept = base64.b64encode(pa.schema([("waited", pa.duration("s"))]).serialize())
    assert parquet_files.find_duration_columns(kept) == {"waited": pa.duration("s")}
    for broken in (b"", b"x", kept[:40], base64.b64encode(b"no schema"), b"\xff\xfe"):
        assert parquet_files.find_duration_columns(broken) == {}


def test_text_that_is_not_utf8_is_refused_by_file(tmp_path: Path) -> None:
    path = tmp_path / "raw.parquet"
    broken = pa.array([b"\xff\xfe", b"ok"]).view(pa.string())
    pq.write_table(pa.table({"user": [1, 1], "clicked": [0, 1], "word": broken}), path)
    with source_of(path, "word") as source, pytest.raises(DataError) as caught:
        list(source.batches(["word"]))
    assert str(caught.value) == (
        f"input {path} cannot be read: In column 0: Invalid: Invalid UTF8 sequence at string index "
        "0. Write that file again"
    )


@pytest.fixture
def own_memory() -> Iterator[pa.MemoryPool]:
    """What pyarrow takes from now on, apart from what other tests have left to the collector."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    yield pool
    pa.set_memory_pool(before)


def test_reading_holds_many_row_groups_as_one(tmp_path: Path, own_memory: pa.MemoryPool) -> None:
    """Buffers of a row group are given back with its last row."""
    table = pa.table({f"c{i}": np.arange(40_000, dtype=np.int64) for i in range(8)})
    held = {}
    for num_groups in (1, 40):
        path = str(tmp_path / f"{num_groups}.parquet")
        pq.write_table(table[: 1_000 * num_groups], path, row_group_size=1_000, compression="lz4")
        most = 0
        for batch in parquet_files.batches(path, table.column_names, 1_000):
            most = max(most, own_memory.bytes_allocated())
            assert batch.num_rows == 1_000
        del batch
        held[num_groups] = most
    assert 0 < held[40] < 2 * held[1]


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("by_files", [False, True])
def test_a_column_without_a_type_in_one_file_has_that_of_the_others(
    tmp_path: Path, names: tuple[str, str], by_files: bool
) -> None:
    found = []
    for kind in (pa.null(), pa.int64()):
        folder = tmp_path / str(kind)
        folder.mkdir()
        for name, values in zip(
            names, (pa.nulls(4, kind), pa.array([2**40, 7, 2**40, 9])), strict=True
        ):
            rows = {"user": [1, 1, 2, 2], "item": values, "y": [0.0, 1.0, 1.0, 0.0]}
            pq.write_table(pa.table(rows), folder / f"{name}.parquet")
        body: dict[str, Any] = {
            "task": {"column": "user"}, "label": {"column": "y"}, "episodes": {"query_rows": 1},
            "single": [{"column": "item", "vocabulary": 1, "null": "unknown"}],
        }  # fmt: skip
        if by_files:
            body["membership"] = {"support": "a*", "query": "b*"}
        prepare([str(folder)], str(folder / "out"), parse_schema(body))
        found.append(open_dataset(str(folder / "out")))
    assert found[0].fingerprint == found[1].fingerprint
    assert found[0].manifest.recipe["kinds"] == {"item": "integer"}
