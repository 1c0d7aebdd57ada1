"""Windows that are not to be trusted are refused with their reason; what merely moves is told."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from metaio.errors import AccessError, QuarantinedError
from metaio.prepare.source import parquet_files
from metaio.stream.chain import open_stream
from metaio.stream.quarantine import list_quarantine
from tests.metaio.stream.logs import DAY, append, changed, log, schema


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
        lambda table: with_some(table, "time", 400 * DAY, 400),
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
