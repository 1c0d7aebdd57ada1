"""What an increment costs: its own rows and the tables' states, whatever came before."""

import json
import os
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from metaio.format.layout import MANIFEST_NAME
from metaio.stream.chain import INCREMENTS, name_increment_folder, open_stream
from metaio.stream.extend import extend
from tests.metaio.stream.logs import DAY, OPTIONS, changed, log, schema
from tests.support.processes import with_imports_ready

EARLY, LATE = 4, 12


def same_day(number: int) -> pa.Table:
    """The same users and items at the same hours of each day: tables and tasks do not grow."""
    table = log(0, rows=200)
    moved = changed(table, "time", table["time"].to_numpy() + number * DAY)
    return changed(moved, "row", table["row"].to_numpy() + number * 100_000)


def counted_io() -> tuple[int, int]:
    """The bytes that this process has read and written so far, whatever they came from."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["rchar"]), int(told["wchar"])


def _extend_often(stream: str, count_to: str) -> None:
    """Append equal days; write down the bytes of each, and which files of the stream it opened."""
    opened: list[str] = []
    written: list[str] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(stream):
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            is_written = flags & (os.O_WRONLY | os.O_RDWR)
            (written if is_written else opened).append(str(arguments[0])[len(stream) + 1 :])

    sys.addaudithook(watch)
    found = {}
    for number in range(1, LATE + 1):
        file = Path(stream).parent / f"{number:02}.parquet"
        pq.write_table(same_day(number), file)
        opened.clear()
        written.clear()
        before = counted_io()
        record = extend([str(file)], stream, schema() if number == 1 else None, OPTIONS)
        read, put = (now - then for now, then in zip(counted_io(), before, strict=True))
        found[number] = {
            "rows": record.num_rows, "read": read, "written": put, "opened": list(opened),
            "files_written": len(written),
        }  # fmt: skip
    Path(count_to).write_text(json.dumps(found))


def test_an_increment_costs_its_own_size_not_the_historys(tmp_path: Path) -> None:
    """Counted, not timed: bytes by the kernel, files by the interpreter. What grows is the list of
    the files that were taken, and what the screen knows of recent windows: below 500 bytes each."""
    stream, counts = tmp_path / "s", tmp_path / "counts.json"
    process = with_imports_ready().Process(target=_extend_often, args=(str(stream), str(counts)))
    process.start()
    process.join()
    assert process.exitcode == 0
    found = json.loads(counts.read_text())
    early, late = found[str(EARLY)], found[str(LATE)]
    assert 0 <= late["rows"] - early["rows"] <= 2  # a user more has all the support it may have
    for what in ("read", "written"):
        assert 0 <= late[what] - early[what] <= 500 * (LATE - EARLY)
        assert early[what] > 20 * 500  # so that a tenth of an increment would be seen
    assert late["files_written"] == early["files_written"]
    assert len(late["opened"]) == len(early["opened"])
    # Its own files, whose folder is hidden until it is whole, and its parent's manifest.
    committed = {path for path in late["opened"] if path.startswith(f"{INCREMENTS}/0")}
    told = {path.split("/")[1] for path in committed}
    assert told <= {name_increment_folder(LATE - 1), name_increment_folder(LATE)}


def test_an_increment_is_the_same_without_the_rows_of_all_before(tmp_path: Path) -> None:
    """Of the past it reads the state and its parent's manifest: what else was there may be gone."""
    whole, gone, files = tmp_path / "whole", tmp_path / "gone", []
    for number in (1, 2, 3, 4):
        files.append(tmp_path / f"{number}.parquet")
        pq.write_table(same_day(number), files[-1])
    for number, file in enumerate(files[:-1], start=1):
        extend([str(file)], str(whole), schema() if number == 1 else None, OPTIONS)
    shutil.copytree(whole, gone)
    for earlier in (1, 2, 3):
        for path in (gone / INCREMENTS / name_increment_folder(earlier)).iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif earlier < 3 or path.name != MANIFEST_NAME:
                path.unlink()
    for stream in (whole, gone):
        extend([str(files[-1])], str(stream), None, OPTIONS)
    assert open_stream(str(gone)).record(4) == open_stream(str(whole)).record(4)
