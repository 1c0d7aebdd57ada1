"""[[vector]]: every row of a batch has the vector of its raw row, in one column of the shard."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import BatchReader, DataError
from metaio.format.features import Features, find_vector_column
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.prepare.test_local import BASE, changed, prepared, raw_table
from tests.support.refusals import catch_message

WIDTH = 64
VECTORS = {
    "vector": [{"column": "text", "width": WIDTH}, {"column": "image", "width": 2, "fill": 0.5}],
    "row_id": {"column": "row"},
}
TYPES = [
    pa.list_(pa.float32(), WIDTH), pa.list_(pa.float32()), pa.large_list(pa.float64()),
    pa.list_(pa.int16()),
]  # fmt: skip


def with_vectors(kind: pa.DataType = TYPES[0], num_rows: int = 300) -> pa.Table:
    """Raw rows with whole numbers in `text`, and an `image` of which some are null."""
    rng, raw = np.random.default_rng(3), raw_table(num_rows)
    text = rng.integers(-999, 999, (num_rows, WIDTH)).tolist()
    image = [rng.random(2).tolist() if rng.random() < 0.8 else None for _ in range(num_rows)]
    raw = raw.append_column("text", pa.array(text, kind))
    raw = raw.append_column("image", pa.array(image, pa.list_(pa.float64())))
    return raw.append_column("row", pa.array(np.arange(num_rows)))


@pytest.mark.parametrize("kind", TYPES)
def test_every_row_has_the_vectors_of_its_raw_row(tmp_path: Path, kind: pa.DataType) -> None:
    raw = with_vectors(kind)
    dataset = prepared(tmp_path, raw, changed(**VECTORS), block_rows=50)
    names = dataset.features.dense
    assert names[:3] == ("price", "age", "text[0]")
    expected = ["price", "age", *["text"] * WIDTH, *["image"] * 2]
    assert [find_vector_column(name) for name in names] == expected
    assert Features.from_json(dataset.features.to_json()) == dataset.features
    rows, seen = raw.to_pylist(), 0
    with BatchReader(dataset, "train", tasks_per_step=3, seed=1, window_blocks=4) as reader:
        for batch in reader.batches(0):
            for row, dense_K in zip(batch.row_id_N.tolist(), batch.dense_NK.numpy(), strict=True):
                image = rows[row]["image"] or [0.5, 0.5]
                wanted = np.array([*rows[row]["text"], *image], np.float32)
                np.testing.assert_array_equal(dense_K[2:], wanted)
            seen += batch.num_rows
    assert seen == dataset.split("train").num_rows


def test_a_vector_costs_its_numbers_and_no_columns(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, with_vectors(), changed(**VECTORS))
    (file,) = Path(dataset.url).glob("train/*.dense.parquet")
    metadata = pq.read_metadata(file)
    num_values = dataset.split("train").num_rows * (2 + WIDTH + 2)
    assert (metadata.num_columns, metadata.num_rows) == (1, num_values)
    assert 4 * num_values < file.stat().st_size < 4 * num_values + 2_000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [1.0] * 63,
            "vector column text holds 63 numbers in a row, and its width is 64. Replace those "
            "values, or correct width in the schema",
        ),
        (
            [1.0] * 63 + [float("nan")],
            "vector column text holds nan; finite numbers up to 3.4e38 are needed. Replace those "
            "values",
        ),
    ],
)
def test_a_row_of_other_numbers_fails(tmp_path: Path, values: list[float], message: str) -> None:
    raw = with_vectors()
    rows = raw["text"].to_pylist()
    rows[7] = values
    broken = raw.set_column(raw.schema.get_field_index("text"), "text", pa.array(rows))
    assert catch_message(DataError, prepared, tmp_path, broken, changed(**VECTORS)) == message
    assert not list(tmp_path.glob("out*"))


def test_a_column_of_no_lists_is_refused(tmp_path: Path) -> None:
    schema = changed(vector=[{"column": "ts", "width": 3}])
    assert catch_message(DataError, prepared, tmp_path, raw_table(), schema) == (
        "vector column ts has type int64; lists of 3 numbers are needed. Cast it, or choose "
        "another column"
    )


def test_a_width_of_a_table_is_kept_with_it(tmp_path: Path) -> None:
    single = [{**column} for column in BASE["single"]]
    single[0]["width"] = 8
    dataset = prepared(tmp_path, raw_table(), changed(single=single))
    assert {table.name: table.width for table in dataset.features.tables} == {
        "item": 8, "shop": 0, "city": 0, "tags": 0
    }  # fmt: skip


def test_a_schema_without_vectors_is_written_as_before() -> None:
    assert "vector" not in changed().to_json()
    schema = changed(**VECTORS)
    assert parse_schema(schema.to_json()) == schema
    assert BASE.keys() <= schema.to_json().keys()
