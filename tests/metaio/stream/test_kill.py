"""Killed at any point, an extension leaves the stream with or without its increment, and the next
one does the rest. METAIO_STREAM_KILLS=2000 tries so many points."""

import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from metaio import DataError
from metaio.format.atomic_folder import lock_writer
from metaio.format.inspection import find_damage
from metaio.prepare.schema.schema_file import parse_schema
from metaio.stream.chain import open_stream
from metaio.stream.extend import extend
from tests.metaio.stream.changing import filling
from tests.metaio.stream.logs import OPTIONS, append, changed, log, schema
from tests.support.processes import with_imports_ready

KILLS = int(os.environ.get("METAIO_STREAM_KILLS", "2"))
# What changes the disk, as the interpreter reports it. Files that Arrow writes are not among it:
# they lie in folders that these events make and name.
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def _extend(stream: str, file: str, last_event: int, count_to: str, how: dict[str, Any]) -> None:
    """Append the file; die at that event, or write down how many there were."""
    seen = 0

    def watch(event: str, _: object) -> None:
        nonlocal seen
        if event in EVENTS:
            seen += 1
            if seen == last_event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    extend([file], stream, None, OPTIONS, **how)
    Path(count_to).write_text(str(seen))


def in_a_process(
    stream: Path, file: Path, last_event: int, how: dict[str, Any] | None = None
) -> int:
    """The exit code, below 0 where it was killed."""
    count = stream.parent / "events"
    process = with_imports_ready().Process(
        target=_extend, args=(str(stream), str(file), last_event, str(count), how or {})
    )
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def test_a_kill_at_any_point_leaves_the_stream_with_the_increment_or_not(tmp_path: Path) -> None:
    stream, base = tmp_path / "s", tmp_path / "base"
    # With rows that wait for their labels, and others that correct them.
    late = {"label": {"column": "click", "matures": "30h"}}
    waiting = parse_schema(filling().to_json() | late)
    append(stream, log(0, days=2, rows=300), "0.parquet", schema=waiting)
    append(stream, log(2, rows=150), "1.parquet")
    shutil.copytree(stream, base)
    file = tmp_path / "logs" / "2.parquet"
    corrections = changed(log(2, rows=150), "click", [1] * 150).slice(100)
    both = pa.concat_tables([log(3, rows=150), corrections])
    append(stream, both.drop_columns(["city"]), file.name)  # which is filled
    expected = open_stream(str(stream)).newest
    assert expected.report["missing_columns"] == {"city": 200}
    assert expected.report["account"]["corrections"] == 50
    shutil.rmtree(stream)
    shutil.copytree(base, stream)
    assert in_a_process(stream, file, 0) == 0
    num_events = int((tmp_path / "events").read_text())
    assert num_events > 30
    points = random.Random(5).choices(range(1, num_events), k=KILLS)
    # The last events are those around the commit.
    without = 0
    for point in [*points, num_events - 1]:
        shutil.rmtree(stream)
        shutil.copytree(base, stream)
        assert in_a_process(stream, file, point) == -signal.SIGKILL
        found = open_stream(str(stream))
        assert found.numbers in ([1, 2], [1, 2, 3])
        assert all(find_damage(found.dataset(number)) == [] for number in found.numbers)
        if found.numbers == [1, 2]:
            without += 1
            extend([str(file)], str(stream), None, OPTIONS)
        else:  # whoever tries again is told, and what the killed one left goes
            with pytest.raises(DataError, match="was taken into increment 3 already"):
                extend([str(file)], str(stream), None, OPTIONS)
        found = open_stream(str(stream))
        assert found.records[-1] == expected
        # The next one goes on, and nothing half-written is left.
        assert not [p for p in stream.rglob(".*") if p.name.endswith((".partial", ".lock"))]
    assert without > 0


def test_two_writers_do_not_extend_one_stream(tmp_path: Path) -> None:
    append(tmp_path / "s", log(0), schema=schema())
    with (
        lock_writer(tmp_path / ".s.extend.lock", "it"),
        pytest.raises(DataError, match=f"is writing {tmp_path}/s. Wait for it"),
    ):
        append(tmp_path / "s", log(1))
