"""Windows that are not to be trusted are refused with their reason; what merely moves is told."""

import errno
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from metaio.errors import AccessError, DataError, QuarantinedError
from metaio.prepare.source import parquet_files
from metaio.stream.chain import open_stream
from metaio.stream.quarantine import list_quarantine
from tests.metaio.stream.logs import DAY, append, changed, episodes, log, schema, slow_episodes
from tests.support.refusals import catch_message


@pytest.fixture(scope="module")
def three_days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream that has its first three increments, with which others are compared."""
    stream = tmp_path_factory.mktemp("screen") / "s"
    for day in range(3):
        append(stream, rare(log(day)), schema=schema())
    return stream


def rare(table: pa.Table) -> pa.Table:
    """Clicks are one row in ten."""
    return changed(table, "click", (table["row"].to_numpy() % 10 == 0).astype(np.int64))


def with_some(table: pa.Table, column: str, value: object, every: int) -> pa.Table:
    """The table with a value in every so many rows of a column."""
    values = table[column].to_pylist()
    values[::every] = [value] * len(values[::every])
    return changed(table, column, values)


POISON: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "few rows": (
        lambda table: table.slice(0, 15),
        "it holds 15 rows, recent increments about 400 (stream.rows_factor 20)",
    ),
    "flipped labels": (
        lambda table: changed(table, "click", 1 - table["click"].to_numpy()),
        "its labels have the mean 0.9, those of recent increments 0.1 (stream.label_shift 0.5)",
    ),
    "nulls": (
        lambda table: with_some(table, "price", None, 3),
        "column price is null in 34% of the rows, in recent increments in at most 0% "
        "(stream.null_shift 0.2)",
    ),
    "nulls where none may be": (
        lambda table: with_some(table, "city", None, 40),
        "column city has 10 nulls; none are allowed. Remove those rows, or allow it in the "
        'schema: null = "unknown"',
    ),
    "NaN": (
        lambda table: with_some(table, "price", float("nan"), 400),
        "dense column price holds nan; finite numbers are needed. Replace those values, or make "
        "them null and give fill",
    ),
    "a row id that stands twice": (
        lambda table: changed(
            changed(table, "row", [7] * len(table)), "time", [3 * DAY + 9] * len(table)
        ),
        "task ",
    ),
    "a clock that is wrong": (
        lambda table: with_some(table, "time", 400 * DAY, 8),
        "its times span 397.0 days, those of recent increments 23.9 h, and all that comes before "
        "its end would be late (stream.rows_factor 20)",
    ),
}


@pytest.mark.parametrize("name", POISON)
def test_poison_is_quarantined_with_the_reason(three_days: Path, name: str) -> None:
    make, reason = POISON[name]
    file = three_days.parent / "logs" / "poison.parquet"
    with pytest.raises(QuarantinedError) as error:
        append(three_days, make(rare(log(3))), "poison.parquet")
    message = str(error.value)
    assert message.startswith(f"input {file} is quarantined: {reason}"), message
    by_comparison = ", or pass --accept if they are right" if "recent increments" in message else ""
    assert message.endswith(f". Mend the files{by_comparison}")
    assert any(reason in note["reasons"][0] for note in list_quarantine(three_days))
    stream = open_stream(str(three_days))
    assert stream.numbers == [1, 2, 3]  # nothing else has changed
    assert sorted(p.name for p in (three_days / "state").iterdir()) == ["000002", "000003"]


def test_a_disk_that_fails_while_rows_are_read_is_no_reason_to_refuse_them(
    three_days: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch(rare(log(3)).slice(0, 9).to_pydict())
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(parquet_files, "batches", fails)
    noted = list_quarantine(three_days)
    with pytest.raises(AccessError, match="Look after the disk or the network, then try again"):
        append(three_days, rare(log(3)), "fine.parquet")
    assert list_quarantine(three_days) == noted


def test_times_of_another_unit_than_the_schema_says_are_an_alarm(tmp_path: Path) -> None:
    now_ms = 1_767_225_600_000 + log(0)["time"].to_numpy()
    record = append(tmp_path / "s", changed(log(0), "time", now_ms), schema=schema())
    assert record.report["alarms"][0] == (
        f"times such as {now_ms.max():,} look like ms since 1970, and are taken for s "
        "(stream.unit): ttl, grace and late count in it"
    )
    seconds = changed(log(1), "time", 1_767_225_600 + log(1)["time"].to_numpy())
    record = append(tmp_path / "other", seconds, schema=schema())
    assert not any("since 1970" in alarm for alarm in record.report["alarms"])


YEAR_2100 = 4_102_444_800


def test_rows_of_wrong_clocks_and_labels_are_set_aside_from_the_first_increment_on(
    tmp_path: Path,
) -> None:
    """The sum of what was read closes, whatever became of a row."""
    stream, ranges = tmp_path / "s", {"click": (0.0, 1.0)}
    for day in range(3):
        table = with_some(log(day), "click", 2, 100)
        user, time = (table[name].to_numpy().copy() for name in ("user", "time"))
        user[101:121] = 1_000 + 100 * day + np.arange(20)  # of a single row each
        table = changed(table, "user", user)
        time[7], time[8], time[9] = YEAR_2100, -1, (day + 60) * DAY
        time[10:90:2] = max(day * DAY - 1_800, 1)  # some of them late
        record = append(stream, changed(table, "time", time), schema=schema(), label_ranges=ranges)
        alarm = record.report["alarms"][0]
        assert alarm == (
            "7 of 400 rows are quarantined: label click is not from 0 to 1 (4); time time is ahead "
            "of now or of the other rows, up to 2100-01-01 00:00:00 (2); time time is below 0 (1). "
            "Mend them, and give them in a new file"
        )
        account = dict(record.report["account"])
        assert (account.pop("read"), account["quarantined"]) == (400, 7)
        assert sum(account.values()) == 400
        assert account["late"] == (40 if day else 0)
        assert account["short_tasks"] >= 20
        dataset = open_stream(str(stream)).dataset(day + 1)
        rows = {row for name in ("train", "gate") for _, *sides in episodes(dataset, name)
                for side in sides for row in side}  # fmt: skip
        own = [row for row in rows if row >= day * 100_000]
        assert len(own) >= account["train"] + account["gate"] > 300
        assert record.window[1] <= (day + 1) * DAY
    wrong = with_some(log(3), "time", YEAR_2100, 100)
    with pytest.raises(QuarantinedError, match="is quarantined: 4 of 400 rows are quarantined"):
        append(stream, wrong, strict=True)
    assert append(stream, wrong, accept=True).window[1] == YEAR_2100 + 1


@pytest.mark.parametrize("wrong", [None, math.nan, math.inf])
def test_rows_whose_label_is_no_number_are_set_aside_and_no_other(
    tmp_path: Path, wrong: float | None
) -> None:
    for day in range(2):
        click = log(day)["click"].cast(pa.float64()).to_pylist()
        click[5] = click[17] = wrong
        table = changed(log(day), "click", pa.array(click, pa.float64()))
        record = append(tmp_path / "s", table, schema=schema())
        assert record.report["alarms"][0] == (
            "2 of 400 rows are quarantined: label click is null or no number (2). "
            "Mend them, and give them in a new file"
        )
        assert dict(record.report["account"])["quarantined"] == 2


def test_a_partition_of_a_wrong_clock_or_of_wrong_labels_alone_is_quarantined(
    tmp_path: Path,
) -> None:
    stream = tmp_path / "s"
    ahead = changed(log(0), "time", log(0)["time"].to_numpy() + YEAR_2100)
    with pytest.raises(QuarantinedError, match="400 of 400 rows are quarantined: time time is ah"):
        append(stream, ahead, schema=schema())
    append(stream, log(0), "0.parquet", schema=schema())
    for name, table in {
        "ahead": ahead,
        "ms": changed(log(1), "time", (YEAR_2100 // 2 + log(1)["time"].to_numpy()) * 1_000),
        "two": changed(log(1), "click", [2] * 400),
    }.items():
        with pytest.raises(QuarantinedError, match="400 of 400 rows are quarantined"):
            append(stream, table, f"{name}.parquet", label_ranges={"click": (0.0, 1.0)})
    assert append(stream, log(1)).number == 2


def test_a_window_that_was_moved_ahead_is_set_back(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    append(stream, log(0), schema=schema())
    time = log(1)["time"].to_numpy().copy()
    time[-1] = 9 * DAY
    moved = append(stream, changed(log(1), "time", time), accept=True)
    with pytest.raises(QuarantinedError, match="all of its 400 rows are from before the window"):
        append(stream, log(2))
    for begin in (str(moved.window[1]), str(2**40)):
        message = catch_message(DataError, append, stream, log(2), begin=begin)
        assert message == (
            f"--begin is {begin}; the window begins at 777,601, and can only be set back. Give an "
            "earlier time, or leave --begin out"
        )
    with pytest.raises(DataError, match=f"--begin is '{10**30}', which is no value"):
        append(stream, log(2), begin=str(10**30))
    record = append(stream, log(2), begin="1970-01-03 00:00:00")
    assert record.window[0] == 2 * DAY
    assert list_quarantine(stream) == []
    dataset = open_stream(str(stream)).dataset(3)
    found = episodes(dataset, "train") | episodes(dataset, "gate")
    slow = slow_episodes([log(0), log(1).slice(0, 399), log(2)], 2 * DAY)
    assert {(task, query) for task, _, query in found} == {(task, q) for task, _, q in slow}
    # No support row is newer than a query row.
    assert not [support for _, support, _ in found if 100_399 in support]


def test_an_ordinary_window_and_an_accepted_one_are_taken(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    for day in range(4):
        append(stream, rare(log(day)), schema=schema())
    flipped = changed(rare(log(4)), "click", 1 - rare(log(4))["click"].to_numpy())
    with pytest.raises(QuarantinedError, match="its labels have the mean"):
        append(stream, flipped, "x.parquet")
    assert len(list_quarantine(stream)) == 1
    assert append(stream, flipped, "x.parquet", accept=True).number == 5
    assert list_quarantine(stream) == []


def test_a_dense_column_that_drifts_alarms_and_keeps_its_moments(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    first = append(stream, log(0), schema=schema())
    assert not [line for line in first.report["alarms"] if "price" in line]
    moved = changed(log(1), "price", log(1)["price"].to_numpy() + 6.0)
    report = append(stream, moved).report
    assert report["drift"]["price"]["shift"] == pytest.approx(3.0, abs=0.4)
    assert report["drift"]["price"]["width"] == pytest.approx(1.0, abs=0.2)
    assert any(line.startswith("dense column price has moved by +") for line in report["alarms"])
    moments = [open_stream(str(stream)).dataset(one).manifest.recipe["moments"] for one in (1, 2)]
    assert moments[0] == moments[1]


def test_tables_that_fill_up_and_floods_of_ids_raise_alarms(tmp_path: Path) -> None:
    report = append(tmp_path / "s", log(0), schema=schema(max_new_rows=13)).report
    assert report["tables"]["item"]["new"] == 13
    waiting = report["tables"]["item"]["waiting"]
    assert waiting > 20
    assert report["alarms"][:2] == [
        "table item holds 14 of 16 rows: it grows soon",
        f"{waiting} new values of table item wait for rows (stream.max_new_rows 13)",
    ]
