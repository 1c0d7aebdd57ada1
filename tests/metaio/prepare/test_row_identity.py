"""Shuffles go by what tells a row from others of its task, never by what the row holds."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from metaio import DataError, open_dataset
from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.conftest import whole_split
from tests.metaio.prepare.test_local import BASE, raw_table
from tests.support.refusals import catch_message

RANDOM = {**BASE, "episodes": {**BASE["episodes"], "by": "random"}}
SHARES = {"shares": {"train": 0.7, "valid": 0.3}}
Sides = dict[tuple[str, int], list[list[float]]]


def numbered(num_rows: int = 600) -> pa.Table:
    """A raw table whose label is each row's own number: an episode tells which rows it holds."""
    table = raw_table(num_rows)
    label = table.schema.get_field_index("clicked")
    numbers = np.random.default_rng(4).permutation(num_rows)
    table = table.set_column(label, "clicked", pa.array(numbers.astype(np.float32)))
    return table.append_column("row", pa.array([f"r{number}" for number in numbers]))


def sides(folder: Path, table: pa.Table, schema: dict[str, Any], **options: Any) -> Sides:
    """Sorted labels of support and of query of each episode, by split and task."""
    raw, out = folder / "raw.parquet", str(folder / f"out{len(list(folder.iterdir()))}")
    pq.write_table(table, raw)
    prepare([str(raw)], out, parse_schema(schema), PrepareOptions(threads=1, **options))
    found: defaultdict[tuple[str, int], list[list[float]]] = defaultdict(list)
    dataset = open_dataset(out)
    for split in dataset.splits:
        for task, support, rows in whole_split(dataset, split):
            labels: list[float] = [row[0] for row in rows]  # type: ignore[index]
            found[split, task] += [sorted(labels[:support]), sorted(labels[support:])]
    return dict(found)


@pytest.mark.parametrize("row_id", [{}, {"row_id": {"column": "row"}}])
@pytest.mark.parametrize("time", [BASE["time"], None])
def test_with_a_feature_less_each_row_keeps_its_split_and_side(
    tmp_path: Path, row_id: dict[str, Any], time: dict[str, str] | None
) -> None:
    whole = {**RANDOM, **row_id, "splits": SHARES, "time": time}
    whole = {name: part for name, part in whole.items() if part is not None}
    less = {**whole, "single": whole["single"][1:], "multi": [], "dense": whole["dense"][:1]}
    table = numbered()
    expected = sides(tmp_path, table, whole)
    assert len(expected) > 30
    assert sides(tmp_path, table, less) == expected
    assert sides(tmp_path, table.drop_columns(["item", "tags"]), less) == expected
    assert sides(tmp_path, table, {**whole, "seed": 1}) != expected


def test_a_task_is_shuffled_alike_whatever_other_tasks_there_are(tmp_path: Path) -> None:
    table = numbered()
    some = table.filter(pa.compute.less(table["user"], 11))
    expected = sides(tmp_path, table, RANDOM)
    found = sides(tmp_path, some, RANDOM)
    assert 5 < len(found) < len(expected)
    assert found == {key: expected[key] for key in found}


def test_with_row_ids_the_order_of_the_input_says_nothing(tmp_path: Path) -> None:
    table = numbered()
    schema = {**RANDOM, "row_id": {"column": "row"}}
    shuffled = table.take(np.random.default_rng(1).permutation(table.num_rows))
    assert sides(tmp_path, shuffled, schema) == sides(tmp_path, table, schema)
    assert sides(tmp_path, shuffled, RANDOM) != sides(tmp_path, table, RANDOM)


def test_without_row_ids_files_threads_and_formats_change_nothing(tmp_path: Path) -> None:
    num_rows = 30_000
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "user": rng.integers(0, 300, num_rows), "item": rng.integers(0, 300, num_rows),
            "clicked": np.arange(num_rows) % 7, "text": ["x" * 150] * num_rows,
        }
    )  # fmt: skip
    schema = parse_schema(
        {
            "task": {"column": "user"},
            "label": {"column": "clicked"},
            "single": [{"column": "item", "hash": 100}],
            "episodes": {"by": "last", "query_rows": 3, "min_rows": 4},
        }
    )
    pq.write_table(table, tmp_path / "raw.parquet")
    for name, rows in (("a", table.slice(0, 20_000)), ("b", table.slice(20_000))):
        pa_csv.write_csv(rows, tmp_path / f"{name}.csv")
    fingerprints = set()
    for index, (inputs, threads) in enumerate((("raw.parquet", 1), ("*.csv", 1), ("*.csv", 4))):
        out = str(tmp_path / f"out{index}")
        prepare([str(tmp_path / inputs)], out, schema, PrepareOptions(threads=threads))
        fingerprints.add(open_dataset(out).fingerprint)
    assert len(fingerprints) == 1


@pytest.mark.parametrize("by", ["random", "last"])
def test_two_rows_of_a_task_with_one_row_id_are_refused(tmp_path: Path, by: str) -> None:
    table = numbered(50)
    for name, values in (("user", [3] * 50), ("ts", [1] * 50), ("row", ["same"] * 50)):
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(values))
    schema = {**BASE, "row_id": {"column": "row"}, "episodes": {**BASE["episodes"], "by": by}}
    assert catch_message(DataError, sides, tmp_path, table, schema) == (
        "task 3 has two rows of the same row; as [row_id] it must tell the rows of a task apart. "
        "Correct the column, or name another one"
    )


def test_row_ids_of_another_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape("row_id column price has type double; ")):
        sides(tmp_path, numbered(50), {**BASE, "row_id": {"column": "price"}})
