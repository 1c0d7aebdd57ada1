"""Tasks and items keep the names that the log has for them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from metaio import Dataset, open_dataset
from metaio.errors import SchemaError
from metaio.format.inspection import find_damage
from metaio.format.manifest import encode_manifest
from metaio.prepare.engines.local import prepare
from metaio.prepare.episodes.raw_ids import (
    describe_missing_ids,
    find_item_feature,
    read_raw_items,
    read_raw_tasks,
    with_raw_ids,
)
from metaio.prepare.schema.schema_file import parse_schema
from tests.support.refusals import catch_message

SCHEMA: dict[str, Any] = {
    "task": {"column": "user"}, "label": {"column": "clicked"}, "item": {"column": "film"},
    "single": [{"column": "kind", "hash": 9}, {"column": "film", "hash": 40}],
    "episodes": {"by": "random", "query_rows": 2, "min_rows": 3, "max_rows": 30},
    "splits": {"shares": {"train": 0.7, "cold": 0.3}},
}  # fmt: skip
FILMS = [f"film {number} \N{LATIN SMALL LETTER E WITH ACUTE}" for number in range(30)]


def prepared(tmp_path: Path, **parts: Any) -> Dataset:
    """300 rows of 40 users and 30 films by text; `number` has the users as integers."""
    rng = np.random.default_rng(0)
    number_N, film_N = np.arange(300) % 40, rng.integers(0, 30, 300)
    columns = {
        "user": [f"user {number}" for number in number_N], "number": number_N, "kind": film_N % 3,
        "film": [FILMS[film] for film in film_N], "clicked": rng.integers(0, 2, 300),
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "raw.parquet")
    out = str(tmp_path / "data")
    body = {name: part for name, part in {**SCHEMA, **parts}.items() if part is not None}
    prepare([str(tmp_path / "raw.parquet")], out, parse_schema(body))
    return open_dataset(out)


def hashed(text: str) -> int:
    """The signed xxh3_64, as tasks of text are stored."""
    unsigned = xxhash.xxh3_64_intdigest(text.encode())
    return unsigned - (1 << 64 if unsigned >= 1 << 63 else 0)


def test_tasks_of_text_have_their_names(tmp_path: Path) -> None:
    dataset = prepared(tmp_path)
    users = [f"user {number}" for number in range(40)]
    task_N = np.array([hashed(user) for user in users] + [7])
    found = read_raw_tasks(dataset, task_N)
    assert found is not None
    assert found.to_pylist() == [*users, None]
    stored = {task for split in dataset.splits for task in dataset.read_block(split, 0).task_T}
    assert stored <= set(task_N.tolist())
    assert describe_missing_ids(dataset) == ""
    assert find_damage(dataset) == []


def test_tasks_of_integers_are_their_own_names(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, task={"column": "number"}, item=None)
    found = read_raw_tasks(dataset, np.array([3, 5]))
    assert found is not None
    assert found.to_pylist() == [3, 5]
    assert "raw_ids" not in dataset.manifest.report
    assert not (tmp_path / "data" / "raw_ids").exists()
    assert (find_item_feature(dataset), describe_missing_ids(dataset)) == (None, "")
    table = with_raw_ids(pa.table({"task": [3, 5]}), dataset, dataset)
    assert table.to_pydict() == {"task": [3, 5], "task_id": [3, 5]}


def test_an_item_of_a_hashed_column_has_its_name_unless_two_share_a_row(tmp_path: Path) -> None:
    dataset = prepared(tmp_path)
    assert find_item_feature(dataset) == 1
    # Rows of the table as the episodes have them: each film of which rows was raw.
    rows = np.arange(40)
    found = read_raw_items(dataset, rows)
    assert found is not None
    names = [name for name in found.to_pylist() if name is not None]
    assert len(names) == len(set(names))
    assert 0 < len(names) < 30  # 30 films in 39 rows: some share one
    block = dataset.read_block("train", 0)
    used = set(block.unique_ids_U[block.positions_NF[:, 1]].tolist())
    assert {row for row, name in enumerate(found.to_pylist()) if name} & used
    # The same column alone tells which film is in which row.
    only = with_raw_ids(pa.table({"task": np.zeros(40, np.int64), "item": rows}), dataset, dataset)
    assert only.column_names == ["task", "task_id", "item_id"]
    assert only["item_id"].to_pylist() == found.to_pylist()


@pytest.mark.parametrize("by", ["item", "negatives"])
def test_an_item_of_a_vocabulary_has_the_word(tmp_path: Path, by: str) -> None:
    single = [{"column": "kind", "hash": 9}, {"column": "film", "vocabulary": 1}]
    rule: dict[str, Any] = {"item": {"column": "film"}}
    if by == "negatives":
        rule = {"item": None, "negatives": {"item": "film", "per_positive": 1}}
    dataset = prepared(tmp_path, single=single, **rule)
    found = read_raw_items(dataset, np.array([0, 1, 2, 10**6]))
    assert found is not None
    assert found.to_pylist() == [None, *sorted(FILMS)[:2], None]
    assert set(dataset.manifest.raw_ids) == {"task"}


def test_a_dataset_of_an_earlier_release_lacks_them_and_that_is_told(tmp_path: Path) -> None:
    dataset = prepared(tmp_path)
    report = {key: value for key, value in dataset.manifest.report.items() if key != "raw_ids"}
    older = encode_manifest(replace(dataset.manifest, report=report))
    (tmp_path / "data" / "manifest.json").write_bytes(older)
    dataset = open_dataset(str(tmp_path / "data"))
    table = pa.table({"task": [1], "item": [1]})
    assert with_raw_ids(table, dataset, dataset).column_names == ["task"]
    assert describe_missing_ids(dataset) == (
        f"predictions.parquet has no task_id and no item_id: {dataset.url} keeps the hashes alone, "
        "as an increment of a stream does, and what an earlier release wrote. Prepare it as a "
        "dataset to have them"
    )


def test_a_file_that_was_altered_is_told(tmp_path: Path) -> None:
    dataset = prepared(tmp_path)
    path = tmp_path / "data" / "raw_ids" / "task.parquet"
    path.write_bytes(path.read_bytes()[:-9] + b"x" * 9)
    (line,) = find_damage(dataset)
    assert "raw_ids/task.parquet" in line


def test_an_item_that_is_the_task_is_refused() -> None:
    assert catch_message(SchemaError, parse_schema, {**SCHEMA, "item": {"column": "user"}}) == (
        "item.column is user; a [[single]] column that is not the task is needed: kind, film. "
        "Name one of them, or leave out [item]"
    )
