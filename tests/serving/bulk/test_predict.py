"""`gmeta predict` on files larger than what is in memory at once: the same rows and numbers."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv
from typer.testing import CliRunner

from gmeta.cli.main import app
from gmeta.errors import UserError
from gmeta.serving.bulk import predict_files as predict
from gmeta.serving.bulk import row_files as files
from gmeta.serving.bulk.predict_files import predict_files
from gmeta.serving.bulk.row_files import RowFiles, check_fits
from gmeta.serving.bulk.text_rows import open_rows
from gmeta.serving.encoded_rows import EncodedColumns
from gmeta.serving.exported_folder import ExportedColumns
from gmeta.serving.served_model import ServedModel
from metaio import DataError
from metaio.prepare.schema.schema_file import parse_schema
from tests.support.exported import FEATURES, random_rows, write_random_model

OUTPUT = ["prediction", "prediction_before", "support_rows"]

NUM_TASKS = 60


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[pa.Table, pa.Table]:
    """Rows of tasks in no order, in three files a side."""
    monkeypatch.setattr(files, "_BATCH_ROWS", 50)
    support = random_rows(600, 1, NUM_TASKS)
    query = random_rows(900, 2, NUM_TASKS).drop_columns(["click"])
    query = query.append_column("note", pa.array([f"row {n}" for n in range(900)]))
    for name, rows in (("support", support), ("query", query)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "_SUCCESS").touch()
        size = rows.num_rows // 3
        for part in range(3):
            path = tmp_path / name / f"part-{part}.parquet"
            pq.write_table(rows.slice(part * size, size), path, row_group_size=70)
    return support, query


def test_no_read_asks_for_more_than_a_batch_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow keeps the bytes of all row groups that a call reads, until its end."""
    rows, asked, read = random_rows(100), list[list[int]](), pq.ParquetFile.iter_batches
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=8)

    def record(file: pq.ParquetFile, *arguments: Any, **options: Any) -> Iterator[pa.RecordBatch]:
        asked.append(options["row_groups"])
        return read(file, *arguments, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", record)
    found = list(RowFiles(str(tmp_path / "rows.parquet")).batches(["user", "item"], 20))
    assert asked == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12]]
    assert max(batch.num_rows for batch in found) <= 20
    assert pa.Table.from_batches(found).equals(rows.select(["user", "item"]))


def nothing(done: int, total: int) -> None:
    """No progress is shown."""


def invoked(exported: Path, *arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["predict", str(exported), *map(str, arguments)])


@pytest.mark.parametrize("part_rows", [100, 400, 10_000])
def test_rows_of_many_parts_are_predicted_as_all_at_once(
    served: ServedModel, sides: tuple[pa.Table, pa.Table], tmp_path: Path, part_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    support, query = sides
    whole = ServedModel.predict_tasks_encoded
    sizes: list[int] = []

    def counted(
        model: ServedModel, support: EncodedColumns, query: EncodedColumns, *further: Any
    ) -> Any:
        sizes.append(support.num_rows + query.num_rows)
        return whole(model, support, query, *further)

    expected = served.predict_tasks(support, query)
    monkeypatch.setattr(ServedModel, "predict_tasks_encoded", counted)
    told: list[tuple[int, int]] = []
    found = predict_files(
        served, RowFiles(str(tmp_path / "support")),
        RowFiles(str(tmp_path / "query" / "*.parquet")), tmp_path / "out.parquet", False,
        lambda done, total: told.append((done, total)), part_rows,
    )  # fmt: skip
    assert (found.num_rows, found.rows_without_support) == (900, 0)
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.drop_columns(OUTPUT).equals(query)
    values = (expected.after_N, expected.before_N, expected.support_rows_N)
    for name, wanted in zip(OUTPUT, values, strict=True):
        np.testing.assert_allclose(written[name], wanted, rtol=0, atol=1e-6)
    assert sum(sizes) == 1_500
    # Tasks have 25 rows; of parts of 100 rows some get a few tasks more than others.
    assert max(sizes) <= max(4 * part_rows, 250) or part_rows == 10_000
    assert told[-1] == (3_300, 3_300)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "query", "support"]


def test_tasks_without_support_are_counted_over_all_parts(
    served: ServedModel, sides: tuple[pa.Table, pa.Table], tmp_path: Path
) -> None:
    support, query = sides
    known = pa.compute.less(support["user"], 40)
    pq.write_table(support.filter(known), tmp_path / "few.parquet")
    rows = RowFiles(str(tmp_path / "few.parquet")), RowFiles(str(tmp_path / "query"))
    out = tmp_path / "out.parquet"
    with pytest.raises(UserError) as at_once:
        served.predict_tasks(support.filter(known), query)
    with pytest.raises(UserError) as caught:
        predict_files(served, *rows, out, False, nothing, 100)
    assert str(caught.value) == str(at_once.value)
    assert not out.exists()
    found = predict_files(served, *rows, out, True, nothing, 100)
    without = int(pa.compute.sum(pa.compute.greater_equal(query["user"], 40)).as_py())
    assert found.rows_without_support == without > 0


def test_csv_has_no_lists(exported: Path, sides: tuple[pa.Table, pa.Table], tmp_path: Path) -> None:
    inputs = (tmp_path / "support", tmp_path / "query")
    result = invoked(exported, *inputs, "--out", tmp_path / "out.csv")
    assert str(result.exception) == (
        "column tags has type list<element: int64>, which CSV cannot hold: name a file that ends "
        "with .parquet, or drop the column"
    )
    assert not (tmp_path / "out.csv").exists()
    # Arrow writes no views; it would be told behind hours of predictions.
    with pytest.raises(
        UserError, match=r"^column name has type string_view, which CSV cannot hold"
    ):
        check_fits(pa.schema([("name", pa.string_view())]), tmp_path / "out.csv")


def test_csv_is_written_with_the_columns_of_the_query(tmp_path: Path) -> None:
    write_random_model(tmp_path / "model", replace(FEATURES, multi=()))
    rows = random_rows(40, 1, 5).drop_columns(["tags", "seen"])
    named = rows.append_column("name", pa.array([f'a "{n}", b' for n in range(40)]))
    for name, table in (("support", rows), ("query", named)):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    inputs = [tmp_path / f"{name}.parquet" for name in ("support", "query")]
    for out in ("out.csv", "out.pq"):
        result = invoked(tmp_path / "model", *inputs, "--out", tmp_path / out)
        assert result.exit_code == 0, result.exception
    found, expected = csv.read_csv(tmp_path / "out.csv"), pq.read_table(tmp_path / "out.pq")
    assert found.column_names == expected.column_names
    assert found["name"].to_pylist() == named["name"].to_pylist()
    np.testing.assert_allclose(found["prediction"], expected["prediction"], rtol=0, atol=1e-6)


def test_what_fails_while_it_is_written_leaves_the_old_file(
    exported: Path, sides: tuple[pa.Table, pa.Table], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    inputs, out = (tmp_path / "support", tmp_path / "query"), tmp_path / "out.parquet"
    assert invoked(exported, *inputs, "--out", out).exit_code == 0
    before = out.read_bytes()
    # What a killed process leaves.
    (tmp_path / ".out.parquet.partial").mkdir()
    (tmp_path / ".out.parquet.partial" / "rows").write_bytes(before[:100])
    real = predict.open_writer

    @contextmanager
    def failing(path: Path, schema: pa.Schema, suffix: str) -> Iterator[Any]:
        with real(path, schema, suffix) as writer:
            yield Stops(writer.write_batch)

    monkeypatch.setattr(predict, "open_writer", failing)
    result = invoked(exported, *inputs, "--out", out, "--overwrite")
    assert str(result.exception) == (
        f"{out} could not be written: [Errno 28] No space left on device. Free space or choose "
        "another place"
    )
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "query", "support"]


def test_predictions_have_their_room_before_the_first_of_them(
    exported: Path, sides: tuple[pa.Table, pa.Table], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def on_a_full_disk(descriptor: int, first: int, num_bytes: int) -> None:
        assert (first, num_bytes) == (0, 900 * 16)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(predict.os, "posix_fallocate", on_a_full_disk)
    result = invoked(exported, tmp_path / "support", tmp_path / "query", "--out", tmp_path / "out")
    assert "No space left on device. Free space" in str(result.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["query", "support"]


class Stops:
    """Writes one batch; then the disk is full."""

    def __init__(self, write: Callable[[pa.RecordBatch], None]) -> None:
        self._write = write
        self._written = 0

    def write_batch(self, batch: pa.RecordBatch) -> None:
        if self._written:
            raise OSError(28, "No space left on device")
        self._written += 1
        self._write(batch)


def test_files_that_cannot_be_read_as_one_are_told(
    exported: Path, sides: tuple[pa.Table, pa.Table], tmp_path: Path
) -> None:
    other = tmp_path / "query" / "part-9.parquet"
    pq.write_table(pa.table({"user": pa.array([1], pa.int32())}), other)
    support, out = tmp_path / "support", tmp_path / "out.parquet"
    told = str(invoked(exported, support, tmp_path / "query", "--out", out).exception)
    assert told.startswith(f"{other} has columns user int32; {other.with_name('part-0.parquet')} ")
    assert told.endswith(". Make the files agree")
    none = tmp_path / "query" / "*.csv"
    told = str(invoked(exported, support, none, "--out", out).exception)
    assert told == f"no file matches {none}. Check the path"
    both = f"{tmp_path}/query/part-0.parquet,{tmp_path}/query/part-1.parquet"
    assert invoked(exported, support, both, "--out", out).exit_code == 0
    assert pq.read_table(out).num_rows == 600


@pytest.mark.parametrize("name", ["part-{}.jsonl", "part-{}.csv", "part-{}.csv.gz"])
def test_text_is_predicted_as_parquet(tmp_path: Path, name: str) -> None:
    features = FEATURES if "jsonl" in name else replace(FEATURES, multi=())
    write_random_model(tmp_path / "model", features)
    tables, paths = {"SUPPORT": random_rows(60, 1, 9), "QUERY": random_rows(90, 2, 9)}, {}
    for side, table in tables.items():
        if not features.multi:
            table = table.drop_columns(["tags", "seen"])
        if side == "QUERY":
            words = pa.array([f"row, {n}" for n in range(90)])
            table = table.drop_columns(["click"]).append_column("note", words)
        pq.write_table(table, tmp_path / f"{side}.parquet")
        paths[side] = tmp_path / side
        paths[side].mkdir()
        for part in range(3):
            rows, size = table.slice(part * len(table) // 3, len(table) // 3), len(table) // 3
            path = str(paths[side] / name.format(part))
            assert rows.num_rows == size
            if features.multi:
                lines = (json.dumps(row) for row in rows.to_pylist())
                Path(path).write_text("\n".join(lines))
            else:
                with (
                    pa.CompressedOutputStream(path, "gzip")
                    if path.endswith("gz")
                    else open(path, "wb") as file
                ):
                    csv.write_csv(rows, file)
    for out, given in (("a", paths), ("b", {side: f"{tmp_path}/{side}.parquet" for side in paths})):
        found = invoked(tmp_path / "model", *given.values(), "--out", tmp_path / f"{out}.parquet")
        assert found.exit_code == 0, found.exception
    found, expected = (pq.read_table(tmp_path / f"{out}.parquet") for out in "ab")
    assert found.column_names == expected.column_names
    assert found.select(OUTPUT).equals(expected.select(OUTPUT))
    assert found["note"].to_pylist() == expected["note"].to_pylist()


def test_text_is_read_by_the_schema_of_the_model(served: ServedModel, tmp_path: Path) -> None:
    schema = parse_schema(
        {
            "task": {"column": "user"}, "label": {"column": "click"}, "time": {"column": "ts"},
            "single": [{"column": "item", "hash": 9, "null": "unknown"}],
            "text": {"separator": "::", "null": ["NA"], "bad_lines": "skip"},
            "episodes": {"query_rows": 1},
        }
    )  # fmt: skip
    columns = ExportedColumns("user", "click", schema, {}, {"item": "text"})
    config = replace(served.config, columns=columns)
    path = tmp_path / "rows.csv"
    path.write_text("user::item::more\n7::12::x\n7::NA::y\n")
    with open_rows([str(path)], config, False) as rows:
        (batch,) = rows.batches()
        assert batch.to_pydict() == {"user": [7, 7], "item": ["12", None], "more": ["x", "y"]}
        assert rows.names == [str(path)]
    path.write_text("user::item::more\n7::12::x\n7::NA::y::z\n")
    with (
        pytest.raises(DataError, match="line 3: it has 4 fields"),
        open_rows([str(path)], config, False),
    ):
        pass
