"""Events of a stream: a returning task's rows know its rows of earlier windows."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import DataError, SchemaError
from metaio.format.inspection import find_damage
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.schema_file import parse_schema
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose
from metaio.stream.chain import open_stream
from tests.metaio.stream.logs import DAY, append, changed, episodes, log, schema
from tests.support.refusals import catch_message

DAYS, LATE = 3, 3_600


def schema_with(events: dict[str, Any], **stream: object) -> Schema:
    """The schema of the logs, with their row numbers as a number of events."""
    body = schema(late=float(LATE), **stream).to_json()
    body["dense"] = [*body["dense"], {"column": "number"}]
    return parse_schema(body | {"events": {"columns": ["item"], "dense": ["number"]} | events})


def day_log(day: int) -> pa.Table:
    """A day's rows, some of them late, of users and items who mostly return."""
    table = log(day, rows=500)
    if day:
        time = table["time"].to_numpy().copy()
        time[:40] = day * DAY - LATE // 2 - np.arange(40)
        table = changed(table, "time", time)
    table = changed(table, "user", table["user"].to_numpy() % 40)
    return table.append_column("number", table["row"].cast(pa.float64()))


def known_times(batch: TaskBatch, time_of: dict[int, int]) -> dict[int, list[int]]:
    """The times of the events that each row knows, oldest first, by the row's number."""
    starts = np.concatenate([[0], np.cumsum(batch.num_events_T.numpy())])
    task_N = np.repeat(np.arange(batch.num_tasks), batch.row_offsets_T1.diff().numpy())
    found = {}
    for row, task, before in zip(
        batch.row_id_N.tolist(), task_N, batch.events_before_N.tolist(), strict=True
    ):
        numbers = batch.event_numbers[starts[task] : starts[task] + before, 1]
        found[row] = [time_of[int(number)] for number in numbers]
    return found


@pytest.mark.parametrize(
    ("events", "rule"),
    [
        ({"longest": 0}, {}),
        ({"longest": 7, "delay": 20_000}, {}),
        # Fewer than the support rows, which know older ones, too.
        ({"longest": 2, "where": "click = 1"}, {"support": 6}),
        ({"longest": 30, "where": "click = 1", "delay": 9_000}, {"ttl": 1.5 * DAY}),
    ],
)
def test_a_returning_task_brings_its_events(
    tmp_path: Path, events: dict[str, Any], rule: dict[str, Any]
) -> None:
    stream, longest, delay = tmp_path / "s", events["longest"], events.get("delay", 0)
    past: list[dict[str, Any]] = []
    beyond_support = forgotten = 0
    for number in range(1, DAYS + 1):
        table = day_log(number - 1)
        start = append(stream, table, schema=schema_with(events, **rule), accept=True).window[0]
        least = start - rule["ttl"] if number > 1 and "ttl" in rule else 0
        kept = [row for row in past if row["time"] >= least]
        forgotten += len(past) - len(kept)
        past = kept + table.select(["user", "time", "row", "click"]).to_pylist()
        by_row = {row["row"]: row for row in past}
        time_of = {number: row["time"] for number, row in by_row.items()}
        dataset = open_stream(str(stream)).dataset(number)
        assert find_damage(dataset) == []
        compared = 0
        for split in ("train", "gate"):
            for index in range(dataset.split(split).num_blocks):
                block = dataset.read_block(split, index)
                batch = compose(dataset.features, [(block, np.arange(block.num_episodes))])
                for row, times in known_times(batch, time_of).items():
                    own = by_row[row]
                    wanted = sorted(
                        other["time"]
                        for other in past
                        if other["user"] == own["user"]
                        and other["time"] < own["time"] - delay
                        and (other["click"] or "where" not in events)
                    )
                    # More than the newest are stored where an older row knows them.
                    most = longest or max(len(wanted), 1)
                    assert times[-most:] == wanted[-most:]
                    assert times == wanted[len(wanted) - len(times) :]
                    beyond_support += number > 1 and len(times) > rule.get("support", 4)
                    compared += 1
        assert compared > 400
    assert beyond_support > 50 or longest == 2
    assert (forgotten > 0) == ("ttl" in rule)


def test_a_stream_says_where_its_delay_makes_no_sense(tmp_path: Path) -> None:
    rule = schema_with({"longest": 5, "delay": "10m"})
    message = catch_message(SchemaError, append, tmp_path / "s", day_log(0), schema=rule)
    assert message.startswith("events.delay is '10m', but column time holds numbers")


def view_log(day: int) -> pa.Table:
    """A day's events of another log: some of the days before, some of those to come, and some of
    users without a row."""
    rng = np.random.default_rng([7, day])
    days = np.clip(day + rng.integers(-1, 3, 700), 0, None)
    return pa.table(
        {
            "user": rng.integers(0, 45, 700), "item": rng.integers(0, 90, 700),
            "click": rng.integers(0, 2, 700), "number": 1e6 + 1_000 * day + np.arange(700),
            "time": days * DAY + rng.integers(0, DAY, 700),
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("events", "rule"),
    [
        ({"longest": 0}, {}),
        ({"longest": 5, "delay": 20_000}, {}),
        ({"longest": 2, "where": "click = 1"}, {"support": 6}),
        ({"longest": 30, "delay": 9_000}, {"ttl": 1.5 * DAY}),
    ],
)
def test_an_increment_takes_the_new_event_files(
    tmp_path: Path, events: dict[str, Any], rule: dict[str, Any]
) -> None:
    stream, longest, delay = tmp_path / "s", events["longest"], events.get("delay", 0)
    (tmp_path / "views").mkdir()
    own = schema_with({**events, "files": f"{tmp_path}/views/*.parquet"}, **rule)
    seen: list[dict[str, Any]] = []
    rows: dict[int, dict[str, Any]] = {}
    compared = known = 0
    for number in range(1, DAYS + 1):
        table, views = day_log(number - 1), view_log(number - 1)
        pq.write_table(views, tmp_path / "views" / f"{number}.parquet")
        record = append(stream, table, schema=own, accept=True)
        names = [one["name"] for one in record.report["inputs"]]
        assert [name.rsplit("/", 1)[-1] for name in names][1:] == [f"{number}.parquet"]
        least = record.window[0] - rule["ttl"] if number > 1 and "ttl" in rule else 0
        seen = [one for one in seen + views.to_pylist() if one["time"] >= least]
        rows |= {row["row"]: row for row in table.to_pylist()}
        time_of = {int(one["number"]): one["time"] for one in seen}
        dataset = open_stream(str(stream)).dataset(number)
        assert find_damage(dataset) == []
        for split in ("train", "gate"):
            for index in range(dataset.split(split).num_blocks):
                block = dataset.read_block(split, index)
                batch = compose(dataset.features, [(block, np.arange(block.num_episodes))])
                for row, times in known_times(batch, time_of).items():
                    wanted = sorted(
                        one["time"]
                        for one in seen
                        if one["user"] == rows[row]["user"]
                        and one["time"] < rows[row]["time"] - delay
                        and (one["click"] or "where" not in events)
                    )
                    most = longest or max(len(wanted), 1)
                    assert times[-most:] == wanted[-most:]
                    assert times == wanted[len(wanted) - len(times) :]
                    compared, known = compared + 1, known + len(times)
    assert compared > 1_000
    assert known > 2 * compared or longest == 2


def test_rows_of_a_stream_are_those_without_event_files(tmp_path: Path) -> None:
    (tmp_path / "views").mkdir()
    body = schema(late=float(LATE)).to_json()
    body["single"] = [{"column": "item", "hash": 500}, *body["single"][1:]]
    without = parse_schema(body)
    rule = {"columns": ["item"], "files": f"{tmp_path}/views", "longest": 0}
    with_events = parse_schema(body | {"events": rule})
    for number in range(1, DAYS + 1):
        pq.write_table(view_log(number - 1), tmp_path / "views" / f"{number}.parquet")
        one, other = (
            append(tmp_path / name, day_log(number - 1), schema=own, accept=True)
            for name, own in (("with", with_events), ("without", without))
        )
        assert one.num_rows == other.num_rows
        for key in ("account", "tasks", "rows"):
            assert one.report[key] == other.report[key]
        for split in ("train", "gate"):
            found = [
                episodes(open_stream(str(tmp_path / name)).dataset(number), split)
                for name in ("with", "without")
            ]
            assert found[0] == found[1]


def test_what_is_wrong_with_event_files_changes_nothing(tmp_path: Path) -> None:
    stream, views = tmp_path / "s", tmp_path / "views"
    views.mkdir()
    own = schema_with({"longest": 5, "files": str(views)})
    pq.write_table(view_log(0), views / "1.parquet")
    append(stream, day_log(0), schema=own)
    pq.write_table(view_log(0), views / "2.parquet")
    message = catch_message(DataError, append, stream, day_log(1))
    assert f"input {views}/2.parquet was taken into increment 1 already" in message
    pq.write_table(view_log(1).drop_columns(["item"]), views / "2.parquet")
    message = catch_message(DataError, append, stream, day_log(1))
    assert f"input {views}/2.parquet has no column item" in message
    assert [record.number for record in open_stream(str(stream)).records] == [1]
    pq.write_table(view_log(1), views / "2.parquet")
    assert append(stream, day_log(1)).number == 2
    # A day without an event is no mistake.
    assert append(stream, day_log(2)).number == 3
