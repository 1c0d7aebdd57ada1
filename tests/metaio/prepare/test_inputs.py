"""Where inputs are read from: a web server, and files whose names hold the marks of globs."""

import json
import shutil
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from metaio import DataError, open_dataset
from metaio.errors import AccessError
from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import parse_schema
from metaio.prepare.source import input_files
from metaio.prepare.source.input_files import expand_inputs
from metaio.prepare.source.profile import read_log_sample
from tests.metaio.prepare.test_local import changed, raw_table
from tests.support.full_disk import files_of_at_most
from tests.support.refusals import catch_message

BODY = {"task": {"column": "user"}, "label": {"column": "clicked"}, "episodes": {"query_rows": 1}}


@contextmanager
def served(folder: Path, handler: type[BaseHTTPRequestHandler] | None = None) -> Iterator[str]:
    """The URL of a server of the files of a folder."""
    handler = handler or partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_files_of_a_web_server_are_read_as_those_of_a_disk(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    table = raw_table(200)
    for part in range(2):
        pa_csv.write_csv(table.slice(100 * part, 100), tmp_path / "logs" / f"{part}.csv")
    prepare([f"{tmp_path}/logs/*.csv"], str(tmp_path / "own"), changed(), PrepareOptions(threads=1))
    with served(tmp_path / "logs") as url:
        urls = [f"{url}/0.csv", f"{url}/1.csv?signed=yes"]
        prepare(urls, str(tmp_path / "served"), changed(), PrepareOptions(threads=1))
    own, found = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.parquet")}
        for root in (tmp_path / "own", tmp_path / "served")
    )
    assert own == found


def test_a_file_whose_size_a_web_server_does_not_say_is_not_taken_for_empty(tmp_path: Path) -> None:
    class OfNoSize(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(b"user,item\n1,2\n")

    with served(tmp_path, OfNoSize) as url:
        found = expand_inputs([f"{url}/log.csv"], tmp_path)
    assert (found.names, found.empty) == ([f"{url}/log.csv"], [])


@pytest.mark.parametrize("name", ["000000_0", "part-00000", "log.2026"])
def test_parquet_is_known_by_its_first_bytes(tmp_path: Path, name: str) -> None:
    pq.write_table(raw_table(200), tmp_path / name)
    assert expand_inputs([str(tmp_path / name)], tmp_path).kind == "Parquet"
    prepare([str(tmp_path / name)], str(tmp_path / "out"), changed(), PrepareOptions(threads=1))
    pa_csv.write_csv(raw_table(200), tmp_path / name)
    assert expand_inputs([str(tmp_path / name)], tmp_path).kind == "text"


def test_what_an_engine_has_not_finished_is_no_input(tmp_path: Path) -> None:
    """Its rows stand in the finished files, too."""
    for name in ("a.csv", "_temporary/0/a.csv", ".staging/a.csv", "day=1/b.csv", "day=1/_c.csv"):
        path = tmp_path / "_logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("user,item\n1,2\n")
    logs = tmp_path / "_logs"
    wanted = [str(logs / "a.csv"), str(logs / "day=1" / "b.csv")]
    assert expand_inputs([str(logs)], tmp_path).names == wanted
    assert expand_inputs([f"{logs}/**/*.csv"], tmp_path).names == wanted
    own = f"{logs}/_temporary/0/*.csv"  # whoever spells it means it
    assert expand_inputs([own], tmp_path).names == [str(logs / "_temporary/0/a.csv")]
    assert expand_inputs([f"{tmp_path}/_lo*/*.csv"], tmp_path).names == [str(logs / "a.csv")]


def test_what_is_for_people_is_no_input(tmp_path: Path) -> None:
    logs = tmp_path / "readme"
    logs.mkdir()
    for name in ("README", "ReadMe.txt", "notes.md", "LICENSE.csv", "readme_clicks.csv"):
        (logs / name).write_text("user,item\n1,2\n")
    with zipfile.ZipFile(logs / "a.zip", "w") as archive:
        for name in ("ml/README.txt", "ml/a.csv"):
            archive.writestr(name, "user,item\n1,2\n")
    found = expand_inputs([str(logs)], tmp_path).names
    assert [Path(name).name for name in found] == ["a.csv", "readme_clicks.csv"]
    assert expand_inputs([f"{logs}/README"], tmp_path).names == [f"{logs}/README"]
    (tmp_path / "of/citation").mkdir(parents=True)  # a folder holds what its files say
    (tmp_path / "of/citation/notice.csv").write_text("user,item\n1,2\n")
    assert len(expand_inputs([f"{tmp_path}/of/*/*.csv"], tmp_path).names) == 1


def test_an_archive_that_does_not_fit_is_told_with_where_it_was_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "logs.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.csv", "user,item\n" * 1_000)
    with files_of_at_most(1_000), pytest.raises(AccessError) as error:
        expand_inputs([f"{tmp_path}/logs.zip"], tmp_path)
    told = str(error.value).replace(str(next(tmp_path.glob("tmp*"))), "HERE")
    assert told == (
        f"input {tmp_path}/logs.zip cannot be unpacked into HERE/logs: File too large. Free space "
        "there, or set TMPDIR to another place"
    )


def test_an_archive_is_refused_by_its_listing_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "logs.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.csv", bytes(1 << 20))
    monkeypatch.setattr(zipfile.ZipFile, "extractall", lambda *_: pytest.fail("it is unpacked"))
    monkeypatch.setattr(input_files, "_LEAST_BOMB", 1 << 10)
    assert catch_message(DataError, expand_inputs, [f"{tmp_path}/logs.zip"], tmp_path) == (
        f"input {tmp_path}/logs.zip unpacks to 1,048,576 bytes, over 250 times its size: no log "
        "does. Unpack it yourself, and give the files"
    )
    monkeypatch.setattr(input_files, "_LEAST_BOMB", 1 << 30)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000))
    with pytest.raises(
        AccessError, match=r"cannot be unpacked into .*: No space left on device. Fr"
    ):
        expand_inputs([f"{tmp_path}/logs.zip"], tmp_path)


def unchanged(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def write_rows(table: pa.Table, path: Path) -> None:
    """Write a table as its suffix says."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".csv":
        pa_csv.write_csv(table, path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("has_day", [True, False])
@pytest.mark.parametrize("rule", [{}, {"transform": {"function": f"{__name__}:unchanged"}}])
def test_what_a_file_holds_counts_more_than_the_name_of_its_folder(
    tmp_path: Path, kind: str, rule: dict[str, Any], has_day: bool
) -> None:
    """DuckDB, and Spark, put the value of the folder in its place."""
    for day in (8, 9):
        table = pa.table({"user": [1, 1], "day": [day * 10, day * 10 + 1], "clicked": [0, 1]})
        table = table if has_day else table.drop_columns(["day"])
        path = tmp_path / "logs" / f"day={day}" / f"a.{kind}"
        path.parent.mkdir(parents=True)
        write_rows(table, path)
    body = BODY | {"single": [{"column": "day", "vocabulary": 1}]}
    prepare([str(tmp_path / "logs")], str(tmp_path / "out"), parse_schema(body | rule))
    values = pq.read_table(tmp_path / "out/vocabulary/day.parquet")["value"].to_pylist()
    assert values == ([80, 81, 90, 91] if has_day else [8, 9])


def test_a_column_of_a_file_and_one_of_a_folder_alone_are_refused_together(tmp_path: Path) -> None:
    path = tmp_path / "day=8" / "hour=2" / "a.csv"
    path.parent.mkdir(parents=True)
    path.write_text("user,day,clicked\n1,80,0\n1,81,1\n")
    single = [{"column": column, "vocabulary": 1, "type": "text"} for column in ("day", "hour")]
    body = BODY | {"single": single}
    with pytest.raises(DataError) as caught:
        prepare([str(path)], str(tmp_path / "out"), parse_schema(body))
    assert str(caught.value) == (
        f"input {path} has a column day of its own, and hour only in the name of a folder. "
        "Rename the folder day=..., or hour=..."
    )
    single.pop(0)
    prepare([str(path)], str(tmp_path / "out"), parse_schema(body))
    assert pq.read_table(tmp_path / "out/vocabulary/hour.parquet")["value"].to_pylist() == ["2"]


@pytest.mark.parametrize("other", ["day=9/b.csv", "e.csv"])
def test_a_column_of_a_later_file_and_of_a_folder_are_not_mixed(tmp_path: Path, other: str) -> None:
    files = {"day=8/a.csv": "user,clicked\n1,0\n", other: "user,day,clicked\n1,80,0\n1,81,1\n"}
    for name, text in files.items():
        (tmp_path / "logs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "logs" / name).write_text(text)
    body = BODY | {"single": [{"column": "day", "vocabulary": 1}]}
    with pytest.raises(DataError) as caught:
        prepare([str(tmp_path / "logs")], str(tmp_path / "out"), parse_schema(body))
    assert str(caught.value) == (
        f"input {tmp_path}/logs/{other} has no column day in the name of a folder alone, as "
        f"{tmp_path}/logs/day=8/a.csv has. Make the files agree, or rename that folder"
    )


def test_columns_of_csv_files_are_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("extra,user,word,clicked\n1,1,a,0\n1,1,b,1\n")
    (tmp_path / "b.csv").write_text("word,clicked,user\nc,0,2\nd,1,2\n")
    body = BODY | {"single": [{"column": "word", "vocabulary": 1}]}
    prepare([str(tmp_path / "*.csv")], str(tmp_path / "out"), parse_schema(body))
    assert pq.read_table(tmp_path / "out/vocabulary/word.parquet")["value"].to_pylist() == [*"abcd"]
    assert open_dataset(str(tmp_path / "out")).split("train").num_episodes == 2


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("names", [("word", "Word"), ("Word", "word")])
def test_columns_that_differ_in_case_alone_are_refused_if_they_are_read(
    tmp_path: Path, kind: str, names: tuple[str, str]
) -> None:
    path = tmp_path / f"a.{kind}"
    table = pa.table({"user": [1, 1], names[0]: [7, 8], names[1]: [9, 9], "clicked": [0, 1]})
    write_rows(table, path)
    told = {
        "word": "has columns Word and word, which differ only in case. Rename or remove one",
        f"{names[1]}_1": f"has no column {names[1]}_1. Correct the schema",
    }
    for column, message in told.items():
        body = BODY | {"single": [{"column": column, "vocabulary": 1}]}
        with pytest.raises(DataError) as caught:
            prepare([str(path)], str(tmp_path / "out"), parse_schema(body))
        assert str(caught.value) == f"input {path} {message}"
    with pytest.raises(DataError) as caught:
        read_log_sample([str(path)])
    assert str(caught.value) == f"input {path} {told['word']}"
    body = BODY | {"single": [{"column": "user", "vocabulary": 1}]}
    prepare([str(path)], str(tmp_path / "out"), parse_schema(body))
