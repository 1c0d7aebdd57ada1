"""Raw rows of a new user encode exactly as prepare encoded the same rows."""

from pathlib import Path

import pyarrow as pa
import pytest

from metaio import DataError, FormatError, open_dataset
from metaio.raw import RawEncoder
from tests.metaio.conftest import WriteFn, episodes_of_batch, make_rows, whole_split
from tests.metaio.test_prepare import changed, prepared, raw_table

SCHEMA = changed(dense=[{"column": "price", "standardise": True}, {"column": "age", "fill": 5.0}])


def test_rows_encode_as_prepare_encoded_them(tmp_path: Path) -> None:
    table = raw_table()
    dataset = prepared(tmp_path, table, SCHEMA)
    encoder = RawEncoder(dataset)
    ordered = table.sort_by("ts")
    for task, support, rows in whole_split(dataset, "train"):
        own = ordered.filter(pa.compute.equal(ordered["user"], task))
        assert episodes_of_batch(encoder.encode(own, support)) == [(task, support, rows)]


def test_candidates_need_neither_label_nor_task_nor_time(tmp_path: Path) -> None:
    table = raw_table()
    encoder = RawEncoder(prepared(tmp_path, table, SCHEMA))
    whole = encoder.encode(table, 3)
    bare = encoder.encode(table.drop_columns(["user", "ts", "clicked", "part"]), 3)
    assert (bare.label_N == 0).all()
    assert (bare.positions_NF == whole.positions_NF).all()
    assert bare.support_lengths_T.tolist() == [3]
    unknown = table.set_column(8, "clicked", pa.array([None] * table.num_rows, pa.int64()))
    assert (encoder.encode(unknown, 3).label_N == 0).all()


def test_what_the_training_data_had_must_be_there(tmp_path: Path) -> None:
    table = raw_table(60)
    encoder = RawEncoder(prepared(tmp_path, table, SCHEMA))
    with pytest.raises(DataError) as caught:
        encoder.encode(table.select(["item", "city"]), 1)
    assert str(caught.value) == (
        "the rows have no column shop; they have item, city. Add it, as the training data had it."
    )
    with pytest.raises(DataError) as caught:
        encoder.encode(table, 61)
    assert str(caught.value) == ("num_support is 61 of 60 rows; 0 to 60 is allowed. Correct it.")
    with pytest.raises(DataError) as caught:
        encoder.encode(table.slice(0, 0), 0)
    assert str(caught.value) == "there are no rows to encode. Give at least one."


def test_datasets_of_recipes_cannot_encode(write: WriteFn) -> None:
    path = write({"train": make_rows(3)})
    with pytest.raises(FormatError) as caught:
        RawEncoder(open_dataset(path))
    assert str(caught.value) == (
        f"{path} was made by recipe None, which keeps no schema to encode raw rows by. Prepare it "
        "with --schema."
    )
