"""Increments by Spark against those of one machine: the same files and states, to the byte."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import DataError
from metaio.errors import QuarantinedError
from metaio.prepare.schema.rules import TransformRule
from metaio.prepare.schema.schema import Schema
from metaio.stream.chain import IncrementRecord, open_stream
from metaio.stream.extend import extend
from metaio.stream.spark_engine import make_spark_engine
from tests.metaio.stream.changing import NARROW, cast, filling
from tests.metaio.stream.logs import DAY, OPTIONS, changed, log, schema
from tests.metaio.stream.test_events import day_log, schema_with, view_log

pytest.importorskip("pyspark", reason="needs the extra spark")
pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="needs Java on PATH")

DAYS = 6
# Buckets of 160 rows: a day has several, and the gate's are small.
SMALL = dataclasses.replace(OPTIONS, block_rows=20)


def written(logs: Path, day: int) -> list[str]:
    """A day's log in three files: late rows, too late ones, ids and users that come and go."""
    table = log(day, rows=500)
    if day:
        time = table["time"].to_numpy().copy()
        time[:20] = day * DAY - 1_800 - np.arange(20)
        time[20:30] = (day - 1) * DAY + np.arange(10)
        table = changed(table, "time", time)
    if day == DAYS - 1:  # who was there on the first day, and not since
        table = changed(table, "item", log(0, rows=500)["item"].to_numpy())
        table = changed(table, "user", log(0, rows=500)["user"].to_numpy())
    if day == 2:  # a wrong clock
        table = changed(table, "time", [4_102_444_800, *table["time"].to_pylist()[1:]])
    table = changed(table, "click", np.round(np.random.default_rng(day).random(500), 3))
    names = [str(logs / f"{day}-{part}.parquet") for part in range(3)]
    logs.mkdir(exist_ok=True)
    for part, name in enumerate(names):
        rows = table.slice(part * 200, 200)
        pq.write_table(rows, name, row_group_size=70)
    return names


def files(stream: Path) -> dict[str, bytes]:
    return {
        path.relative_to(stream).as_posix(): path.read_bytes()
        for path in stream.rglob("*")
        if path.is_file()
    }


def by_spark(
    session: Any, inputs: list[str], stream: Path, own: Schema | None, **how: Any
) -> IncrementRecord:
    return extend(inputs, str(stream), own, SMALL, engine_of=make_spark_engine(session), **how)


@pytest.mark.parametrize(
    ("rule", "days_of_spark"),
    [
        ({"ttl": 2.0 * DAY, "grace": 1.0 * DAY}, range(DAYS)),
        # Each goes on from what the other one left.
        ({"max_new_rows": 7, "gate": 0.0}, range(1, DAYS, 2)),
    ],
    ids=["ttl", "in turn"],
)
def test_spark_and_one_machine_write_the_same_stream(
    tmp_path: Path, session: Any, rule: dict[str, Any], days_of_spark: range
) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    late = returning = reused = 0
    how = {"label_ranges": {"click": (0.0, 0.99)}}
    for day in range(DAYS):
        inputs = written(tmp_path / "logs", day)
        given = schema(late=3_600.0, **rule) if day == 0 else None
        record = extend(inputs, str(one), given, SMALL, **how)
        if day in days_of_spark:
            by_spark(session, inputs, many, given, **how)
        else:
            extend(inputs, str(many), given, SMALL, **how)
        expected, found = files(one), files(many)
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []
        late += record.report["late"] * record.report["too_late"]
        returning += record.report["tasks"]["train"]["returning"]
        reused += record.report["tables"]["item"]["reused"]
        account = record.report["account"]
        assert account["quarantined"] > (day == 2)
        assert 2 * account["read"] == sum(account.values())
    assert len(open_stream(str(one)).dataset(DAYS).manifest.splits["train"].shards) > 2
    assert late > 0
    assert returning > 0
    assert (reused > 0) == ("ttl" in rule)


def test_spark_reads_files_whose_columns_differ_as_one_machine_does(
    tmp_path: Path, session: Any
) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    for day in range(3):
        inputs = written(tmp_path / "logs", day)
        tables = [pq.read_table(name) for name in inputs]
        if day == 1:  # beside a file that has the columns
            pq.write_table(tables[0].drop_columns(["item", "tags", "price"]), inputs[0])
            narrow = {name: kind for name, kind in NARROW.items() if name != "click"}
            pq.write_table(cast(tables[1], narrow), inputs[1])
        for name, table in zip(inputs, tables, strict=True) if day == 2 else ():
            pq.write_table(table.drop_columns(["city", "price"]), name)
        given = filling() if day == 0 else None
        record = extend(inputs, str(one), given, SMALL)
        by_spark(session, inputs, many, given)
        expected, found = files(one), files(many)
        assert [name for name in found | expected if found[name] != expected[name]] == []
    assert record.report["missing_columns"] == {"city": 500, "price": 500}
    # An old partition, of which the stream has a part.
    old = log(1, rows=700, seed=4)
    pq.write_table(old.slice(0, 300), str(tmp_path / "old.parquet"))
    extend([str(tmp_path / "old.parquet")], str(one), None, SMALL, backfill=True)
    by_spark(session, [str(tmp_path / "old.parquet")], many, None, backfill=True)
    assert files(one) == files(many)


def test_events_of_another_log_are_those_of_one_machine(tmp_path: Path, session: Any) -> None:
    rule = {"files": f"{tmp_path}/views/*.parquet", "longest": 5, "where": "click = 1"}
    own = schema_with(rule, ttl=1.5 * DAY)
    one, many = tmp_path / "one", tmp_path / "many"
    (tmp_path / "views").mkdir()
    for day in range(3):
        path = str(tmp_path / f"{day}.parquet")
        pq.write_table(day_log(day), path, row_group_size=70)
        views = tmp_path / "views" / f"{day}.parquet"
        pq.write_table(view_log(day), views, row_group_size=70)
        given = own if day == 0 else None
        extend([path], str(one), given, SMALL, accept=True)
        by_spark(session, [path], many, given, accept=True)
        expected, found = files(one), files(many)
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []
    block = open_stream(str(many)).dataset(3).read_block("train", 0)
    assert block.num_events_T.sum() > 0


def test_spark_refuses_what_one_machine_refuses(tmp_path: Path, session: Any) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    inputs = written(tmp_path / "logs", 0)
    extend(inputs, str(one), schema(), SMALL)
    by_spark(session, inputs, many, schema())
    nan, null, old = (str(tmp_path / f"{name}.parquet") for name in ("nan", "null", "old"))
    day = log(1)
    pq.write_table(changed(day, "price", [float("nan")] * 400), nan)
    pq.write_table(changed(day, "city", [None, *day["city"].to_pylist()[1:]]), null)
    before = log(0, seed=1)
    pq.write_table(before.filter(pa.array(before["time"].to_numpy() < DAY // 2)), old)
    for refused, error in (
        ([nan], QuarantinedError),
        ([null], QuarantinedError),
        ([old], QuarantinedError),
        (inputs[:1], DataError),
        ([str(tmp_path / "none.parquet")], DataError),
    ):
        said = []
        for append in (extend, lambda *given: by_spark(session, given[0], many, None)):
            with pytest.raises(error) as caught:
                append(refused, str(one), None, SMALL)
            said.append(str(caught.value).replace(str(many), str(one)))
        assert said[0] == said[1]
    assert open_stream(str(many)).numbers == [1]
    assert list(many.rglob(".*")) == []


def test_a_transform_is_for_one_machine() -> None:
    own = dataclasses.replace(schema(), transform=TransformRule("mine:clean"))
    with pytest.raises(DataError) as caught:
        make_spark_engine(None)(None, own, SMALL)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "the stream's schema has [transform] with 'mine:clean', which runs on one machine. Leave "
        "--spark out"
    )
