"""Row ids: stored beside the rows through every stage, so that a row can be found again."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import xxhash

from metaio import BatchReader, Dataset, open_dataset
from metaio.errors import SchemaError
from metaio.prepare.schema.schema_file import parse_schema
from tests.metaio.conftest import whole_split
from tests.metaio.prepare.test_local import BASE, changed, prepared, raw_table
from tests.support.refusals import catch_message

ROW_ID = {"row_id": {"column": "row"}}
RANDOM = {"episodes": {**BASE["episodes"], "by": "random"}}


def numbered(num_rows: int = 600) -> pa.Table:
    """Return a raw table whose rows have ids in no order, one negative, one large."""
    ids = np.random.default_rng(3).permutation(num_rows) * 7 - 1_000
    ids[5], ids[6] = -(2**62), 2**63 - 1
    return raw_table(num_rows).append_column("row", pa.array(ids))


@pytest.mark.parametrize("compact", [False, True])
def test_each_row_of_a_batch_is_the_raw_row_of_its_id(tmp_path: Path, compact: bool) -> None:
    raw = numbered()
    dataset = prepared(tmp_path, raw, changed(**ROW_ID), compact=compact, block_rows=50)
    of_id = {row["row"]: row for row in raw.to_pylist()}
    seen: list[int] = []
    with BatchReader(dataset, "train", tasks_per_step=3, seed=1, window_blocks=4) as reader:
        for batch in reader.batches(0):
            ids = batch.row_id_N.tolist()
            for row, (task, label, price) in zip(
                ids,
                zip(
                    batch.task_T.repeat_interleave(batch.row_offsets_T1.diff()).tolist(),
                    batch.label_N.tolist(),
                    batch.dense_NK[:, 0].tolist(),
                    strict=True,
                ),
                strict=True,
            ):
                assert (of_id[row]["user"], of_id[row]["clicked"]) == (task, label)
                assert price == np.float32(np.log1p(of_id[row]["price"]))
            part = batch.tasks(1, batch.num_tasks)
            assert part.row_id_N.tolist() == ids[int(batch.row_offsets_T1[1]) :]
            seen += ids
    assert len(set(seen)) == len(seen) == dataset.split("train").num_rows


def test_ids_are_seen_by_no_model_and_change_no_episode_by_time(tmp_path: Path) -> None:
    raw = numbered()
    with_ids = prepared(tmp_path, raw, changed(**ROW_ID))
    without = prepared(tmp_path, raw, changed())
    assert whole_split(with_ids, "train") == whole_split(without, "train")
    assert (with_ids.features.row_id, without.features.row_id) == ("row", "")
    assert ids_of(without) == []


def test_a_random_order_goes_by_the_ids_whatever_columns_there_are(tmp_path: Path) -> None:
    """Without ids a feature column less is another shuffle: rows are told apart by their values."""
    raw = numbered()
    fewer = {**BASE, **ROW_ID, **RANDOM, "single": BASE["single"][:1], "dense": []}
    all_columns = prepared(tmp_path, raw, changed(**ROW_ID, **RANDOM))
    some_columns = prepared(tmp_path, raw.take(np.arange(599, -1, -1)), parse_schema(fewer))
    ids = [ids_of(one) for one in (all_columns, some_columns)]
    assert ids[0] == ids[1]
    times = dict(zip(raw["row"].to_pylist(), raw["ts"].to_pylist(), strict=True))
    in_time = [times[row] for row in ids[0]]
    assert in_time != sorted(in_time)


def test_of_text_the_hash_is_stored_as_of_tasks(tmp_path: Path) -> None:
    names = [f"r{i}" for i in range(800)]
    raw = raw_table().append_column("row", pa.array(names))
    dataset = prepared(tmp_path, raw, changed(**ROW_ID))
    hashes = {xxhash.xxh3_64_intdigest(name.encode()) for name in names}
    stored = [row % 2**64 for row in ids_of(dataset)]
    assert len(set(stored)) == len(stored)
    assert set(stored) <= hashes


def test_a_negative_has_no_raw_row(tmp_path: Path) -> None:
    positives = numbered().filter(pc.equal(raw_table(600)["clicked"], 1))
    drawn = {"negatives": {"item": "item", "per_positive": 2}}
    dataset = prepared(tmp_path, positives, changed(**ROW_ID, **drawn))
    with BatchReader(dataset, "train", tasks_per_step=1 << 20, shuffle=False) as reader:
        (batch,) = reader.batches(0)
    is_negative = batch.label_N == 0
    assert set(batch.row_id_N[is_negative].tolist()) == {-1}
    assert not set(batch.row_id_N[~is_negative].tolist()) - set(positives["row"].to_pylist())


def test_the_label_is_no_row_id() -> None:
    assert catch_message(SchemaError, changed, row_id={"column": "clicked"}) == (
        "column clicked is the label and the column of [row_id]: rows would be dealt by the "
        "answer. Name another column"
    )


def test_a_dataset_without_ids_is_the_same_bytes_as_before_there_were_any(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, raw_table(), changed())
    assert "row_id" not in (Path(dataset.url) / "manifest.json").read_text()
    assert not list(Path(dataset.url).rglob("*.row_ids.parquet"))
    assert open_dataset(dataset.url).features == dataset.features


def ids_of(dataset: Dataset) -> list[int]:
    with BatchReader(dataset, "train", tasks_per_step=1 << 20, shuffle=False) as reader:
        return [row for batch in reader.batches(0) for row in batch.row_id_N.tolist()]
