"""Rows of an old partition, which come late or again, are an increment of their own."""

import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import DataError
from metaio.prepare.schema.schema_file import parse_schema
from metaio.stream.chain import open_stream
from metaio.stream.extend import extend
from metaio.stream.quarantine import list_quarantine
from metaio.stream.stream_state import load_state
from tests.metaio.stream.logs import OPTIONS, append, episodes, log, schema, slow_episodes
from tests.metaio.stream.test_kill import in_a_process
from tests.support.refusals import catch_message


def halves(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Rows of all users and times, dealt to two files."""
    is_first = np.random.default_rng(3).random(len(table)) < 0.5
    return table.filter(pa.array(is_first)), table.filter(pa.array(~is_first))


def test_an_old_partition_is_learnt_once_and_in_its_own_time(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    early, late = halves(log(1))
    for name, table in (("0", log(0)), ("1", early), ("2", log(2))):
        append(stream, table, f"{name}.parquet", schema=schema())
    before = load_state(stream, 3)
    record = append(stream, late, "1-late.parquet", backfill=True)
    times = late["time"].to_numpy()
    assert record.window == (times.min(), times.max() + 1)
    assert (record.report["rows"], record.report["backfill"], record.report["late"]) == (
        *(len(late), 0, 0),
    )
    time_of = {
        row: time
        for table in (log(0), early, late, log(2))
        for row, time in zip(table["row"].to_pylist(), table["time"].to_pylist(), strict=True)
    }
    dataset, own = open_stream(str(stream)).dataset(4), {*late["row"].to_pylist()}
    found = episodes(dataset, "train") | episodes(dataset, "gate")
    assert len(found) > 10
    num_returning = 0
    for _, support, query in found:
        assert {*query} <= own
        # What the stream keeps of a task from before that time, nothing from behind it; without
        # any the task is cut as a new one.
        num_returning += not {*support} & own
        assert all(row in own or time_of[row] < record.window[0] for row in support)
    assert num_returning > 0
    learnt = [row for _, support, query in found for row in (*support, *query) if row in own]
    assert len(learnt) == len({*learnt})
    # The next window begins where it would have, and its support knows the rows by their time.
    state = load_state(stream, 4)
    assert (state.end, state.windows) == (before.end, before.windows)
    follows = append(stream, log(3), "3.parquet")
    assert follows.window[0] == before.end
    newest = open_stream(str(stream)).dataset(5)
    tables = [log(0), early, late, log(2), log(3)]
    found = episodes(newest, "train") | episodes(newest, "gate")
    assert found == slow_episodes(tables, follows.window[0])


def test_a_rewritten_partition_gives_only_what_is_new(tmp_path: Path) -> None:
    stream, table = tmp_path / "s", log(1)
    first, rest = halves(table)
    append(stream, log(0), "0.parquet", schema=schema())
    append(stream, first, "1.parquet")
    append(stream, log(2), "2.parquet")
    # The same file, which by now has all rows of its day.
    with pytest.raises(DataError, match="it was rewritten since, and increments do not change"):
        append(stream, table, "1.parquet")
    record = append(stream, table, "1.parquet", backfill=True)
    account = record.report["account"]
    assert (record.report["rows"], account["known"]) == (len(rest), len(first))
    assert account.pop("read") == sum(account.values()) == 400
    own = {*rest["row"].to_pylist()}
    dataset = open_stream(str(stream)).dataset(4)
    for split in ("train", "gate"):
        for _, support, query in episodes(dataset, split):
            assert {*query} <= own
            assert not {*support} & {*log(2)["row"].to_pylist(), *first["row"].to_pylist()}
    # Once: by its bytes, and by its rows.
    message = catch_message(DataError, append, stream, table, "1.parquet", backfill=True)
    assert "was taken into increment 4 already" in message
    # Rows of no episode were not learnt, and are too few again.
    again = table.take(np.arange(400)[::-1])
    with pytest.raises(DataError, match=r"--backfill was given .*again.parquet: .* Mend the files"):
        append(stream, again, "again.parquet", backfill=True)
    found = episodes(dataset, "train") | episodes(dataset, "gate")
    learnt = {row for _, support, query in found for row in (*support, *query)}
    again = table.filter(pa.array([row in learnt for row in table["row"].to_pylist()]))
    assert catch_message(DataError, append, stream, again, "again.parquet", backfill=True) == (
        f"--backfill was given {tmp_path}/logs/again.parquet, of whose {len(again)} rows the "
        "stream has all: there is nothing to learn. Leave them out"
    )
    assert list_quarantine(stream) == []


def test_what_is_no_old_partition_is_said(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    place = f"--backfill of {stream} "
    assert catch_message(
        DataError, append, stream, log(1), "1.parquet", schema=schema(), backfill=True
    ) == (f"{place}is the first increment, which takes rows of any time. Leave it out")
    end = append(stream, log(1), "1.parquet", schema=schema()).window[1]
    both = pa.concat_tables([log(0), log(2)])
    newest = both["time"].to_numpy().max()
    assert catch_message(DataError, append, stream, both, "2.parquet", backfill=True) == (
        f"--backfill was given rows up to {newest:,}; the next window begins at {end:,}, and only "
        "older ones are allowed. Give newer files without it"
    )
    for other in ({"begin": "1"}, {"along": ["x"]}):
        with pytest.raises(DataError, match="increment of their own, and the window stays"):
            append(stream, log(0), "0.parquet", backfill=True, **other)
    body = schema().to_json()
    for root, change, why in (
        ("a", {"row_id": None}, "needs [row_id], by which rows that the stream has are known."),
        ("b", {"label": {"column": "click", "matures": "1h"}}, "is not for labels that mature:"),
        ("c", {"events": {"columns": ["item"]}}, "is not for [events]:"),
    ):
        own = {name: part for name, part in {**body, **change}.items() if part is not None}
        append(tmp_path / root, log(1), f"{root}.parquet", schema=parse_schema(own))
        told = catch_message(
            DataError, append, tmp_path / root, log(0), f"{root}0.parquet", backfill=True
        )
        assert told.startswith(f"--backfill of {tmp_path / root} {why}")


def test_a_killed_backfill_is_taken_once(tmp_path: Path) -> None:
    stream, file = tmp_path / "s", tmp_path / "logs" / "1.parquet"
    append(stream, log(0, rows=150), "0.parquet", schema=schema())
    append(stream, log(2, rows=150), "2.parquet")
    pq.write_table(log(1, rows=150), file)
    for point in (12, 30):
        assert in_a_process(stream, file, point, {"backfill": True}) == -signal.SIGKILL
        assert open_stream(str(stream)).numbers in ([1, 2], [1, 2, 3])
    if open_stream(str(stream)).numbers == [1, 2]:
        extend([str(file)], str(stream), None, OPTIONS, backfill=True)
    assert open_stream(str(stream)).newest.report["rows"] == 150
    assert not [name for name in os.listdir(stream / "increments") if name.startswith(".")]
