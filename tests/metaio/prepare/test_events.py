"""Events of a task: what a row knows of them is what was known at its time, and nothing later."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import DataError, SchemaError, open_dataset
from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import parse_schema
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose

NUM_ROWS, NUM_USERS = 1_500, 40


def log(seed: int = 0) -> dict[str, np.ndarray]:
    """A log whose row numbers are a dense column, so that each stored row can be found again."""
    rng = np.random.default_rng(seed)
    return {
        "user": rng.integers(0, NUM_USERS, NUM_ROWS),
        "item": rng.integers(1, 90, NUM_ROWS),
        "kind": rng.integers(1, 6, NUM_ROWS),
        "number": np.arange(NUM_ROWS, dtype=np.float64),
        "click": rng.integers(0, 2, NUM_ROWS),
        # Few moments: many rows share one.
        "time": rng.integers(0, 400, NUM_ROWS),
    }


def schema(**changes: Any) -> dict[str, Any]:
    return {
        "task": {"column": "user"},
        "label": {"column": "click"},
        "time": {"column": "time"},
        "single": [
            {"column": "item", "vocabulary": 1},
            # A hash of so many rows keeps each value's row its own here.
            {"column": "kind", "vocabulary": 1},
        ],
        "dense": [{"column": "number"}],
        "episodes": {"by": "last", "query_rows": 3, "min_rows": 5, "max_rows": 60},
        "events": {"columns": ["kind", "item"], "dense": ["number"], "longest": 0},
        **changes,
    }


def prepared(folder: Path, columns: dict[str, Any], body: dict[str, Any], **options: Any) -> str:
    folder.mkdir(exist_ok=True)
    source, out = folder / "log.parquet", str(folder / "data")
    pq.write_table(pa.table(columns), source)
    prepare([str(source)], out, parse_schema(body), PrepareOptions(overwrite=True, **options))
    return out


class StoredRow(NamedTuple):
    """A row, and the numbers and items of the events that it knows, oldest first."""

    number: int
    events: list[int]
    items: list[int]


def stored_rows(batch: TaskBatch) -> list[StoredRow]:
    starts, found = np.concatenate([[0], np.cumsum(batch.num_events_T.numpy())]), []
    ids = batch.unique_ids_U[batch.event_positions.long()].numpy()
    for task in range(batch.num_tasks):
        first, stop = batch.row_offsets_T1[task : task + 2].tolist()
        for row in range(first, stop):
            known = slice(starts[task], starts[task] + int(batch.events_before_N[row]))
            found.append(
                StoredRow(
                    round(float(batch.dense_NK[row, 0])),
                    batch.event_numbers[known, 1].round().int().tolist(),
                    ids[known, -1].tolist(),
                )
            )
    return found


def rows_of(path: str, split: str = "train") -> list[StoredRow]:
    dataset, found = open_dataset(path), []
    for index in range(dataset.split(split).num_blocks):
        block = dataset.read_block(split, index)
        # In parts, and as a whole.
        episodes = np.arange(block.num_episodes)
        whole = stored_rows(compose(dataset.features, [(block, episodes)]))
        halves = [
            compose(dataset.features, [(block, part)]) for part in (episodes[::2], episodes[1::2])
        ]
        of_halves = sorted(row for half in halves for row in stored_rows(half))
        assert sorted(whole) == of_halves
        found += whole
    return found


def known_to(
    columns: dict[str, np.ndarray], number: int, where: np.ndarray, delay: int
) -> set[int]:
    """The rows that a row of this number knows, one by one."""
    mine = {
        other
        for other in range(NUM_ROWS)
        if columns["user"][other] == columns["user"][number]
        and columns["time"][other] < columns["time"][number] - delay
        and where[other]
    }
    return mine


@pytest.mark.parametrize(
    ("rule", "delay", "only_clicks", "options"),
    [
        ({}, 0, False, {}),
        ({"where": "click = 1 and number >= 0"}, 0, True, {"compact": True}),
        ({"delay": 25}, 25, False, {"bundle_tasks": 3}),
        ({"where": "click = 1", "delay": 7}, 7, True, {"block_rows": 100}),
    ],
)
def test_a_row_knows_the_earlier_rows_of_its_task_and_no_other(
    tmp_path: Path, rule: dict[str, Any], delay: int, only_clicks: bool, options: dict[str, Any]
) -> None:
    columns = log()
    body = schema()
    body["events"] |= rule
    where = columns["click"] == 1 if only_clicks else np.ones(NUM_ROWS, np.bool_)
    path = prepared(tmp_path, columns, body, **options)
    rows = rows_of(path)
    assert len(rows) > NUM_ROWS // 2
    vocabulary = pq.read_table(f"{path}/vocabulary/item.parquet")["value"].to_numpy()
    for row in rows:
        assert set(row.events) == known_to(columns, row.number, where, delay)
        times = columns["time"][row.events]
        assert (np.diff(times) >= 0).all()
        assert (
            vocabulary[np.array(row.items, int) - 1].tolist()
            == columns["item"][row.events].tolist()
        )


def test_the_newest_are_kept_before_each_row_and_stored_once(tmp_path: Path) -> None:
    columns, body = log(), schema()
    body["events"]["longest"] = 4
    path = prepared(tmp_path, columns, body)
    everything = np.ones(NUM_ROWS, np.bool_)
    for row in rows_of(path):
        all_known = known_to(columns, row.number, everything, 0)
        newest = sorted(all_known, key=lambda other: columns["time"][other])[-4:]
        assert len(row.events) >= len(newest)
        # Of equal times any may be the last.
        kept, wanted = columns["time"][row.events[-4:]], columns["time"][newest]
        assert kept.tolist() == wanted.tolist()
    dataset = open_dataset(path)
    block = dataset.read_block("train", 0)
    assert len(block.event_numbers) == block.num_events_T.sum() < block.num_rows * 4


def test_nothing_of_the_future_changes_what_a_row_knows(tmp_path: Path) -> None:
    columns = log()
    before = rows_of(prepared(tmp_path / "a", columns, schema()))
    moment = 200
    later = np.flatnonzero(columns["time"] >= moment)
    shuffled = {**columns, "item": columns["item"].copy(), "kind": columns["kind"].copy()}
    order = np.random.default_rng(1).permutation(later)
    for name in ("item", "kind"):
        shuffled[name][later] = columns[name][order]
    after = {row.number: row for row in rows_of(prepared(tmp_path / "b", shuffled, schema()))}
    compared = 0
    for row in before:
        if columns["time"][row.number] <= moment:
            assert after[row.number].events == row.events
            compared += 1
    assert compared > 100


def test_windows_of_time_know_what_came_before_them(tmp_path: Path) -> None:
    columns = log()
    body = schema(
        splits={"by_time": {"train": 0.6, "valid": 0.2, "test": 0.2}, "new_tasks": "drop"}
    )
    path = prepared(tmp_path, columns, body)
    everything = np.ones(NUM_ROWS, np.bool_)
    for split in ("train", "test"):
        rows = rows_of(path, split)
        assert rows
        for row in rows:
            assert set(row.events) == known_to(columns, row.number, everything, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"membership": {"column": "side"}},
        {"membership": {"column": "side"}, "splits": {"column": "split"}},
        {"membership": {"column": "side"}, "negatives": {"item": "item", "per_positive": 2}},
        {"splits": {"by_time": {"train": 0.7, "test": 0.3}}},
        {"negatives": {"item": "item", "columns": ["kind"], "per_positive": 2}},
        {"episodes": {"by": "random", "query_rows": 3, "min_rows": 5, "max_rows": 60}},
    ],
)
def test_no_side_split_or_draw_shows_a_row_what_comes_later(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    columns, rng = dict(log()), np.random.default_rng(4)
    # Support rows may be newer than query rows.
    columns["side"] = np.array(["support", "query"])[rng.integers(0, 2, NUM_ROWS)]
    columns["split"] = np.array(["train", "test"])[columns["user"] % 2]
    path = prepared(tmp_path, columns, schema(**changes))
    everything, compared = np.ones(NUM_ROWS, np.bool_), 0
    for split in open_dataset(path).manifest.splits:
        for row in rows_of(path, split):
            assert set(row.events) == known_to(columns, row.number, everything, 0)
            compared += len(row.events) > 0
    assert compared > 500


def test_negatives_know_what_their_positive_knows(tmp_path: Path) -> None:
    columns = log()
    body = schema(negatives={"item": "item", "columns": ["kind"], "per_positive": 2})
    by_number: dict[int, list[StoredRow]] = {}
    for row in rows_of(prepared(tmp_path, columns, body)):
        by_number.setdefault(row.number, []).append(row)
    clicked = [rows for rows in by_number.values() if columns["click"][rows[0].number]]
    assert {len(rows) for rows in clicked} == {3}
    assert all(row.events == rows[0].events for rows in clicked for row in rows)


@pytest.mark.parametrize("kind", ["timestamp", "date", "float"])
def test_seconds_are_since_the_first_event(tmp_path: Path, kind: str) -> None:
    columns, body = dict(log()), schema()
    hours = columns["time"]
    values: dict[str, Any] = {
        "timestamp": pa.array(hours * 3_600 * 10**6, pa.timestamp("us")),
        "date": pa.array(hours.astype(np.int32), pa.date32()),
        "float": pa.array(hours / 4.0),
    }
    per_hour = {"timestamp": 3_600.0, "date": 86_400.0, "float": 0.25}[kind]
    body["events"]["delay"] = {"timestamp": "2h", "date": "2d", "float": 0}[kind]
    path = prepared(tmp_path, {**columns, "time": values[kind]}, body)
    delay = 0 if kind == "float" else 2
    everything = np.ones(NUM_ROWS, np.bool_)
    for row in rows_of(path):
        assert set(row.events) == known_to(columns, row.number, everything, delay)
    block = open_dataset(path).read_block("train", 0)
    first = 0
    for count in block.num_events_T.tolist():
        own = block.event_numbers[first : first + count]
        wanted = hours[own[:, 1].round().astype(int)]
        np.testing.assert_allclose(own[:, 0], (wanted - wanted[:1]) * per_hour, rtol=1e-6)
        first += count


def test_a_dataset_without_events_is_as_it_was(tmp_path: Path) -> None:
    columns, body = log(), schema()
    with_events = prepared(tmp_path / "a", columns, body)
    del body["events"]
    without = prepared(tmp_path / "b", columns, body)
    assert not list(Path(without).rglob("*.events.parquet"))
    one, other = (open_dataset(path).read_block("train", 0) for path in (with_events, without))
    for name in ("label_N", "dense_NK", "positions_NF", "row_offsets_T1", "support_lengths_T"):
        if name != "positions_NF":
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize(
    ("events", "more", "message"),
    [
        ({"columns": []}, {}, "events.columns is empty"),
        ({"columns": ["nothing"]}, {}, "events.columns names nothing"),
        ({"columns": ["item", "item"]}, {}, "each once"),
        ({"columns": ["item"], "dense": ["item"]}, {}, "events.dense names item"),
        ({"columns": ["item"], "where": "click is 1"}, {}, "events.where has 'click is 1'"),
        ({"columns": ["item"], "delay": "ten"}, {}, "events.delay is 'ten'"),
        ({"columns": ["item"], "delay": -1}, {}, "below 0 a row would know its own events"),
        ({"columns": ["item"]}, {"time": None}, "has no [time] column"),
    ],
)
def test_what_events_cannot_be_is_said(
    events: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    body = {**schema(events=events), **more}
    with pytest.raises(SchemaError) as caught:
        parse_schema({key: value for key, value in body.items() if value is not None})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ({"delay": "10m"}, "holds numbers, whose unit is not known"),
        ({"where": "click = 'yes'"}, "compares column click"),
        ({"where": "absent = 1"}, "absent"),
    ],
)
def test_what_the_log_cannot_give_is_said(
    tmp_path: Path, events: dict[str, Any], message: str
) -> None:
    body = schema()
    body["events"] |= events
    with pytest.raises((SchemaError, DataError)) as caught:
        prepared(tmp_path, log(), body)
    assert message in str(caught.value)


def test_a_damaged_count_of_known_events_is_found(tmp_path: Path) -> None:
    from metaio.errors import FormatError
    from metaio.format.decode import check_counts

    dataset = open_dataset(prepared(tmp_path, log(), schema()))
    block = dataset.read_block("train", 0)
    before_N = block.events_before_N.copy()
    before_N[-1] = 10_000
    sizes = block.num_episodes, block.num_rows, len(block.multi_positions_V)
    check_counts("here", dataset.features, block, *sizes)
    with pytest.raises(FormatError, match="events_before"):
        check_counts("here", dataset.features, replace(block, events_before_N=before_N), *sizes)
