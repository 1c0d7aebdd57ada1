"""Spark against the one-machine engine: the same files to the byte."""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import DataError, open_dataset
from metaio.errors import AccessError, SchemaError
from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from tests.metaio.prepare.test_local import BASE, changed, raw_table
from tests.support.refusals import catch_message

pyspark = pytest.importorskip("pyspark", reason="needs the extra spark")
pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="needs Java on PATH")


@pytest.mark.parametrize(
    "parts",
    [
        {"splits": {"shares": {"train": 0.7, "user-cold": 0.3}}},
        {"splits": {"column": "part"}, "dense": [{"column": "price", "standardise": True}]},
        {"episodes": {**BASE["episodes"], "max_rows": 7}, "seed": 3},
        {"row_id": {"column": "ts"}, "episodes": {**BASE["episodes"], "by": "random"}},
        # Shuffled by their place in the file.
        {"episodes": {**BASE["episodes"], "by": "random"}},
        {"splits": {"by_time": {"train": 0.5, "test": 0.5}, "new_tasks": "apart"}},
        # Names of tasks and of items.
        {"task": {"column": "city"}, "item": {"column": "shop"}},
        # A table too large for its used rows to travel with every shard.
        {"single": [{"column": "shop", "hash": 200_000}, {"column": "item", "hash": 300}]},
        {"membership": {"column": "side"}, "negatives": {"item": "item", "columns": ["tags"]}},
        {"events": {"columns": ["shop", "item"], "dense": ["price"], "where": "clicked = 1"}},
        # Of another log; windows of time copy them.
        {
            "events": {"columns": ["item"], "dense": ["price"], "files": "views", "longest": 9},
            "splits": {"by_time": {"train": 0.5, "test": 0.5}},
        },
        {
            "events": {"columns": ["shop"], "files": "views", "where": "clicked = 1"},
            "splits": {"column": "part"},
        },
    ],
)
def test_spark_agrees_to_the_byte(
    tmp_path: Path, session: Any, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "views").mkdir()
    for at in range(2):
        pq.write_table(raw_table(600).slice(300 * at, 300), tmp_path / "views" / f"{at}.parquet")
    raw = tmp_path / "raw.parquet"
    side = ["query" if row % 3 else "support" for row in range(2_000)]
    pq.write_table(raw_table(2_000).append_column("side", pa.array(side)), raw)
    # 20 rows a block make several buckets; some of them stay empty.
    bundle_tasks = 2 if "membership" in parts else 0
    options = PrepareOptions(threads=1, block_rows=20, bundle_tasks=bundle_tasks)
    schema = changed(**parts)
    prepare([str(raw)], str(tmp_path / "one"), schema, options)
    from metaio.prepare.engines.spark import prepare_with_spark

    prepare_with_spark(session.read.parquet(str(raw)), str(tmp_path / "many"), schema, options)
    one, many = open_dataset(str(tmp_path / "one")), open_dataset(str(tmp_path / "many"))
    assert many.manifest == one.manifest
    files = [path.relative_to(one.url) for path in Path(one.url).rglob("*.parquet")]
    assert len(files) > 30
    for file in files:
        assert (Path(many.url) / file).read_bytes() == (Path(one.url) / file).read_bytes()


def test_columns_and_files_may_be_called_anything(tmp_path: Path, session: Any) -> None:
    from metaio.prepare.engines.spark import prepare_with_spark

    names = {"user": "event.user", "item": "a`b", "city": "a.b`"}
    table = raw_table(60)
    table = table.rename_columns([names.get(name, name) for name in table.column_names])
    part = pa.array([row % 3 > 0 for row in range(60)])
    table = table.set_column(table.column_names.index("part"), "s.part", part)
    (tmp_path / "raw").mkdir()
    # In an URL %20 would stand behind "!".
    for first, name in enumerate(("x 1.parquet", "x!1.parquet")):
        pq.write_table(table.slice(30 * first, 30), tmp_path / "raw" / name)
    schema = changed(
        task={"column": "event.user"},
        single=[{"column": "a`b", "hash": 50}, {"column": "a.b`", "vocabulary": 1, "table": "t"}],
        multi=[],
        splits={"column": "s.part", "train": "true"},
        episodes={**BASE["episodes"], "by": "random"},
    )
    prepare([str(tmp_path / "raw")], str(tmp_path / "one"), schema)
    prepare_with_spark(session.read.parquet(str(tmp_path / "raw")), str(tmp_path / "many"), schema)
    one, many = open_dataset(str(tmp_path / "one")), open_dataset(str(tmp_path / "many"))
    assert list(one.splits) == ["true", "false"]
    assert many.manifest == one.manifest


def test_spark_refuses_what_one_machine_refuses(tmp_path: Path, session: Any) -> None:
    from metaio.prepare.engines.spark import prepare_with_spark

    raw = tmp_path / "raw.parquet"
    pq.write_table(raw_table(50), raw)
    frame = session.read.parquet(str(raw))
    with pytest.raises(DataError) as caught:
        prepare_with_spark(frame, str(tmp_path / "out"), changed(label={"column": "click"}))
    assert str(caught.value).startswith("the DataFrame has no column click; it has user, item, ")
    multi = [{"column": "tags", "separator": "|", "hash": 20}]
    with pytest.raises(DataError) as caught:
        prepare_with_spark(frame, str(tmp_path / "out"), changed(multi=multi))
    assert "column tags has " in str(caught.value)
    # Rows of no file have no order to be shuffled from.
    rule = {"episodes": {**BASE["episodes"], "by": "random"}}
    made = session.createDataFrame(raw_table(50).to_pandas())
    with pytest.raises(DataError) as caught:
        prepare_with_spark(made, str(tmp_path / "out"), changed(**rule))
    assert str(caught.value) == (
        "the rows of a task are shuffled by their place in the input, but this DataFrame is no "
        "Parquet file as it was read, and has no order. Name a column that tells rows apart under "
        "[row_id]"
    )
    files = {"membership": {"support": "a*", "query": "b*"}}
    with pytest.raises(DataError, match="membership by file names is for one machine"):
        prepare_with_spark(made, str(tmp_path / "out"), changed(**files))
    assert [path.name for path in tmp_path.iterdir()] == ["raw.parquet"]


def test_spark_warns_of_times_in_two_units(
    tmp_path: Path, session: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from metaio.prepare.engines.spark import prepare_with_spark

    table = raw_table(50)
    at = table.schema.get_field_index("ts")
    times = [0, 1_700_000_000, *range(1_700_000_000_000, 1_700_000_000_048)]
    raw = tmp_path / "raw.parquet"
    pq.write_table(table.set_column(at, "ts", pa.array(times)), raw)
    prepare_with_spark(session.read.parquet(str(raw)), str(tmp_path / "out"), changed())
    assert "time column ts holds numbers of 10 and of 13 digits" in caplog.text


def test_what_fails_in_spark_is_one_line(tmp_path: Path, session: Any) -> None:
    from metaio.prepare.engines.spark import prepare_with_spark
    from metaio.prepare.engines.spark_batches import collect_objects

    raw = tmp_path / "raw.parquet"
    pq.write_table(raw_table(50), raw)
    frame = session.read.parquet(str(raw))
    mend = "Its log says more; mend the input, or give Spark what it lacks, and run again"

    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/shard")

    assert catch_message(
        AccessError, collect_objects, frame.select("ts").mapInArrow(fail, "ts long")
    ) == (f"Spark failed: OSError: [Errno 28] No space left on device: '/tmp/shard'. {mend}")

    def refuse(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        raise SchemaError("the schema says so. Correct it")

    with pytest.raises(SchemaError) as refused:
        collect_objects(frame.select("ts").mapInArrow(refuse, "ts long"))
    assert str(refused.value) == "the schema says so. Correct it"

    raw.write_bytes(raw.read_bytes()[:-100])
    said = catch_message(AccessError, prepare_with_spark, frame, str(tmp_path / "out"), changed())
    assert said.startswith("Spark failed: ")
    assert said.endswith(mend)
    assert len(said.splitlines()) == 1
    assert raw.name in said
