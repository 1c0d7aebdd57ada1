"""Keeps the raw tasks and items of a log beside a dataset, which knows them by numbers.

raw_ids/task.parquet has the text behind each task's hash; integer tasks are stored as they are.
raw_ids/item.parquet has the values behind the item's hashed rows; else its vocabulary does.

Shape suffix: N rows"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from metaio.errors import FormatError
from metaio.format.dataset import Dataset, read_verified_file
from metaio.format.layout import RAW_IDS_FOLDER, VOCABULARY_FOLDER
from metaio.format.manifest import FileEntry
from metaio.prepare.episodes.encode import hash_to_rows
from metaio.prepare.episodes.survey import Survey, find_raw_id_columns, merge_counts
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.schema_file import read_item_rule
from metaio.prepare.schema.values import hash_values, infer_kind
from metaio.ragged import Int64


def write_raw_ids(folder: Path, schema: Schema, survey: Survey) -> None:
    """Write the raw ids of a survey, sorted by key."""
    num_rows = {column.column: column.hash for column in schema.single}
    for role, parts in survey.raw_ids.items():
        values = merge_counts(parts)["value"].combine_chunks()
        column = find_raw_id_columns(schema)[role]
        kind = infer_kind(column, values.type, role)
        if role == "task":
            key_N = hash_values(values, kind).view(np.int64)
        else:
            key_N = hash_to_rows(values, kind, num_rows[column] or 0)
        # Sorted, so that the file does not depend on engine or order of the survey.
        order = [("key", "ascending"), ("value", "ascending")]
        table = pa.table({"key": key_N, "value": values}).sort_by(order)
        path = folder / RAW_IDS_FOLDER / f"{role}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(table, path, store_schema=False)


def read_raw_tasks(dataset: Dataset, task_N: Int64) -> pa.Array | None:
    """Return the raw tasks [N], integers or text; None if the dataset does not keep them."""
    if dataset.manifest.task_kind == "integer":
        return pa.array(task_N)
    entry = dataset.manifest.raw_ids.get("task")
    return None if entry is None else _look_up(_read_role_table(dataset, "task", entry), task_N)


def read_raw_items(dataset: Dataset, id_N: Int64) -> pa.Array | None:
    """Return the raw values [N] of rows of the item's table; None if the dataset keeps none."""
    manifest = dataset.manifest
    rule = read_item_rule(manifest)
    if rule is None:
        return None
    entry = manifest.raw_ids.get("item")
    if entry is not None:
        return _look_up(_read_role_table(dataset, "item", entry), id_N)
    tables = {feature.name: feature.table for feature in dataset.features.single}
    name = tables[rule.column]
    if name not in manifest.vocabularies:
        return None
    path = f"{VOCABULARY_FOLDER}/{name}.parquet"
    values = _read_table(dataset, path, manifest.vocabularies[name])["value"]
    # A vocabulary begins at row 1: row 0 has no value.
    keys = np.arange(1, len(values) + 1)
    return _look_up(pa.table({"key": keys, "value": values}), id_N)


def find_item_feature(dataset: Dataset) -> int | None:
    """Return the index of the item among the single features; None if no schema names one."""
    rule = read_item_rule(dataset.manifest)
    names = [feature.name for feature in dataset.features.single]
    return None if rule is None else names.index(rule.column)


def with_raw_ids(table: pa.Table, dataset: Dataset, known: Dataset) -> pa.Table:
    """Return a table with `task_id` behind its column `task`, and `item_id` in place of `item`."""
    tasks = read_raw_tasks(dataset, table["task"].to_numpy())
    if tasks is not None:
        table = table.add_column(table.column_names.index("task") + 1, "task_id", tasks)
    if "item" not in table.column_names:
        return table
    place = table.column_names.index("item")
    # `item` holds rows of the model's dataset, `known`, which may not be the one scored.
    items = read_raw_items(known, table["item"].to_numpy())
    rest = table.drop_columns(["item"])
    return rest if items is None else rest.add_column(place, "item_id", items)


def describe_missing_ids(dataset: Dataset) -> str:
    """Return a line on the raw ids that a dataset does not keep; "" if it keeps all."""
    item, roles = find_item_feature(dataset), dataset.manifest.raw_ids
    missing = ["task_id"] if dataset.manifest.task_kind == "hashed" and "task" not in roles else []
    # Of no row: only whether the dataset could answer.
    if item is not None and read_raw_items(dataset, np.zeros(0, np.int64)) is None:
        missing.append("item_id")
    if not missing:
        return ""
    return (
        f"predictions.parquet has no {' and no '.join(missing)}: {dataset.url} keeps the hashes "
        "alone, as an increment of a stream does, and what an earlier release wrote. Prepare it as "
        "a dataset to have them"
    )


def _look_up(table: pa.Table, key_N: Int64) -> pa.Array:
    """Return the value of each key, null where it has none or several; keys are sorted."""
    known = table["key"].to_numpy()
    first_N = np.searchsorted(known, key_N, side="left")
    # Several values may share a hashed row: then none is named.
    is_one_N = np.searchsorted(known, key_N, side="right") - first_N == 1
    return table["value"].combine_chunks().take(pa.array(first_N, mask=~is_one_N))


def _read_role_table(dataset: Dataset, role: str, entry: FileEntry) -> pa.Table:
    return _read_table(dataset, f"{RAW_IDS_FOLDER}/{role}.parquet", entry)


def _read_table(dataset: Dataset, path: str, entry: FileEntry) -> pa.Table:
    content = read_verified_file(dataset, path, entry)
    try:
        return pq.read_table(pa.BufferReader(content))
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{dataset.url}/{path} is no Parquet file: {error}") from error
