"""Several labels, masks and weights: every row of a batch has those of its raw row."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from metaio import BatchReader, DataError, SchemaError
from metaio.format.features import Features
from metaio.format.inspection import summarise
from metaio.format.names import NAME_RULE
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.conftest import whole_split
from tests.metaio.prepare.test_local import BASE, changed, prepared, raw_table
from tests.support.refusals import catch_message

CLICK = {"column": "clicked", "name": "click"}
LABELS = {
    "label": [
        CLICK,
        {"column": "bought", "mask": "clicked"},
        {"column": "stars", "name": "liked", "threshold": 4, "null": "unknown"},
    ],
    "weight": {"column": "importance"},
    "row_id": {"column": "row"},
}


def labelled(num_rows: int = 300) -> pa.Table:
    """Return raw rows with purchases (known where clicked), ratings with nulls, and weights."""
    rng, raw = np.random.default_rng(5), raw_table(num_rows)
    stars = pa.array(rng.integers(1, 6, num_rows), mask=rng.random(num_rows) < 0.3)
    bought = pa.array(rng.random(num_rows) < 0.5, mask=raw["clicked"].to_numpy() == 0)
    raw = raw.append_column("bought", bought).append_column("stars", stars)
    raw = raw.append_column("importance", pa.array(rng.random(num_rows)))
    return raw.append_column("row", pa.array(np.arange(num_rows)))


def wanted(row: dict[str, Any]) -> list[float]:
    """Return the labels of a raw row, then its weight."""
    bought = float(row["bought"]) if row["clicked"] else np.nan
    liked = np.nan if row["stars"] is None else float(row["stars"] >= 4)
    return [float(row["clicked"]), bought, liked, np.float32(row["importance"])]


@pytest.mark.parametrize("compact", [False, True])
def test_every_row_of_a_batch_has_the_labels_of_its_raw_row(tmp_path: Path, compact: bool) -> None:
    raw = labelled()
    dataset = prepared(tmp_path, raw, changed(**LABELS), compact=compact, block_rows=50)
    assert dataset.features.labels == ("click", "bought", "liked")
    assert dataset.label == "clicked, bought, stars"
    assert Features.from_json(dataset.features.to_json()) == dataset.features
    rows, seen = raw.to_pylist(), 0
    with BatchReader(dataset, "train", tasks_per_step=3, seed=1, window_blocks=4) as reader:
        for batch in reader.batches(0):
            both = np.column_stack([batch.label_N.numpy(), batch.weight_N.numpy()])
            np.testing.assert_array_equal(both, [wanted(rows[row]) for row in batch.row_id_N])
            part = batch.tasks(1, batch.num_tasks)
            first = int(batch.row_offsets_T1[1])
            np.testing.assert_array_equal(part.label_N, batch.label_N[first:])
            np.testing.assert_array_equal(part.weight_N, batch.weight_N[first:])
            seen += batch.num_rows
    assert seen == dataset.split("train").num_rows


def test_a_summary_has_the_mean_of_each_label_where_it_is_known(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, labelled(), changed(**LABELS), block_rows=50)
    for summary in summarise(dataset):
        split = dataset.split(summary.name)
        blocks = [dataset.read_block(summary.name, n).label_N for n in range(split.num_blocks)]
        label_NL = np.concatenate(blocks)
        for column, label in enumerate(summary.labels):
            known = label_NL[~np.isnan(label_NL[:, column]), column]
            assert label == (
                dataset.features.labels[column],
                pytest.approx(known.mean()),
                known.size,
            )


def test_one_label_in_double_brackets_is_one_label(tmp_path: Path) -> None:
    raw = labelled()
    single = prepared(tmp_path, raw, changed())
    double = prepared(tmp_path, raw, changed(label=[BASE["label"]]))
    assert single.fingerprint == double.fingerprint
    assert whole_split(single, "train") == whole_split(double, "train")
    assert (single.features.labels, single.features.weight) == ((), "")


def test_one_label_that_not_every_row_has_keeps_its_shape(tmp_path: Path) -> None:
    raw = labelled()
    dataset = prepared(tmp_path, raw, changed(label=LABELS["label"][1], row_id=LABELS["row_id"]))
    block, rows = dataset.read_block("train", 0), raw.to_pylist()
    assert dataset.features.labels == ("bought",)
    np.testing.assert_array_equal(block.label_N, [wanted(rows[row])[1] for row in block.row_id_N])


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("importance", -0.5, "weight column importance holds -0.5; numbers from 0 on are needed. "
         "Replace those values"),
        ("clicked", 2, "mask column clicked of label bought holds 2; 1 where the label is known "
         "and 0 where not are allowed. Replace those values"),
    ],
)  # fmt: skip
def test_what_no_label_can_mean_is_refused(
    tmp_path: Path, column: str, value: float | None, message: str
) -> None:
    raw = labelled()
    values = raw[column].to_pylist()
    values[7] = value
    raw = raw.set_column(raw.column_names.index(column), column, pa.array(values))
    assert catch_message(DataError, prepared, tmp_path, raw, changed(**LABELS)) == message


def test_a_null_where_the_mask_is_one_is_refused(tmp_path: Path) -> None:
    raw = labelled()
    bought = pa.array([None] * raw.num_rows, pa.bool_())
    raw = raw.set_column(raw.column_names.index("bought"), "bought", bought)
    clicks = int(np.sum(raw["clicked"].to_numpy()))
    assert catch_message(DataError, prepared, tmp_path, raw, changed(**LABELS)) == (
        f"label column bought has {clicks} nulls in rows whose mask clicked is 1. Correct the "
        'mask, or add null = "unknown"'
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"label": [CLICK, CLICK]}, "two labels have the name click. Give one of them "
         "another name"),
        ({"label": [CLICK, {"column": "price"}]}, "column price is the label and a feature: the "
         "model would be told the answer. Remove the feature"),
        ({"label": [CLICK, {"column": "x", "mask": "price"}]}, "column price is the mask of label "
         "x and a feature: rows to predict have none. Remove the feature"),
        ({"label": [CLICK, {"column": "x"}], "negatives": {"item": "item"}}, "[negatives] and the "
         "labels click, x: a row that is added has label 0, of one label that every row has. "
         "Remove [negatives], or the other labels"),
    ],
)  # fmt: skip
def test_labels_that_cannot_be_are_refused(parts: dict[str, Any], message: str) -> None:
    assert catch_message(SchemaError, changed, **parts) == message.replace("{rule}", NAME_RULE)


def test_several_labels_survive_json() -> None:
    schema = changed(**LABELS)
    assert parse_schema(schema.to_json()) == schema
