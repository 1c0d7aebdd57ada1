"""A function of somebody's own over raw rows: what it returns is prepared, its package is kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq
import pytest

from metaio import Dataset, open_dataset
from metaio.errors import DataError, MetaIOError, SchemaError
from metaio.prepare.engines.local import prepare
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.stream.logs import append, log, schema

HERE = __name__
SCHEMA: dict[str, Any] = {
    "task": {"column": "user"}, "label": {"column": "clicked"},
    "single": [{"column": "kind", "hash": 9}], "dense": [{"column": "age"}],
    "episodes": {"by": "random", "query_rows": 2, "min_rows": 3, "max_rows": 30},
    "splits": {"shares": {"train": 0.7, "cold": 0.3}},
}  # fmt: skip


def with_age(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add an age, and leave out rows that are no events."""
    age = pc.subtract(2026, batch["born"])
    return batch.append_column("age", age).filter(pc.not_equal(batch["kind"], 7))


def narrow(batch: pa.RecordBatch) -> pa.RecordBatch:
    """With [transform] columns."""
    assert batch.schema.names == ["user", "kind", "clicked", "born"]
    return with_age(batch)


def failing(batch: pa.RecordBatch) -> pa.RecordBatch:
    """It does."""
    raise KeyError("born")


def tabled(batch: pa.RecordBatch) -> Any:
    """It returns something else."""
    return pa.table(with_age(batch))


def emptied(batch: pa.RecordBatch) -> pa.RecordBatch:
    """It leaves nothing."""
    return with_age(batch).slice(0, 0)


def raw(num_rows: int = 300, born: int = 1980) -> pa.Table:
    """Rows of 40 users; a tenth is of kind 7."""
    row_N = np.arange(num_rows)
    columns = {"user": row_N % 40, "kind": row_N % 10, "clicked": row_N % 3 == 0}
    return pa.table({**columns, "born": np.full(num_rows, born) + row_N % 7})


def prepared(out: Path, inputs: list[Path], **transform: Any) -> Dataset:
    body = {**SCHEMA, **({"transform": transform} if transform else {})}
    prepare([str(path) for path in inputs], str(out), parse_schema(body))
    return open_dataset(str(out))


def rows_of(dataset: Dataset) -> dict[str, list[Any]]:
    """What is stored of the train split, block by block."""
    blocks = [dataset.read_block("train", n) for n in range(dataset.splits["train"].num_blocks)]
    return {
        "label": [block.label_N.tolist() for block in blocks],
        "dense": [block.dense_NK.tolist() for block in blocks],
    }


def test_what_it_returns_is_what_is_prepared(tmp_path: Path) -> None:
    parts = [raw(), raw(200, born=1960)]
    for number, part in enumerate(parts):
        pq.write_table(part, tmp_path / f"raw-{number}.parquet")
        by_hand_rows = with_age(part.combine_chunks().to_batches()[0])
        pq.write_table(pa.Table.from_batches([by_hand_rows]), tmp_path / f"hand-{number}.parquet")
    inputs = [tmp_path / f"raw-{number}.parquet" for number in range(2)]
    found = prepared(tmp_path / "found", inputs, function=f"{HERE}:with_age")
    by_hand = [tmp_path / f"hand-{number}.parquet" for number in range(2)]
    wanted = prepared(tmp_path / "wanted", by_hand)
    assert rows_of(found) == rows_of(wanted)
    assert found.manifest.report["transform"] == {
        "function": f"{HERE}:with_age", "package": "tests", "version": "not installed",
    }  # fmt: skip
    assert "transform" not in wanted.manifest.report


def test_text_files_are_read_first_and_only_the_columns_asked_for(tmp_path: Path) -> None:
    pc_csv.write_csv(raw().append_column("other", pa.array(["x"] * 300)), tmp_path / "raw.csv")
    columns = ["user", "kind", "clicked", "born"]
    found = prepared(
        tmp_path / "data", [tmp_path / "raw.csv"], function=f"{HERE}:narrow", columns=columns
    )
    assert sum(split.num_rows for split in found.splits.values()) == 270


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "failing",
            "failed on 300 rows of {path}: KeyError: 'born'. Mend it, or leave [transform] out",
        ),
        ("tabled", "returned a Table: a pyarrow RecordBatch is needed. Mend it"),
    ],
)
def test_what_it_does_wrong_is_one_line(tmp_path: Path, name: str, told: str) -> None:
    path = tmp_path / "raw.parquet"
    pq.write_table(raw(), path)
    with pytest.raises(DataError) as caught:
        prepared(tmp_path / "data", [path], function=f"{HERE}:{name}")
    wanted = f"transform.function = '{HERE}:{name}' {told.format(path=path)}"
    assert str(caught.value) == wanted
    assert not (tmp_path / "data").exists()


def test_none_of_its_name_is_refused_and_so_is_nothing_left(tmp_path: Path) -> None:
    pq.write_table(raw(), tmp_path / "raw.parquet")
    for name, kind, told in (
        ("no_such", SchemaError, "has no 'no_such'"),
        ("SCHEMA", SchemaError, "is a value of dict: a function of a pyarrow RecordBatch is"),
        ("emptied", DataError, "the inputs hold no rows"),
    ):
        with pytest.raises(kind, match=told):
            prepared(tmp_path / "data", [tmp_path / "raw.parquet"], function=f"{HERE}:{name}")


def dearer(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Of the rows of a stream."""
    place = batch.schema.get_field_index("price")
    return batch.set_column(place, "price", pc.add(batch["price"], 1.0))


def test_a_strangers_stream_names_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = schema().to_json() | {"transform": {"function": f"{HERE}:dearer"}}
    stream = tmp_path / "stream"
    assert append(stream, log(0), schema=parse_schema(body)).number == 1
    with pytest.raises(SchemaError, match=r"the stream was begun with transform\.function = "):
        append(stream, log(1))
    monkeypatch.setenv("GMETA_PLUGINS", "tests")
    assert append(stream, log(1)).number == 2
    newest = open_dataset(str(next(stream.glob("increments/*2"))))
    assert newest.manifest.report["transform"]["function"] == f"{HERE}:dearer"


def test_files_that_name_sides_have_no_transform() -> None:
    body = {
        **{name: part for name, part in SCHEMA.items() if name != "splits"},
        "transform": {"function": "x:y"},
        "membership": {"support": "s*", "query": "q*"},
    }
    with pytest.raises(MetaIOError, match=r"\[transform\] makes files of its own"):
        parse_schema(body)
