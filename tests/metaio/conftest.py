"""Small datasets, readers that are slow and obvious, and Spark on threads of this process."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metaio import (
    BatchReader,
    Dataset,
    Features,
    FeatureSpec,
    Provenance,
    Rows,
    TableSpec,
    TaskBatch,
    write_dataset,
)

FEATURES = Features(
    tables=(TableSpec("item", 500), TableSpec("tag", 40), TableSpec("age", 8)),
    single=(
        FeatureSpec("item", "item"),
        FeatureSpec("age", "age"),
        FeatureSpec("last_item", "item"),
    ),
    multi=(FeatureSpec("tags", "tag"), FeatureSpec("history", "item")),
    dense=("price", "hour"),
)


def make_rows(
    num_episodes: int, seed: int = 0, features: Features = FEATURES, max_rows: int = 12
) -> Rows:
    """Random episodes; task t is episode t of the call, shifted by 1000 * seed."""
    rng = np.random.default_rng(seed)
    limits = {table.name: table.num_rows for table in features.tables}
    lengths = rng.integers(1, max_rows + 1, num_episodes)
    num_rows = int(lengths.sum())
    multi_lengths = rng.integers(0, 4, (num_rows, len(features.multi))).astype(np.int32)
    multi_limits = np.array([limits[f.table] for f in features.multi], dtype=np.int64)
    owner = np.repeat(np.tile(np.arange(len(features.multi)), num_rows), multi_lengths.ravel())
    ids = [rng.integers(0, limits[f.table], num_rows) for f in features.single]
    return Rows(
        task_T=1000 * seed + np.arange(num_episodes),
        row_lengths_T=lengths,
        support_lengths_T=rng.integers(0, lengths + 1),
        label_N=rng.random(num_rows, dtype=np.float32),
        dense_NK=rng.random((num_rows, len(features.dense)), dtype=np.float32),
        ids_NF=np.stack(ids, axis=1) if ids else np.zeros((num_rows, 0), dtype=np.int64),
        multi_ids_V=rng.integers(0, multi_limits[owner])
        if len(owner)
        else np.zeros(0, dtype=np.int64),
        multi_lengths_NM=multi_lengths,
    )


Episode = tuple[int, int, list[object]]


def episodes_of_rows(rows: Rows) -> list[Episode]:
    """Each episode as (task, support rows, rows as plain lists), by loops over scalars."""
    label, dense = rows.label_N.tolist(), rows.dense_NK.tolist()
    single, values = rows.ids_NF.tolist(), rows.multi_ids_V.tolist()
    lengths = rows.multi_lengths_NM.tolist()
    found: list[Episode] = []
    row, value = 0, 0
    for task, length, support in zip(
        rows.task_T, rows.row_lengths_T, rows.support_lengths_T, strict=True
    ):
        lines: list[object] = []
        for _ in range(length):
            lists = []
            for count in lengths[row]:
                lists.append(values[value : value + count])
                value += count
            lines.append((label[row], dense[row], single[row], lists))
            row += 1
        found.append((int(task), int(support), lines))
    return found


def episodes_of_batch(batch: TaskBatch) -> list[Episode]:
    """The same of a batch, following its positions to the ids one by one."""
    ids, label, dense = batch.unique_ids_U.tolist(), batch.label_N.tolist(), batch.dense_NK.tolist()
    positions, multi_positions = batch.positions_NF.tolist(), batch.multi_positions_V.tolist()
    lengths, offsets = batch.multi_lengths_NM.tolist(), batch.row_offsets_T1.tolist()
    support = batch.support_lengths_T.tolist()
    found: list[Episode] = []
    value = 0
    for episode, task in enumerate(batch.task_T.tolist()):
        lines: list[object] = []
        for row in range(offsets[episode], offsets[episode + 1]):
            lists = []
            for count in lengths[row]:
                lists.append([ids[p] for p in multi_positions[value : value + count]])
                value += count
            single = [ids[p] for p in positions[row]]
            lines.append((label[row], dense[row], single, lists))
        found.append((task, support[episode], lines))
    return found


def whole_split(dataset: Dataset, split: str) -> list[Episode]:
    """All episodes in stored order."""
    with BatchReader(dataset, split, tasks_per_step=1 << 20, shuffle=False) as reader:
        return [episode for batch in reader.batches(0) for episode in episodes_of_batch(batch)]


WriteFn = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> WriteFn:
    """Writes splits of Rows as a dataset below tmp_path and returns its path."""

    def write_splits(
        splits: dict[str, Rows], features: Features = FEATURES, name: str = "data",
        bundle_tasks: int = 0, **options: object,
    ) -> str:  # fmt: skip
        out = str(tmp_path / name)
        provenance = Provenance(task="user", label="click")
        with write_dataset(out, features, provenance, **options) as writer:  # type: ignore[arg-type]
            for split, rows in splits.items():
                writer.split(split, bundle_tasks).write(rows)
        return out

    return write_splits


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    """A session of two threads and small batches, so that rows come in many orders."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # the machine's name may have no address
    builder = SparkSession.builder.master("local[2]").appName("metaio")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "4",
        "spark.driver.memory": "1g",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "97",
    }.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    yield spark
    spark.stop()
