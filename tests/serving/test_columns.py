"""Raw rows that a served model is given encode exactly as prepare encoded the same rows."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gmeta.serving.episodes import task_batch
from gmeta.serving.exported_folder import ExportedColumns
from gmeta.serving.row_encoders import RawColumnEncoder, as_table, select_columns
from metaio import DataError, Dataset
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.conftest import episodes_of_batch, whole_split
from tests.metaio.prepare.test_local import changed, prepared, raw_table
from tests.support.refusals import catch_message

SCHEMA = changed(dense=[{"column": "price", "standardise": True}, {"column": "age", "fill": 5.0}])


def encoder_of(dataset: Dataset) -> RawColumnEncoder:
    recipe = dataset.manifest.recipe
    vocabularies = {
        name: pq.read_table(f"{dataset.url}/vocabulary/{name}.parquet")["value"].combine_chunks()
        for name in dataset.manifest.vocabularies
    }
    columns = ExportedColumns(
        dataset.task, dataset.label, parse_schema(recipe["schema"]),
        {name: tuple(moments) for name, moments in recipe["moments"].items()}, recipe["kinds"],
    )  # fmt: skip
    return RawColumnEncoder(columns, parse_schema(recipe["schema"]), vocabularies)


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


def test_examples_are_values_of_the_vocabulary_without_those_of_freed_rows() -> None:
    schema = parse_schema(
        {
            "task": {"column": "user"}, "label": {"column": "y"},
            "single": [{"column": "item", "vocabulary": 1}, {"column": "city", "hash": 9}],
            "multi": [{"column": "tags", "table": "tag", "vocabulary": 1}],
            "episodes": {"query_rows": 1}, "splits": {"shares": {"train": 1.0}},
        }
    )  # fmt: skip
    items = pa.array([None, *range(2**62, 2**62 + 41), None])
    vocabularies = {"item": items, "tag": pa.array([None, "b", None, "a"])}
    encoder = RawColumnEncoder(ExportedColumns("user", "y", schema, {}), schema, vocabularies)
    # A hashed column takes any value: nobody knows which the log had.
    spread = [2**62 + at for at in (0, 10, 20, 30, 40)]
    assert encoder.example_values(5) == {"item": spread, "tags": ["b", "a"]}
    empty = {"item": items[:1], "tag": pa.array([], pa.string())}
    encoder = RawColumnEncoder(ExportedColumns("user", "y", schema, {}), schema, empty)
    assert encoder.example_values(5) == {"item": [], "tags": []}


class PolarsFrame:
    """What Arrow sees of a frame of polars whose column is categorical."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        words = pa.DictionaryArray.from_arrays([1, None, 0], pa.array(["x", "y"], pa.string_view()))
        return pa.table({"city": words}).__arrow_c_stream__(requested_schema)


def test_categories_of_polars_are_text() -> None:
    table = as_table(PolarsFrame(), "support")
    assert table.schema.field("city").type == pa.large_string()
    assert table["city"].to_pylist() == ["y", None, "x"]


def test_text_where_the_training_data_had_integers_is_refused(tmp_path: Path) -> None:
    table = raw_table()
    encoder = encoder_of(prepared(tmp_path, table, SCHEMA))
    batch = table.combine_chunks().to_batches()[0]
    for name, held, wanted in (("shop", "text", "integer"), ("city", "integer", "text")):
        values = np.arange(batch.num_rows)
        wrong = pa.array(values.astype(str) if held == "text" else values)
        changed_batch = batch.set_column(batch.schema.get_field_index(name), name, wrong)
        assert catch_message(DataError, encoder.encode, changed_batch, True) == (
            f"sparse column {name} holds {held} values; they were {wanted} when the data was "
            f"prepared, and would get other ids. Cast the column to {wanted}"
        )


def test_lists_of_one_length_are_lists(tmp_path: Path) -> None:
    """As they are to prepare: DuckDB reads the same file without their length."""
    multi = [{"column": "pair", "hash": 30}]
    pairs = [[row, row + 1] for row in range(40)]
    table = raw_table(40).append_column("pair", pa.array(pairs, pa.list_(pa.int64(), 2)))
    encoder = encoder_of(prepared(tmp_path, table, changed(multi=multi)))
    plain = table.set_column(table.num_columns - 1, "pair", pa.array(pairs))
    found, wanted = (
        encoder.encode(select_columns(given, encoder.names(True), [], "support"), True)
        for given in (table.slice(3), plain.slice(3))
    )
    assert found.values_V.tolist() == wanted.values_V.tolist()
    assert found.lengths_NM.tolist() == [[2]] * 37


VIEWS = pa.ListViewArray.from_arrays([2, 0, 1, 0], [1, 2, 2, 0], [10, 20, 30])


@pytest.mark.parametrize("large", [False, True])
def test_list_views_are_the_lists_that_they_show(tmp_path: Path, large: bool) -> None:
    """Out of order, overlapping, null, and in several chunks: of such Arrow's cast loses values."""
    multi = [{"column": "pair", "hash": 30, "null": "unknown"}]
    chunks = [VIEWS, pa.array([[7, 8], None, [], [9]], VIEWS.type)]
    shown = [values for chunk in chunks for values in chunk.to_pylist()]
    assert shown == [[30], [10, 20], [20, 30], [], [7, 8], None, [], [9]]
    if large:
        chunks = [pa.array(chunk.to_pylist(), pa.large_list_view(pa.int64())) for chunk in chunks]
    plain = raw_table(8).append_column("pair", pa.array(shown))
    viewed = plain.set_column(plain.num_columns - 1, "pair", pa.chunked_array(chunks))
    encoder = encoder_of(
        prepared(
            tmp_path,
            raw_table().append_column("pair", pa.array([[row] for row in range(800)])),
            changed(multi=multi),
        )
    )
    for first in (0, 1, 5):
        found, wanted = (
            encoder.encode(
                select_columns(given.slice(first), encoder.names(True), [], "support"), True
            )
            for given in (viewed, plain)
        )
        assert found.values_V.tolist() == wanted.values_V.tolist()
        assert found.lengths_NM.tolist() == wanted.lengths_NM.tolist()
    empty = pa.array([[], None], pa.list_view(pa.null()))
    none = raw_table(2).append_column("pair", empty)
    encoded = encoder.encode(select_columns(none, encoder.names(True), [], "support"), True)
    assert encoded.lengths_NM.tolist() == [[0], [0]]


def test_no_rows_of_plain_lists_are_no_rows(tmp_path: Path) -> None:
    """Empty Python lists have no type, that of the label neither."""
    encoder = encoder_of(prepared(tmp_path, raw_table(), SCHEMA))
    none = as_table({name: [] for name in encoder.names(True)}, "support")
    found = encoder.encode(select_columns(none, encoder.names(True), [], "support"), True).num_rows
    assert found == 0


def test_a_column_without_values_has_no_kind(tmp_path: Path) -> None:
    schema = changed(single=[{"column": "shop", "hash": 50, "null": "unknown"}], multi=[])
    table = raw_table()
    encoder = encoder_of(prepared(tmp_path, table, schema))
    empty = pa.array([None] * table.num_rows, pa.string())
    batch = table.set_column(2, "shop", empty).combine_chunks().to_batches()[0]
    assert (encoder.encode(batch, True).ids_NF == 0).all()
