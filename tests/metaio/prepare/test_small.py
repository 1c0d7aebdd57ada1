"""The smallest datasets: no rows, one row, no columns of a kind, more ranks than episodes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import BatchReader, DataError, Features, open_dataset
from metaio.format.inspection import find_damage, summarise
from metaio.format.inspection_chart import draw_summaries
from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.conftest import FEATURES, WriteFn, episodes_of_rows, make_rows, whole_split
from tests.support.refusals import catch_message

ONE_ROW = make_rows(1, max_rows=1)


def without(**columns: tuple[()]) -> Features:
    """The columns of FEATURES less some kinds; tables stay, though nothing uses them."""
    return replace(FEATURES, **columns)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "features",
    [
        FEATURES, without(multi=()), without(dense=()), without(multi=(), dense=()),
        without(single=(), dense=()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("num_episodes", [1, 5])
def test_a_dataset_without_columns_of_a_kind_reads_as_it_was_written(
    write: WriteFn, features: Features, num_episodes: int
) -> None:
    rows = make_rows(num_episodes, features=features)
    path = write({"train": rows}, features=features, block_rows=3)
    assert whole_split(open_dataset(path), "train") == episodes_of_rows(rows)


def test_an_empty_split_is_read_inspected_and_drawn_beside_a_single_row(write: WriteFn) -> None:
    dataset = open_dataset(write({"train": ONE_ROW, "empty": make_rows(0)}))
    assert whole_split(dataset, "empty") == []
    assert whole_split(dataset, "train") == episodes_of_rows(ONE_ROW)
    summaries = summarise(dataset)
    assert [(each.name, each.num_rows) for each in summaries] == [("train", 1), ("empty", 0)]
    assert find_damage(dataset) == []
    assert draw_summaries(summaries, Path("sizes.png")).startswith(b"\x89PNG")


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_episode_is_one_ranks_and_the_others_are_empty(write: WriteFn, world_size: int) -> None:
    dataset = open_dataset(write({"train": ONE_ROW}))
    tasks = []
    for rank in range(world_size):
        with BatchReader(
            dataset, "train", tasks_per_step=64, rank=rank, world_size=world_size
        ) as reader:
            assert reader.num_steps() == 1
            (batch,) = reader.batches(0)
            tasks += batch.task_T.tolist()
            # Every rank joins in every table's exchange, also with nothing to ask for.
            assert len(batch.unique_lengths_B) == len(FEATURES.tables)
    assert tasks == ONE_ROW.task_T.tolist()


def test_dropping_the_last_step_of_less_than_one_leaves_none(write: WriteFn) -> None:
    dataset = open_dataset(write({"train": ONE_ROW}))
    with BatchReader(dataset, "train", tasks_per_step=2, drop_last=True) as reader:
        assert reader.num_steps() == 0
        assert list(reader.batches(0)) == []


SCHEMA = parse_schema(
    {
        "task": {"column": "user"}, "label": {"column": "click"}, "time": {"column": "at"},
        "single": [{"column": "item", "hash": 16}], "episodes": {"by": "last", "query_rows": 1},
        "splits": {"shares": {"train": 1.0}},
    }
)  # fmt: skip


def raw(num_rows: int) -> pa.Table:
    rows = np.arange(num_rows)
    return pa.table({"user": rows // 2, "item": rows, "click": rows % 2, "at": rows})


def prepared(tmp_path: Path, table: pa.Table) -> str:
    pq.write_table(table, tmp_path / "raw.parquet")
    prepare([str(tmp_path / "raw.parquet")], str(tmp_path / "out"), SCHEMA, PrepareOptions())
    return str(tmp_path / "out")


def test_two_rows_of_one_task_are_prepared_to_one_episode(tmp_path: Path) -> None:
    dataset = open_dataset(prepared(tmp_path, raw(2)))
    ((task, num_support, rows),) = whole_split(dataset, "train")
    assert (task, num_support, [row[0] for row in rows]) == (0, 1, [0.0, 1.0])  # type: ignore[index]


def test_a_single_row_is_no_episode_and_leaves_nothing(tmp_path: Path) -> None:
    assert catch_message(DataError, prepared, tmp_path, raw(1)) == (
        "the inputs make 0 episodes: 1 task with fewer rows than min_rows, 0 without support or "
        "query. Lower min_rows or query_rows under [episodes], or look into the task column"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["raw.parquet"]


def test_inputs_of_two_formats_are_refused(tmp_path: Path) -> None:
    pq.write_table(raw(4), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("user,item,click,at\n1,1,1,1\n")
    inputs = [str(tmp_path / name) for name in ("a.parquet", "b.csv")]
    assert catch_message(
        DataError, prepare, inputs, str(tmp_path / "out"), SCHEMA, PrepareOptions()
    ) == ("the inputs mix Parquet and text files. Prepare from one format at a time")
