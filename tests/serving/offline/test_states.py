"""Tables of tasks: each adapts as alone, whatever stands beside it; streams cut between tasks."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import gmeta
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.errors import UserError
from gmeta.serving import task_matching as tasks
from gmeta.serving.offline.adapt_rows import STATE_COLUMNS
from gmeta.serving.offline.states import adapt_partition, adapt_tasks, group_tasks
from gmeta.serving.served_model import ServedModel
from tests.support.exported import random_rows, write_random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("offline") / "model"
    algorithm = AlgorithmConfig(inner_steps=1, inner_lr=0.3, adapt_embeddings=True)
    write_random_model(out, algorithm=algorithm)
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> ServedModel:
    return gmeta.load(folder)


def of_task(rows: pa.Table, task: object) -> pa.Table:
    return rows.filter(pa.compute.equal(rows["user"], task))


def assert_as_alone(model: ServedModel, states: pa.Table, support: pa.Table) -> None:
    """Each task's state against the task adapted by its rows alone."""
    assert tuple(states.column_names) == STATE_COLUMNS
    query = random_rows(4, seed=9)
    tasks_of = set(support["user"].to_pylist())
    assert sorted(states["task"].to_pylist()) == sorted(tasks_of)
    for row in states.to_pylist():
        mine = of_task(support, row["task"])
        assert row["rows"] == mine.num_rows
        expected = model.adapt(mine).predict(query)
        found = model.task(row["state"]).predict(query)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch_rows", [8_192, 20])
def test_tasks_adapt_as_alone_in_the_order_in_which_they_appear(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, batch_rows: int
) -> None:
    monkeypatch.setattr(tasks, "_BATCH_ROWS", batch_rows)
    support = random_rows(60, seed=1, num_tasks=9)
    states = adapt_tasks(model, support)
    assert states["task"].to_pylist() == list(dict.fromkeys(support["user"].to_pylist()))
    assert_as_alone(model, states, support)


def test_tasks_may_be_named_by_text(model: ServedModel) -> None:
    support = random_rows(20, seed=2, num_tasks=3)
    names = pa.array([f"user {user}" for user in support["user"].to_pylist()])
    support = support.set_column(0, "user", names)
    states = adapt_tasks(model, support)
    assert states.schema.field("task").type == pa.string()
    assert_as_alone(model, states, support)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 5, 0, 2, 9, 1), (30,), (2, 40, 2)])
@pytest.mark.parametrize("part_rows", [1, 4, 100])
@pytest.mark.parametrize("chunk_rows", [1, 6, 1_000])
def test_streams_are_cut_at_tasks(sizes: tuple[int, ...], part_rows: int, chunk_rows: int) -> None:
    task_N = np.repeat(np.arange(len(sizes)), sizes)
    rows = pa.table({"user": task_N, "place": np.arange(len(task_N))})
    parts = (rows.slice(first, part_rows) for first in range(0, len(task_N), part_rows))
    chunks = list(group_tasks(parts, "user", chunk_rows))
    assert pa.concat_tables(chunks).equals(rows)
    of_chunk = [set(chunk["user"].to_pylist()) for chunk in chunks]
    assert sum(map(len, of_chunk)) == len(set().union(*of_chunk))
    # No larger than asked for by more than a part and a task.
    assert all(chunk.num_rows < chunk_rows + part_rows + max(sizes) for chunk in chunks)


def test_a_task_that_is_too_long_to_solve_is_named(tmp_path: Path) -> None:
    write_random_model(tmp_path, algorithm=AlgorithmConfig("ridge", inner_lr=0.3))
    support = pa.concat_tables([random_rows(20, seed=1, num_tasks=3), random_rows(2_050)])
    users = [f"user {user}" for user in support["user"].to_pylist()[:20]] + ["bot"] * 2_050
    with pytest.raises(UserError) as error:
        adapt_tasks(gmeta.load(tmp_path), support.set_column(0, "user", pa.array(users)))
    assert str(error.value) == (
        "task 'bot' has 2,050 support rows; ridge, which solves for as many unknowns, takes at "
        "most 2,048. Keep the newest of them"
    )


def test_a_partition_of_spark_gives_a_row_a_task(folder: Path, model: ServedModel) -> None:
    support = random_rows(40, seed=3, num_tasks=6).sort_by("user")
    function = adapt_partition(folder)
    # Spark's batches end where they do, also within a task.
    batches = support.combine_chunks().to_batches(max_chunksize=7)
    found = list(function(iter(batches)))
    assert all(isinstance(batch, pa.RecordBatch) for batch in found)
    assert_as_alone(model, pa.Table.from_batches(found), support)
    assert list(function(iter([]))) == []
    with pytest.raises(UserError, match="have no column click"):
        list(function(iter(support.drop_columns(["click"]).to_batches())))


def test_a_partition_of_pandas_gives_pandas(folder: Path, model: ServedModel) -> None:
    pandas = pytest.importorskip("pandas", reason="mapInPandas needs pandas")
    support = random_rows(40, seed=3, num_tasks=6).sort_by("user")
    frames = [support.slice(first, 7).to_pandas() for first in range(0, 40, 7)]
    found = pandas.concat(list(adapt_partition(folder)(iter(frames))))
    assert_as_alone(model, pa.table(found.reset_index(drop=True)), support)


def test_spark_adapts_partitions(folder: Path, model: ServedModel, tmp_path: Path) -> None:
    sql = pytest.importorskip("pyspark.sql", reason="needs the extra spark")
    support = random_rows(40, seed=3, num_tasks=6)
    pq.write_table(support, tmp_path / "support.parquet")
    session = sql.SparkSession.builder.master("local[2]").getOrCreate()
    try:
        rows = session.read.parquet(str(tmp_path / "support.parquet"))
        rows = rows.repartition(2, "user").sortWithinPartitions("user")
        schema = "task long, state binary, rows long"
        found = rows.mapInPandas(adapt_partition(folder), schema).toPandas()
    finally:
        session.stop()
    assert_as_alone(model, pa.table(found), support)
