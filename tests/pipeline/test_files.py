"""Files that are late, empty, without rows, doubled, mended or archived: each is trained once or
told, and none keeps a loop from the partitions that come after it."""

import json
import math
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from gmeta.errors import GMetaError
from gmeta.pipeline.pipeline import Pipeline
from gmeta.pipeline.pipeline_status import read_status
from gmeta.pipeline.stage_outcome import StageOutcome
from metaio.stream.chain import open_stream
from metaio.stream.quarantine import list_quarantine
from tests.pipeline.days import DAY, write_day, write_loop
from tests.pipeline.following import loop_of, run_stage
from tests.pipeline.kills import left_at_each_change, restored
from tests.support.commands import succeed


def judged_at_once(arguments: list[str], log: Path) -> int:
    """Prepare as it is; every other stage is done, and refuses the candidate."""
    if arguments[0] == "prepare":
        return run_stage(arguments, log)
    root = log.parent
    root.mkdir(parents=True, exist_ok=True)
    if arguments[0] == "export":
        (root / "model").mkdir()
        (root / "model" / "config.json").touch()
    if arguments[0] == "judge":
        (root / "verdict.json").write_text(json.dumps({"verdict": "refuse", "reasons": ["no"]}))
        return 3
    return 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_loop(tmp_path, max_refused=100)
    return tmp_path


def new_loop(root: Path) -> Pipeline:
    return loop_of(root / "stream.toml", judged_at_once)


def prepared(loop: Pipeline, most: int = 60) -> list[StageOutcome]:
    """What `prepare` did until nothing was left to do."""
    found = []
    for _ in range(most):
        done = loop.step()
        if done is None:
            return found
        found += [done] if done.stage == "prepare" else []
    raise AssertionError(f"the loop goes in a circle: {found}")


def numbers(loop: Pipeline) -> list[int]:
    return [done.increment for done in prepared(loop)]


def inputs(root: Path) -> list[list[str]]:
    """The files of each increment, by what follows the folder of the logs."""
    records = open_stream(str(root / "stream")).records
    logs = f"{root}/logs/"
    return [[one["name"].removeprefix(logs) for one in r.report["inputs"]] for r in records]


def rows(root: Path, number: int) -> int:
    return int(open_stream(str(root / "stream")).record(number).report["rows"])


def test_two_equal_partitions_without_rows_are_taken_along_with_the_next(root: Path) -> None:
    for day in range(4):
        write_day(root / "logs", day)
    for day in (1, 2):
        part = root / "logs" / f"day=00{day}" / "part-0.parquet"
        pq.write_table(pq.read_table(part).slice(0, 0), part)
    loop = new_loop(root)
    assert numbers(loop) == [1, 0, 0, 2]
    assert inputs(root)[1] == [f"day=00{n}/part-0.parquet" for n in (3, 1, 2)]
    assert list_quarantine(root / "stream") == []
    assert prepared(new_loop(root)) == []


def test_a_refused_file_that_is_mended_is_taken_and_is_told_no_more(root: Path) -> None:
    for day in range(2):
        write_day(root / "logs", day)
    part = root / "logs/day=001/part-0.parquet"
    good = pq.read_table(part)
    spoilt = good.set_column(1, "item", pa.array([None] * len(good), pa.int64()))
    pq.write_table(spoilt, part)
    pq.write_table(good.slice(0, 60), root / "logs/day=001/part-1.parquet")
    pq.write_table(good.slice(60), root / "logs/day=001/part-2.parquet")
    loop = new_loop(root)
    assert numbers(loop) == [1, 0, 2]  # the others are taken without it
    assert inputs(root)[1] == ["day=001/part-1.parquet", "day=001/part-2.parquet"]
    assert read_status(loop).quarantined == 1
    assert "column item has 240 nulls" in read_status(loop).refused_files[str(part)]
    assert prepared(new_loop(root)) == []  # also one that begins reads the notes
    part.unlink()
    assert numbers(loop) == []
    assert read_status(loop).quarantined == 0
    write_day(root / "logs", 2)
    part = root / "logs/day=002/part-0.parquet"
    good = pq.read_table(part)
    pq.write_table(good.set_column(1, "item", pa.array([None] * len(good), pa.int64())), part)
    assert numbers(loop) == [0]
    pq.write_table(good, part)
    assert numbers(loop) == [3]
    (left,) = list_quarantine(root / "stream")
    expected = [("day=001", "part-0.parquet")]
    assert [Path(one["name"]).parts[-2:] for one in left["files"]] == expected
    assert read_status(loop).quarantined == 0


def test_what_an_empty_file_is_filled_with_is_taken_and_another_content_is_told(root: Path) -> None:
    """A writer opens its file, and _SUCCESS of another one comes before its rows do."""
    folder = write_day(root / "logs", 0)
    table = pq.read_table(folder / "part-0.parquet")
    pq.write_table(table.slice(0, 120), folder / "part-0.parquet")
    (folder / "part-1.parquet").touch()
    loop = new_loop(root)
    assert numbers(loop) == [1]
    pq.write_table(table.slice(120), folder / "part-1.parquet")
    assert (numbers(loop), numbers(new_loop(root))) == ([2], [])
    pq.write_table(table, folder / "part-1.parquet")
    for again in (loop, new_loop(root)):
        assert numbers(again) == []
        assert read_status(again).refused_files == {
            str(folder / "part-1.parquet"): "it was rewritten since increment 2 took it, and "
            "increments do not change. Give new rows in a file of a new name"
        }
    assert (rows(root, 1), rows(root, 2)) == (120, 120)
    pq.write_table(table.slice(120), folder / "part-1.parquet")
    assert numbers(loop) == []
    assert read_status(loop).quarantined == 0


def test_before_the_first_increment_a_mended_schema_takes_what_was_refused(root: Path) -> None:
    for day, users in enumerate((40, 10)):
        part = write_day(root / "logs", day, users=users) / "part-0.parquet"
        table = pq.read_table(part)
        nulls = pa.array([None, *table["item"].to_pylist()[1:]])
        pq.write_table(table.set_column(1, "item", nulls) if day == 0 else table, part)
    schema = root / "schema.toml"
    right = schema.read_text()
    schema.write_text(right.replace("min_rows = 4", "min_rows = 7"))
    loop = new_loop(root)
    assert (numbers(loop), numbers(new_loop(root))) == ([0, 0], [])
    assert (read_status(loop).held, read_status(loop).quarantined) == (1, 1)
    assert loop.missing_input() == (
        f"no increment yet: {root}/logs/day=000/part-0.parquet is refused: column item has 1 null; "
        'none are allowed. Remove those rows, or allow it in the schema: null = "unknown"'
    )
    schema.write_text(right.replace("vocabulary = 2", 'vocabulary = 2\nnull = "unknown"'))
    assert numbers(loop) == [1, 2]
    assert (rows(root, 1), rows(root, 2)) == (240, 60)
    assert loop.missing_input() == ""


def test_a_number_that_became_text_is_refused_and_strictly_waits_for_a_person(root: Path) -> None:
    parts = [write_day(root / "logs", day) / "part-0.parquet" for day in range(2)]
    loop, strict = new_loop(root), loop_of(root / "stream.toml", judged_at_once, is_strict=True)
    table = pq.read_table(parts[1])
    parts[1].unlink()
    assert numbers(strict) == [1]
    for place, name, role in ((3, "price", "dense"), (4, "click", "label")):
        text = table.set_column(place, name, table[name].cast(pa.string()))
        pq.write_table(text, parts[1])
        with pytest.raises(GMetaError, match=f"ended with 2: {role} column {name} has type string"):
            prepared(strict)
        assert numbers(loop) == [0]
        (why,) = read_status(loop).refused_files.values()
        assert why.startswith(f"{role} column {name} has type string")
    pq.write_table(table, parts[1])
    assert numbers(loop) == [2]


def spoil(folder: Path, kind: str) -> None:
    part = folder / "part-0.parquet"
    table = pq.ParquetFile(part).read()
    csv = folder / "part-0.csv"
    if kind == "cut":
        part.write_bytes(part.read_bytes()[:-300])
    elif kind == "another column":
        pq.write_table(
            table.rename_columns(["user", "thing", "slot", "price", "click", "at"]), part
        )
    elif kind == "labels":
        pq.write_table(table.set_column(4, "click", pa.array([2.0] * 240)), part)
    else:
        part.unlink()
        pyarrow.csv.write_csv(table, csv)
        csv.write_bytes(csv.read_bytes() + b"1,2\n")


@pytest.mark.parametrize("kind", ["cut", "another column", "labels", "ragged"])
def test_a_damaged_partition_is_refused_and_the_next_one_is_taken(root: Path, kind: str) -> None:
    for day in range(3):
        write_day(root / "logs", day)
    spoil(root / "logs/day=001", kind)
    loop = new_loop(root)
    assert numbers(loop) == [1, 0, 2]
    assert inputs(root)[1] == ["day=002/part-0.parquet"]
    assert read_status(loop).quarantined == 1
    assert "1 file quarantined, and in no increment" in read_status(loop).alarms()
    (note,) = list_quarantine(root / "stream")
    known = {"another column": 240, "labels": 240, "ragged": 241}
    assert note["rows"] == known.get(kind)


def test_a_damaged_file_beside_good_ones_is_refused_alone(root: Path) -> None:
    folder = write_day(root / "logs", 0)
    table = pq.ParquetFile(folder / "part-0.parquet").read()
    for part in range(5):
        pq.write_table(table.slice(48 * part, 48), folder / f"part-{part}.parquet")
    spoil(folder, "cut")
    pq.write_table(table.slice(192).drop_columns(["item"]), folder / "part-4.parquet")
    loop = new_loop(root)
    assert numbers(loop) == [0, 1]
    assert inputs(root) == [[f"day=000/part-{part}.parquet" for part in (1, 2, 3)]]
    assert rows(root, 1) == 144
    assert sorted(read_status(loop).refused_files) == [
        str(folder / f"part-{part}.parquet") for part in (0, 4)
    ]


def test_a_window_moved_ahead_is_an_alarm_and_can_be_set_back(root: Path) -> None:
    for day in range(6):
        folder = write_day(root / "logs", day)
        if day == 1:  # taken by hand, before anybody compared times
            part = folder / "part-0.parquet"
            table = pq.ParquetFile(part).read()
            at = [*table["at"].to_pylist()[:-1], 4_102_444_800]
            pq.write_table(table.set_column(5, "at", pa.array(at)), part)
    loop = new_loop(root)
    assert loop.step() is not None
    succeed("prepare", "--extend", root / "stream", root / "logs/day=001", "--accept")
    assert numbers(loop) == [0, 0, 0, 0]
    status = read_status(loop)
    assert (status.held, status.waiting) == (4, 0)
    stuck = (
        "4 partitions late, as the next window begins at 2100-01-01 00:00:01, in the future. If a "
        f"wrong row has moved it there, set it back: gmeta prepare --extend {root}/stream --begin "
        "TIME FILE..."
    )
    assert status.stuck == stuck
    assert stuck in status.alarms()
    more = ("--begin", 2 * DAY, root / "logs/day=002")
    succeed("prepare", "--extend", root / "stream", *more)
    assert numbers(loop) == [4, 5, 6]
    assert read_status(loop).stuck == ""
    assert [rows(root, number) for number in range(1, 7)] == [240] * 6


def test_files_that_come_late_are_part_of_the_next_increment(root: Path) -> None:
    late_rows_are_kept(root)
    first = write_day(root / "logs", 0)
    loop = new_loop(root)
    assert numbers(loop) == [1]
    late = pq.read_table(first / "part-0.parquet").slice(0, 30)
    late = late.set_column(0, "user", pa.array(late["user"].to_numpy() + 1))
    pq.write_table(late, first / "part-1.parquet")
    assert (numbers(loop), numbers(loop)) == ([0], [])
    assert (read_status(loop).held, read_status(loop).waiting) == (1, 0)
    second = write_day(root / "logs", 1)
    assert numbers(loop) == [2]
    pq.write_table(late.slice(0, 20), first / "part-2.parquet")
    # Of the last seconds of its day, as parts that are late by little are: a row is newer.
    newer = late["at"].to_numpy().copy()
    newer[-1] = 2 * DAY - 1
    pq.write_table(late.set_column(5, "at", pa.array(newer)), second / "part-1.parquet")
    assert numbers(loop) == [0, 0]
    (second / "part-2.parquet").touch()
    assert numbers(loop) == [0]
    write_day(root / "logs", 2)
    assert numbers(loop) == [3]
    assert inputs(root) == [
        ["day=000/part-0.parquet"],
        ["day=001/part-0.parquet", "day=000/part-1.parquet"],
        [
            "day=002/part-0.parquet",
            *("day=000/part-2.parquet", "day=001/part-1.parquet", "day=001/part-2.parquet"),
        ],
    ]
    report = open_stream(str(root / "stream")).record(2).report
    assert (report["rows"], report["late"], report["too_late"]) == (270, 30, 0)
    # What is new is an increment, whatever its folder.
    table = pq.read_table(write_day(root / "other", 3) / "part-0.parquet")
    pq.write_table(table, first / "part-3.parquet")
    assert numbers(loop) == [4]


def test_a_whole_partition_that_comes_late_is_part_of_the_next_increment(root: Path) -> None:
    write_day(root / "logs", 1)
    loop = new_loop(root)
    assert numbers(loop) == [1]
    write_day(root / "logs", 0)
    assert (numbers(loop), numbers(loop)) == ([0], [])
    assert (read_status(loop).held, read_status(loop).quarantined) == (1, 0)
    write_day(root / "logs", 2)
    assert numbers(new_loop(root)) == [2]
    assert inputs(root)[1] == ["day=002/part-0.parquet", "day=000/part-0.parquet"]


def test_what_is_held_and_spoils_the_next_partition_is_left_out_of_it(root: Path) -> None:
    """A value that is not finite among rows that only encoding sees."""
    late_rows_are_kept(root)
    for day in range(2):
        folder = write_day(root / "logs", day)
    loop = new_loop(root)
    assert numbers(loop) == [1, 2]
    spoilt(folder)
    assert numbers(loop) == [0]
    assert (read_status(loop).held, read_status(loop).quarantined) == (1, 0)
    write_day(root / "logs", 2)
    assert numbers(loop) == [3]
    assert inputs(root)[2] == ["day=002/part-0.parquet"]
    assert list(read_status(loop).refused_files) == [str(folder / "part-1.parquet")]
    assert read_status(loop).held == 0


def late_rows_are_kept(root: Path) -> None:
    schema = root / "schema.toml"
    schema.write_text(schema.read_text().replace("[stream]", f"[stream]\nlate = {3 * DAY}"))


def spoilt(folder: Path) -> None:
    """A part that comes late, and that no increment can be made with."""
    late = pq.read_table(folder / "part-0.parquet").slice(0, 30)
    late = late.set_column(3, "price", pa.array([math.nan] * 30))
    pq.write_table(late, folder / "part-1.parquet")


def test_killed_around_its_commit_what_is_late_is_taken_or_refused_once(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    late_rows_are_kept(root)
    for day in range(2):
        folder = write_day(root / "logs", day)
    assert numbers(new_loop(root)) == [1, 2]
    spoilt(folder)
    assert numbers(new_loop(root)) == [0]
    write_day(root / "logs", 2)
    asked: list[list[str]] = []

    def noted(arguments: list[str], log: Path) -> int:
        asked.append(arguments)
        raise GMetaError("not yet")

    with pytest.raises(GMetaError, match="not yet"):
        loop_of(root / "stream.toml", noted).step()
    copies = tmp_path_factory.mktemp("left")
    left = left_at_each_change(asked[0], root, copies)
    assert len(left) > 9
    for copy in left[-9:]:
        restored(copy.folder, root)
        loop = new_loop(root)
        prepared(loop)
        assert inputs(root)[2:] == [["day=002/part-0.parquet"]]
        write_day(root / "logs", 3)
        assert numbers(loop) == [4]
        assert list(read_status(loop).refused_files) == [str(folder / "part-1.parquet")]


def test_a_quiet_partition_is_taken_together_with_the_next(root: Path) -> None:
    for day in range(4):
        part = write_day(root / "logs", day) / "part-0.parquet"
        if day in (1, 2):  # one row of each user, none of whom was there before
            rare = pq.read_table(part).take(list(range(0, 240, 6)))
            users = pa.array(rare["user"].to_numpy() + 1_000)
            pq.write_table(rare.set_column(0, "user", users), part)
    loop = new_loop(root)
    assert numbers(loop) == [1, 0, 0, 2]
    assert inputs(root)[1] == [f"day=00{n}/part-0.parquet" for n in (3, 1, 2)]
    assert rows(root, 2) == 240 + 40 + 40
    assert read_status(loop).held == 0


def as_csv(table: pa.Table, path: Path) -> None:
    pyarrow.csv.write_csv(table, path)


def as_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path)


@pytest.mark.parametrize(("write", "ending"), [(as_csv, "csv"), (as_parquet, "parquet")])
def test_parts_without_rows_are_taken_with_the_others(
    root: Path, write: Callable[[pa.Table, Path], None], ending: str
) -> None:
    """Spark writes one for each task that had no row; their bytes are all the same."""
    for day in range(2):
        folder = write_day(root / "logs", day)
        table = pq.read_table(folder / "part-0.parquet")
        (folder / "part-0.parquet").unlink()
        for part in (0, 1, 3):
            write(table.slice(0, 0), folder / f"part-{part}.{ending}")
        write(table, folder / f"part-2.{ending}")
        (folder / f"part-4.{ending}").touch()
    loop = new_loop(root)
    assert numbers(loop) == [1, 2]
    assert (rows(root, 1), rows(root, 2)) == (240, 240)
    assert inputs(root)[1] == [f"day=001/part-{n}.{ending}" for n in range(5)]
    empty = root / "logs/day=002"
    for day in (2, 3):
        empty = root / f"logs/day=00{day}"
        empty.mkdir()
        write(table.slice(0, 0), empty / f"part-0.{ending}")
        (empty / f"part-1.{ending}").touch()
        (empty / "_SUCCESS").touch()
    (empty / f"part-0.{ending}").unlink()  # files of no byte alone
    assert numbers(loop) == [0, 0]
    assert (read_status(loop).held, read_status(loop).quarantined) == (3, 0)


def test_parts_without_rows_whose_types_say_nothing_are_taken(root: Path) -> None:
    """As pandas writes an empty frame of columns of objects."""
    parts = [write_day(root / "logs", day) / "part-0.parquet" for day in range(4)]
    names = pq.read_schema(parts[0]).names
    nothing = pa.table({name: pa.nulls(0) for name in names})
    pq.write_table(nothing, parts[0].with_name("part-.parquet"))  # the first of its folder
    pq.write_table(nothing, parts[1].with_name("part-1.parquet"))
    pq.write_table(nothing, parts[2])
    loop = new_loop(root)
    assert numbers(loop) == [1, 2, 0, 3]
    assert [rows(root, number) for number in (1, 2, 3)] == [240] * 3
    assert inputs(root) == [
        ["day=000/part-.parquet", "day=000/part-0.parquet"],
        ["day=001/part-0.parquet", "day=001/part-1.parquet"],
        ["day=003/part-0.parquet", "day=002/part-0.parquet"],
    ]
    assert list_quarantine(root / "stream") == []


def test_archives_are_taken_once(root: Path) -> None:
    config = root / "stream.toml"
    config.write_text(config.read_text().replace("day=*", "*.zip"))
    (root / "logs").mkdir()
    for day in range(2):
        table = pq.read_table(write_day(root / "days", day) / "part-0.parquet")
        with zipfile.ZipFile(root / f"logs/{day}.zip", "w") as archive:
            pyarrow.csv.write_csv(table, root / "part.csv")
            archive.write(root / "part.csv", "in/part.csv")
            archive.writestr("in/empty.csv", "")
    loop = new_loop(root)
    assert numbers(loop) == [1, 2]
    assert numbers(new_loop(root)) == []
    assert inputs(root) == [["0.zip", "0.zip/in/part.csv"], ["1.zip", "1.zip/in/part.csv"]]
    # Another archive of the same table: its rows are not trained twice.
    with zipfile.ZipFile(root / "logs/2.zip", "w") as archive:
        archive.write(root / "part.csv", "other.csv")
    with zipfile.ZipFile(root / "logs/3.zip", "w"):
        pass
    assert numbers(loop) == [0, 0]
    assert read_status(loop).refused_files == {
        f"{root}/logs/2.zip": f"input {root}/logs/2.zip/other.csv was taken into increment 2 "
        f"already, as {root}/logs/1.zip/in/part.csv: its rows would be trained twice. Leave it out"
    }


def test_a_doubled_file_is_left_out_and_the_others_are_taken(root: Path) -> None:
    first = write_day(root / "logs", 0)
    second = write_day(root / "logs", 1)
    shutil.copy(first / "part-0.parquet", second / "part-1.parquet")
    shutil.copy(second / "part-0.parquet", second / "part-2.parquet")
    loop = new_loop(root)
    assert numbers(loop) == [1, 0, 2]
    assert inputs(root)[1] == ["day=001/part-0.parquet"]
    found = sorted(read_status(loop).refused_files)
    assert found == [str(second / f"part-{part}.parquet") for part in (1, 2)]
    assert rows(root, 2) == 240


def test_names_with_the_marks_of_globs_are_names(root: Path) -> None:
    for day in range(2):
        folder = write_day(root / "logs", day)
        table = pq.read_table(folder / "part-0.parquet")
        (folder / "part-0.parquet").unlink()
        pyarrow.csv.write_csv(table.slice(0, 100), folder / "part[0]*?.csv")
        pyarrow.csv.write_csv(table.slice(100), folder / "part00.csv")
    assert numbers(new_loop(root)) == [1, 2]
    assert (rows(root, 1), rows(root, 2)) == (240, 240)
