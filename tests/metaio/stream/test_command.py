"""`gmeta prepare --extend` and `gmeta inspect` of a stream, as a user runs them."""

import re
import shutil
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet
import pytest

from metaio.errors import DataError
from tests.metaio.stream.logs import append, changed, log, schema
from tests.support.commands import gmeta, succeed

SCHEMA = """
[task]
column = "user"
[label]
column = "click"
[time]
column = "time"
[[single]]
column = "city"
vocabulary = 1
[episodes]
query_rows = 2
min_rows = 3
"""


def test_a_stream_of_several_labels_is_shown(tmp_path: Path) -> None:
    stream, rules = tmp_path / "s", tmp_path / "schema.toml"
    rules.write_text(SCHEMA.replace("[label]", '[[label]]\ncolumn = "buy"\n[[label]]'))
    rows = log(0)
    pyarrow.csv.write_csv(rows.append_column("buy", rows["click"]), tmp_path / "0.csv")
    first = ("--schema", rules, "--extend", stream, tmp_path / "0.csv")
    assert gmeta("prepare", *first).returncode == 0
    shown = gmeta("inspect", stream)
    assert "\ntask user, labels buy, click\n" in shown.stdout, shown.stderr


def test_csv_files_become_increments_that_inspect_shows(tmp_path: Path) -> None:
    stream, rules = tmp_path / "s", tmp_path / "schema.toml"
    rules.write_text(SCHEMA)
    for day in range(2):
        pyarrow.csv.write_csv(log(day), tmp_path / f"{day}.csv")
    first = ("--schema", rules, "--extend", stream, tmp_path / "0.csv")
    result = succeed("prepare", *first)
    found = "increment 1: 400 rows of 40 tasks, 0 of them returning; window from 380 to 86,067"
    assert found in result.stderr
    assert "table city: 6 new ids, 7 of 65,536 rows in use" in result.stderr
    assert f"extended: {stream}  (look inside: gmeta inspect {stream})" in result.stderr
    assert gmeta("prepare", "--extend", stream, tmp_path / "1.csv").returncode == 0
    shown = succeed("inspect", stream)
    assert ": 2 increments, time in s, gate 5%\ntask user, label click\n" in shown.stdout
    assert all(len(line.rstrip()) <= 80 for line in shown.stdout.splitlines())
    assert [line.split()[0] for line in shown.stdout.splitlines() if "400" in line] == ["1", "2"]
    verified = gmeta("inspect", stream, "--verify")
    assert verified.stdout == f"{stream} is intact: 2 increments, every checksum matches.\n"
    again = gmeta("prepare", "--extend", stream, tmp_path / "1.csv")
    assert again.returncode == 2
    assert "was taken into increment 2 already" in again.stderr
    ordinary = succeed("inspect", stream / "increments" / "000002")
    assert "gate" in ordinary.stdout


def test_verifying_a_stream_names_the_damage_of_every_increment(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    for day in range(3):
        append(stream, log(day), schema=schema())
    places = [
        f"{stream}/increments/{number:06d}/{name}"
        for number, name in enumerate(
            ("manifest.json", "train/blocks.parquet", "vocabulary/item.parquet"), start=1
        )
    ]
    places.insert(2, f"{stream}/increments/000002/gate/00000.rows.parquet")
    places.append(f"{stream}/state/000003/table-item.arrow")
    for place in places:
        Path(place).write_bytes(b"nothing")
    result = gmeta("inspect", stream, "--verify")
    assert result.returncode == 1
    assert [line.split()[0].rstrip(":") for line in result.stdout.splitlines()] == places


def test_quarantine_ends_with_3_and_one_line(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    append(stream, log(0), schema=schema())
    pyarrow.csv.write_csv(log(0, seed=3).slice(0, 5), tmp_path / "old.csv")
    result = gmeta("prepare", "--extend", stream, tmp_path / "old.csv")
    assert result.returncode == 3, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "quarantined" in line]
    assert line.startswith(f"error: input {tmp_path}/old.csv is quarantined: all of its 5 rows")
    told = f"quarantined before 2: {tmp_path}/old.csv: all of its 5 rows"
    assert told in gmeta("inspect", stream).stdout


def test_inspect_says_what_became_of_every_row(tmp_path: Path) -> None:
    stream = tmp_path / "s"
    append(stream, changed(log(0), "click", [7, *log(0)["click"].to_pylist()[1:]]), schema=schema(),
           label_ranges={"click": (0.0, 1.0)})  # fmt: skip
    for name, table in (("old", log(0, seed=3).slice(0, 5)), ("again", log(0).slice(0, 0))):
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
        assert gmeta("prepare", "--extend", stream, tmp_path / f"{name}.parquet").returncode == 3
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "old.parquet").read_bytes()[:-9])
    (tmp_path / "wide.csv").write_text("a,b\n1,2\n3,4\n")
    for name in ("cut.parquet", "wide.csv"):
        assert gmeta("prepare", "--extend", stream, tmp_path / name).returncode == 3
    shutil.copy(next((tmp_path / "logs").iterdir()), tmp_path / "copy.parquet")
    assert gmeta("prepare", "--extend", stream, tmp_path / "copy.parquet").returncode == 3
    found = re.search(r"400 rows read: (.*); the sum closes\n(.*)\n(.*)\n(.*)\n",
                      gmeta("inspect", stream).stdout)  # fmt: skip
    assert found is not None
    parts = found[1].split(", ")
    assert "1 quarantined" in parts
    assert sum(int(part.split()[0]) for part in parts) == 400
    assert found.groups()[1:] == (
        "quarantined: 2 files, 2 rows and some that cannot be counted",
        *("doubled: 1 file, 400 rows", "waiting: 2 files, 5 rows"),
    )


def test_a_range_of_labels_that_is_none_is_refused(tmp_path: Path) -> None:
    result = gmeta("prepare", "--extend", tmp_path / "s", "in.csv", "--label-range", "click=0")
    assert (result.returncode, result.stderr) == (
        2,
        "error: --label-range is 'click=0'; LABEL=LEAST:MOST is needed, such as click=0:1. Correct "
        "it\n",
    )
    with pytest.raises(DataError, match="names clik; labels are click"):
        append(tmp_path / "s", log(0), schema=schema(), label_ranges={"clik": (0.0, 1.0)})


def test_what_comes_along_is_asked_for_and_told_when_it_is_left_out(tmp_path: Path) -> None:
    stream, late = tmp_path / "s", tmp_path / "late.csv"
    append(stream, log(0), "late.parquet", schema=schema())
    late.touch()
    result = gmeta("prepare", "--extend", stream, late)
    assert (result.returncode, result.stderr) == (
        3,
        f"error: input {late} is quarantined: input {late} is empty. Give newer files and --along "
        f"{late}, as gmeta follow does\n",
    )
    pyarrow.csv.write_csv(log(0, seed=3), late)
    pyarrow.parquet.write_table(log(1), tmp_path / "new.parquet")
    result = succeed("prepare", "--extend", stream, tmp_path / "new.parquet", "--along", late)
    assert (
        f"left out: {late}: the inputs mix Parquet and text files. Prepare from one format at a "
        "time\n"
    ) in result.stderr
    told = f"quarantined before 2: {late}: the inputs mix"
    assert told in gmeta("inspect", stream).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in", "--extend", "s", "--recipe", "synthetic"], "--recipe has no effect with --extend"),
        (["in", "out", "--schema", "x", "--accept"], "--accept has no effect with --schema"),
        (["in.csv", "--extend", "s", "--spark"], "--spark was given in.csv; it reads Parquet"),
    ],
)
def test_options_that_do_not_fit_a_stream_are_refused(arguments: list[str], message: str) -> None:
    result = gmeta("prepare", *arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_schema_with_a_stream_is_not_for_a_dataset(tmp_path: Path) -> None:
    rules, out = tmp_path / "schema.toml", tmp_path / "out"
    rules.write_text(SCHEMA + "[stream]\nttl = 86400\n")
    result = gmeta("prepare", "--schema", rules, "in.csv", out)
    assert result.returncode == 2
    assert f"{rules} has [stream], which is for increments" in result.stderr
