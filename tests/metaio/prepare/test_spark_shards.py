"""What workers of Spark write, where a task runs twice, is killed, or the place is a store."""

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaio import open_dataset
from metaio.errors import AccessError, NoDatasetError
from metaio.prepare.engines import local as local
from metaio.prepare.engines import spark
from metaio.prepare.engines.local import prepare
from metaio.prepare.engines.spark_batches import KEYED
from metaio.prepare.job import Job, PrepareOptions
from tests.metaio.prepare.test_local import changed, raw_table

pytest.importorskip("pyspark", reason="needs the extra spark")

_numbers = itertools.count()
Function = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class Killed(BaseException):
    """A task that ends here and now."""


@dataclass
class Frame:
    """As much of a DataFrame as shards need, in this process, which has stores in memory."""

    parts: list[list[pa.RecordBatch]]

    def mapInArrow(self, function: Function, schema: str) -> "Frame":
        return Frame([list(function(iter(part))) for part in self.parts])

    def repartition(self, num_parts: int, column: str) -> "Frame":
        rows = [row for part in self.parts for batch in part for row in batch.to_pylist()]
        dealt: list[list[dict[str, Any]]] = [[] for _ in range(num_parts)]
        for row in rows:
            dealt[row[column]].append(row)
        schema = pa.schema({"bucket": pa.int32(), "payload": pa.binary()})
        return Frame([[pa.RecordBatch.from_pylist(part, schema)] for part in dealt if part])

    def sortWithinPartitions(self, column: str) -> "Frame":
        return self

    def collect(self) -> list[list[bytes]]:
        return [[row] for part in self.parts for b in part for row in b["payload"].to_pylist()]


@dataclass
class Made:
    """A log, what one machine makes of it, and its job, to overwrite."""

    raw: Path
    one: str
    job: Job

    def frame(self) -> Frame:
        columns = self.job.schema.columns
        return Frame([[b] for b in pq.read_table(self.raw, columns=columns).to_batches(900)])

    def by_spark(self, out: str, frame: Frame | None = None) -> None:
        rows = (frame or self.frame()).mapInArrow(spark._make_encoder(self.job, []), KEYED)
        with self.job.open(out) as writer:
            spark._write_shards(rows, self.job, writer, out)  # type: ignore[arg-type]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    raw, jobs = tmp_path / "raw.parquet", []
    pq.write_table(raw_table(2_000), raw)
    write = local._write_shards

    def seen(job: Job, *others: Any) -> None:
        jobs.append(job)
        write(job, *others)

    monkeypatch.setattr(local, "_write_shards", seen)
    options = PrepareOptions(threads=1, block_rows=20)
    prepare([str(raw)], str(tmp_path / "one"), changed(), options)
    return Made(
        raw, str(tmp_path / "one"), replace(jobs[0], options=replace(options, overwrite=True))
    )


@pytest.fixture
def store() -> str:
    """Where in the memory of this process a dataset goes."""
    return f"memory://spark{next(_numbers)}/data"


def files_in(url: str) -> dict[str, bytes]:
    fs, root = fsspec.core.url_to_fs(url)
    found = {path.removeprefix(root): fs.cat_file(path) for path in fs.find(root)}
    return {path: data for path, data in found.items() if not path.startswith("/raw_ids/")}


def test_a_store_gets_the_files_of_one_machine_and_no_others(made: Made, store: str) -> None:
    made.by_spark(store)
    assert files_in(store) == files_in(made.one)


def test_a_job_that_fails_leaves_no_mixture_under_the_old_manifest(
    made: Made, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare([str(made.raw)], store, changed(seed=1), PrepareOptions(threads=1, block_rows=40))

    def lost(frame: Frame) -> None:
        raise AccessError("a worker is lost")

    with monkeypatch.context() as patched:
        patched.setattr(Frame, "collect", lost)
        with pytest.raises(AccessError):
            made.by_spark(store)
    # Its shards are overwritten: nothing may call them the old dataset.
    with pytest.raises(NoDatasetError):
        open_dataset(store)
    made.by_spark(store)
    assert files_in(store).items() >= files_in(made.one).items()


@pytest.mark.parametrize("where", ["copying", "renaming"])
def test_a_second_attempt_that_is_killed_leaves_the_shard_whole(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def cut(source: str, place: str, **_: Any) -> None:
        Path(place).write_bytes(Path(source).read_bytes()[:100])
        raise Killed

    def killed(path: Path, place: Path) -> None:
        raise Killed

    write, left = spark._write_shard, []

    def twice(job: Job, target: str, bucket: int, rows: Any) -> Any:
        first = write(job, target, bucket, rows)
        with monkeypatch.context() as patched, suppress(Killed):
            if where == "copying":
                patched.setattr(shutil, "copyfile", cut)
            else:
                patched.setattr(Path, "replace", killed)
            write(job, target, bucket, rows)
        left.append((target, bucket, rows))
        return first

    monkeypatch.setattr(spark, "_write_shard", twice)
    many = str(tmp_path / "many")
    made.by_spark(many)
    assert files_in(many) == files_in(made.one)
    # One that Spark forgot makes no folder of the name that is gone.
    with suppress(AccessError):
        write(made.job, *left[0])
    assert not Path(left[0][0]).exists()
