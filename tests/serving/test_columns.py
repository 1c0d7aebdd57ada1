"""Raw rows that a served model is given encode exactly as prepare encoded the same rows."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gmeta.serving.columns import RawColumns
from gmeta.serving.folder import Columns
from gmeta.serving.rows import task_batch
from metaio import DataError, Dataset
from metaio.schema import parse_schema
from tests.metaio.conftest import episodes_of_batch, whole_split
from tests.metaio.test_prepare import changed, prepared, raw_table

SCHEMA = changed(dense=[{"column": "price", "standardise": True}, {"column": "age", "fill": 5.0}])


def encoder_of(dataset: Dataset) -> RawColumns:
    recipe = dataset.manifest.recipe
    vocabularies = {
        name: pq.read_table(f"{dataset.url}/vocabulary/{name}.parquet")["value"].combine_chunks()
        for name in dataset.manifest.vocabularies
    }
    columns = Columns(
        dataset.task,
        dataset.label,
        parse_schema(recipe["schema"]),
        {name: tuple(moments) for name, moments in recipe["moments"].items()},
        recipe["kinds"],
    )
    return RawColumns(columns, parse_schema(recipe["schema"]), vocabularies)


def test_rows_encode_as_prepare_encoded_them(tmp_path: Path) -> None:
    table = raw_table()
    dataset = prepared(tmp_path, table, SCHEMA)
    encoder = encoder_of(dataset)
    ordered = table.sort_by("ts").combine_chunks()
    for task, num_support, rows in whole_split(dataset, "train"):
        own = ordered.filter(pa.compute.equal(ordered["user"], task)).combine_chunks()
        sides = [
            encoder.encode(side.to_batches()[0], True)
            for side in (own.slice(0, num_support), own.slice(num_support))
        ]
        every = tuple(np.arange(side.num_rows) for side in sides)
        lengths = tuple(np.array([side.num_rows]) for side in sides)
        batch = task_batch(dataset.features, *sides, every, lengths)
        assert episodes_of_batch(batch) == [(0, num_support, rows)]


def test_text_where_the_training_data_had_integers_is_refused(tmp_path: Path) -> None:
    table = raw_table()
    encoder = encoder_of(prepared(tmp_path, table, SCHEMA))
    batch = table.combine_chunks().to_batches()[0]
    for name, held, wanted in (("shop", "text", "integer"), ("city", "integer", "text")):
        values = np.arange(batch.num_rows)
        wrong = pa.array(values.astype(str) if held == "text" else values)
        changed_batch = batch.set_column(batch.schema.get_field_index(name), name, wrong)
        with pytest.raises(DataError) as caught:
            encoder.encode(changed_batch, True)
        assert str(caught.value) == (
            f"sparse column {name} holds {held} values; they were {wanted} when the data was "
            f"prepared, and would get other ids. Cast the column to {wanted}"
        )


def test_a_column_without_values_has_no_kind(tmp_path: Path) -> None:
    schema = changed(single=[{"column": "shop", "hash": 50, "null": "unknown"}], multi=[])
    table = raw_table()
    encoder = encoder_of(prepared(tmp_path, table, schema))
    empty = pa.array([None] * table.num_rows, pa.string())
    batch = table.set_column(2, "shop", empty).combine_chunks().to_batches()[0]
    assert (encoder.encode(batch, True).ids_NF == 0).all()
