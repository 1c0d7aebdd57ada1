"""Columns that a stream's files lack, or hold in another type."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from metaio import DataError
from metaio.errors import QuarantinedError
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.schema_file import parse_schema
from metaio.stream.chain import IncrementRecord, open_stream
from metaio.stream.extend import extend
from metaio.stream.quarantine import list_quarantine
from tests.metaio.stream.changing import NARROW, cast, filling, written
from tests.metaio.stream.logs import OPTIONS, append, changed, log, schema
from tests.support.refusals import catch_message

Write = Callable[[pa.Table, Path], None]


def write_json(table: pa.Table, place: Path) -> None:
    """JSON lines without the keys that are null."""
    rows = [{name: x for name, x in row.items() if x is not None} for row in table.to_pylist()]
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))


WAYS: dict[str, Write] = {
    "parquet": lambda table, place: pq.write_table(table, place),
    "csv": lambda table, place: pa.csv.write_csv(table, place),
    "jsonl": write_json,
}


def give(root: Path, own: Schema | None, kind: str, **files: pa.Table) -> IncrementRecord:
    """Make tables files of a kind, and these the next increment of `root`/s."""
    logs = root / "logs"
    logs.mkdir(exist_ok=True, parents=True)
    for name, table in files.items():
        WAYS[kind](table, logs / f"{name}.{kind}")
    names = [str(logs / f"{name}.{kind}") for name in files]
    return extend(names, str(root / "s"), own, OPTIONS)


def all_null(table: pa.Table, *columns: str) -> pa.Table:
    for name in columns:
        table = changed(table, name, pa.nulls(len(table), table.schema.field(name).type))
    return table


@pytest.mark.parametrize("kind", WAYS)
def test_a_file_that_lacks_columns_is_taken_as_if_all_were_null(tmp_path: Path, kind: str) -> None:
    lost = ["item", "tags", "price"]
    for root, second in (("lacking", log(1).drop_columns(lost)), ("null", all_null(log(1), *lost))):
        give(tmp_path / root, filling(), kind, a=log(0))
        # Beside a file that has them, and comes first or not; then alone.
        both = {"b": second, "c": log(2)}
        order = "bc" if root == "lacking" else "cb"
        give(tmp_path / root, None, kind, **{name: both[name] for name in order})
        record = give(tmp_path / root, None, kind, d=log(3).drop_columns(["city"]))
        assert record.report["missing_columns"] == {"city": 400}
        assert (
            "column city is missing in files of 400 rows, which have its null"
            in (record.report["alarms"])
        )
    lacking, null = (open_stream(str(tmp_path / root / "s")) for root in ("lacking", "null"))
    assert written(lacking.dataset(2)) == written(null.dataset(2))
    assert written(lacking.dataset(3)) == written(null.dataset(3))
    assert "missing_columns" not in null.record(2).report
    expected = {} if kind == "jsonl" else {"item": 400, "tags": 400, "price": 400}
    # Of JSON lines only all files together lack a column: each key may be left out.
    assert lacking.record(2).report.get("missing_columns", {}) == expected


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_types_that_a_schema_declares_do_not_ask_for_a_column(tmp_path: Path, kind: str) -> None:
    body = filling().to_json() | {"text": {"bad_lines": "skip"}}
    body["single"][1]["type"] = "text"
    give(tmp_path, parse_schema(body), kind, a=log(0))
    record = give(tmp_path, None, kind, b=log(1).drop_columns(["city", "age"]), c=log(2))
    assert record.report["missing_columns"] == {"city": 400, "age": 400}


def test_the_screen_does_not_take_a_filled_column_for_nulls(tmp_path: Path) -> None:
    own = filling(screen_after=2)
    for day in range(2):
        append(tmp_path / "s", log(day), schema=own)
    with pytest.raises(QuarantinedError, match="column city is null in 100% of the rows"):
        append(tmp_path / "s", all_null(log(2), "city"))
    assert append(tmp_path / "s", log(2).drop_columns(["city"])).number == 3
    # Nor are nulls usual from then on.
    with pytest.raises(QuarantinedError, match="column city is null in 100% of the rows"):
        append(tmp_path / "s", all_null(log(3), "city"))


@pytest.mark.parametrize("column", ["click", "user", "time", "row", "item"])
def test_a_column_without_a_null_is_not_filled(tmp_path: Path, column: str) -> None:
    # What decides where a row belongs has none; an input has one only where the schema says so.
    body = filling().to_json()
    body["single"][0].pop("null")
    append(tmp_path / "s", log(0), schema=parse_schema(body))
    given = log(1).drop_columns([column])
    message = catch_message(QuarantinedError, append, tmp_path / "s", given, "b.parquet")
    assert f"/b.parquet has no column {column}; " in message
    assert 'Correct the schema, or say what its null is: null = "unknown", or fill' in message


def test_a_stream_that_stops_sets_nothing_aside(tmp_path: Path) -> None:
    stream, logs = tmp_path / "s", tmp_path / "logs"
    append(stream, log(0), schema=schema(missing="stop"))
    given = log(1).drop_columns(["city"])
    with pytest.raises(DataError) as error:
        append(stream, given, "b.parquet")
    assert not isinstance(error.value, QuarantinedError)
    assert str(error.value) == (
        f"input {logs}/b.parquet has no column city; it has row, user, click, time, item, age, "
        "tags, price. Correct the schema. The stream stops at it: [stream] missing of its schema "
        "is 'stop'"
    )
    # Nor is it left out where it only comes along, or beside others.
    for how in ({"along": [str(logs / "b.parquet")]}, {"accept": True}):
        with pytest.raises(DataError, match="The stream stops at it"):
            append(stream, log(1) if "along" in how else given, "c.parquet", **how)
    assert list_quarantine(stream) == []
    assert open_stream(str(stream)).numbers == [1]
    append(stream, log(1), "b.parquet")


def test_the_first_files_of_a_stream_have_all_columns(tmp_path: Path) -> None:
    with pytest.raises(QuarantinedError, match="has no column city"):
        append(tmp_path / "s", log(0).drop_columns(["city"]), schema=filling())


def halves(table: pa.Table) -> pa.Table:
    """Prices that float32 holds exactly."""
    return changed(table, "price", [round(2 * x) / 2 for x in table["price"].to_pylist()])


@pytest.mark.parametrize("wide_first", [False, True])
def test_types_that_widen_keep_ids_and_numbers(tmp_path: Path, wide_first: bool) -> None:
    days = [halves(log(day)) for day in range(4)]
    narrow = [cast(day, NARROW) for day in days]
    for root, given in (("wide", days), ("widened", [narrow[0], narrow[1], days[2], days[3]])):
        give(tmp_path / root, schema(), "parquet", a=given[0])
        pair = {"c": given[2], "b": given[1]} if wide_first else {"b": given[1], "c": given[2]}
        give(tmp_path / root, None, "parquet", **pair)
        give(tmp_path / root, None, "parquet", d=given[3])
    wide, widened = (open_stream(str(tmp_path / root / "s")) for root in ("wide", "widened"))
    for number in (1, 2, 3):
        assert written(wide.dataset(number)) == written(widened.dataset(number))


def test_a_number_may_get_decimals_from_parquet_and_from_text(tmp_path: Path) -> None:
    days = [changed(log(day), "price", [5 + day] * 400) for day in range(3)]
    days[2] = changed(days[2], "price", [7.5] * 400)
    for kind in ("parquet", "csv"):
        root = tmp_path / kind
        give(root, schema(), kind, a=days[0])
        give(root, None, kind, b=days[1], c=days[2])
        moments = open_stream(str(root / "s")).description["moments"]["price"]
        blocks = open_stream(str(root / "s")).dataset(2)
        found = {
            round(float(x) * moments[1] + moments[0], 3)
            for i in range(blocks.split("train").num_blocks)
            for x in blocks.read_block("train", i).dense_NK[:, 0]
        }
        assert found == {5.0, 6.0, 7.5}


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_integers_that_become_text_are_other_ids_and_refused(tmp_path: Path, kind: str) -> None:
    give(tmp_path, schema(), kind, a=log(0))
    words = [f"item {n}" for n in log(1)["item"].to_pylist()]
    with pytest.raises(QuarantinedError) as error:
        give(tmp_path, None, kind, b=changed(log(1), "item", words))
    assert str(error.value) == (
        f"input {tmp_path}/logs/b.{kind} is quarantined: column item of input "
        f"{tmp_path}/logs/b.{kind} holds text values, in the stream {tmp_path}/s it holds integer. "
        "Cast it, or begin a new stream. Mend the files"
    )


def test_an_id_that_becomes_a_float_is_refused(tmp_path: Path) -> None:
    give(tmp_path, schema(), "parquet", a=log(0))
    floats = changed(log(1), "item", [float(n) for n in log(1)["item"].to_pylist()])
    with pytest.raises(QuarantinedError, match="sparse column item has type double; integer or"):
        give(tmp_path, None, "parquet", b=floats)
    # Beside a file that holds integers, too: 7.5 is no id.
    shutil.rmtree(tmp_path / "s" / "quarantine")
    with pytest.raises(QuarantinedError, match="sparse column item has type double; integer or"):
        give(tmp_path, None, "parquet", c=log(2), b=floats)
    (note,) = list_quarantine(tmp_path / "s")
    assert [Path(file["name"]).name for file in note["files"]] == ["b.parquet"]
