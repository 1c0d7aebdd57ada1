"""Counts of gmeta inspect against counting by hand; the commands end to end."""

import errno
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from gmeta.cli.commands.prepare import OPTIONS
from gmeta.cli.main import app, load_command
from metaio import open_dataset
from metaio.format.inspection import find_damage, summarise
from tests.metaio.conftest import FEATURES, WriteFn, make_rows
from tests.support.commands import gmeta, succeed


def test_summary_counts_tasks_sizes_and_uses(write: WriteFn) -> None:
    rows = make_rows(50)
    (summary,) = summarise(open_dataset(write({"train": rows}, block_rows=60)))
    assert (summary.num_tasks, summary.num_rows) == (50, len(rows.label_N))
    assert summary.support_T.tolist() == rows.support_lengths_T.tolist()
    assert summary.labels == (("label", pytest.approx(rows.label_N.mean()), len(rows.label_N)),)
    owner = np.tile([0, 1], len(rows.label_N)).repeat(rows.multi_lengths_NM.ravel())
    used = Counter(rows.ids_NF[:, [0, 2]].ravel().tolist())
    used += Counter(rows.multi_ids_V[owner == 1].tolist())
    items = summary.tables[0]
    assert {row: int(n) for row, n in enumerate(items.uses_R) if n} == dict(used)
    assert items.num_used == len(used)
    top = sorted(used.values(), reverse=True)[: round(len(used) / 10)]
    assert items.top_share(10) == pytest.approx(sum(top) / sum(used.values()))
    assert items.unknown_share == used[0] / sum(used.values())


def test_damage_lists_every_broken_file_once(write: WriteFn) -> None:
    path = Path(write({"train": make_rows(40)}, block_rows=60))
    assert find_damage(open_dataset(str(path))) == []
    dataset = open_dataset(str(path))
    (path / "train/00000.dense.parquet").unlink()
    magic = path / "train/00000.multi.parquet"
    magic.write_bytes(b"parq" + magic.read_bytes()[4:])
    found = find_damage(dataset)
    assert len(found) == 2
    assert "00000.dense.parquet does not exist" in found[0]
    assert "00000.multi.parquet" in found[1]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    mistake = result.exception is not None and not isinstance(result.exception, SystemExit)
    return result.exit_code, str(result.exception) if mistake else result.output


def test_inspect_tells_of_bundles_where_there_are_any(write: WriteFn) -> None:
    told = "train: in bundles of 4 episodes that train together"
    for name, tasks in (("bundled", 4), ("plain", 0)):
        path = write({"train": make_rows(40)}, name=name, bundle_tasks=tasks)
        assert (told in gmeta("inspect", path).stdout) == bool(tasks)
        found = json.loads(gmeta("inspect", path, "--json").stdout)
        assert found["splits"]["train"]["bundle_tasks"] == tasks


def test_inspect_prints_tables_and_draws(write: WriteFn, tmp_path: Path) -> None:
    path = write({"train": make_rows(40), "valid": make_rows(0)})
    code, output = run("inspect", path, "--picture", str(tmp_path / "picture.png"))
    assert code == 0
    for word in ("Episodes", "train", "valid", *(table.name for table in FEATURES.tables)):
        assert word in output
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    unknown = {t.name: t.unknown_share for t in summarise(open_dataset(path))[0].tables}
    assert {name for name, share in unknown.items() if share} == {"tag", "age"}
    assert output.endswith(
        "Ids outside the vocabulary (row 0):\n"
        f"  tag: train {100 * unknown['tag']:.1f} %\n  age: train {100 * unknown['age']:.1f} %\n"
        f"picture: {tmp_path}/picture.png\n"
    )
    code, output = run("inspect", path, "--picture", str(tmp_path / "picture.xyz"))
    assert code == 1
    assert output.startswith(f"picture {tmp_path}/picture.xyz is of no known kind: ")
    assert output.endswith(". Name it .png")


def test_a_picture_that_cannot_be_written_whole_leaves_the_one_before(
    write: WriteFn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, picture = write({"train": make_rows(40)}), tmp_path / "pictures" / "sizes.svg"
    assert run("inspect", path, "--picture", str(picture))[0] == 0
    before = picture.read_bytes()
    assert before.startswith(b"<?xml")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    code, output = run("inspect", path, "--picture", str(picture))
    assert (code, output) == (1, "[Errno 28] No space left on device")
    expected = [("sizes.svg", before)]
    assert [(file.name, file.read_bytes()) for file in picture.parent.iterdir()] == expected


def test_inspect_verify_ends_with_code_1_on_damage(write: WriteFn) -> None:
    path = write({"train": make_rows(40)})
    code, output = run("inspect", path, "--verify", "--picture", "x.png")
    assert code == 1
    assert output == "--picture has no effect with --verify, which draws none. Leave one out"
    code, output = run("inspect", path, "--verify")
    assert code == 0
    assert "is intact: 8 files, every checksum matches." in output
    Path(path, "train/00000.dense.parquet").unlink()
    Path(path, "train/blocks.parquet").write_bytes(b"nothing")
    code, output = run("inspect", path, "--verify")
    names = [line.split()[0] for line in output.splitlines()]
    assert code == 1
    assert names == [f"{path}/train/{n}" for n in ("blocks.parquet", "00000.dense.parquet")]


def test_prepare_by_schema_from_the_command_line(tmp_path: Path) -> None:
    table = pa.table({"user": [1, 1, 2, 2], "item": [5, 6, 5, 7], "click": [0, 1, 1, 0]})
    pq.write_table(table, tmp_path / "raw.parquet")
    (tmp_path / "schema.toml").write_text(
        '[task]\ncolumn = "user"\n[label]\ncolumn = "click"\n'
        '[[single]]\ncolumn = "item"\nvocabulary = 1\n[episodes]\nquery_rows = 1\n'
    )
    out = str(tmp_path / "out")
    schema, raw = str(tmp_path / "schema.toml"), str(tmp_path / "raw.parquet")
    code, _ = run("prepare", "--schema", schema, raw, out, "--memory", "300MB")
    assert code == 0
    assert open_dataset(out).splits["train"].num_rows == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out"], "neither --schema nor --recipe is given. Pass one of them"),
        (
            ["in", "out", "--schema", "s.toml", "--seed", "1"],
            "--seed has no effect with --schema: it is for --recipe synthetic, --recipe "
            "synthetic-days, --recipe movielens-1m, --recipe metaemb, --recipe movielens-100k, "
            "--recipe amazon and --recipe next-item. Leave it out",
        ),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], message: str) -> None:
    assert run("prepare", *arguments) == (1, message)


def test_every_option_of_prepare_is_used_by_something() -> None:
    # Options of every command, such as --quiet, hand it no value.
    options = [option for option in load_command("prepare").params if option.expose_value]
    names = {option.name for option in options}
    assert names - {"paths", "overwrite"} == set.union(*OPTIONS.values())


def test_prepare_tells_of_what_a_killed_one_left_and_starts_over(tmp_path: Path) -> None:
    out, left = tmp_path / "clicks", tmp_path / ".clicks.partial"
    (left / "train").mkdir(parents=True)
    (left / "train" / "00000.dense.parquet").write_text("half")
    sizes = ("--tasks", "30", "--items", "40")
    result = succeed("prepare", "--recipe", "synthetic", *sizes, out)
    expected = f"an earlier prepare of {out} was interrupted: starting over, without {left}"
    assert result.stderr.splitlines()[0] == expected
    assert f"prepared: {out}  (look inside: gmeta inspect {out})" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["clicks"]
