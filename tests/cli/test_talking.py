"""-q, -v and --json: every command has them where they mean something."""

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gmeta.cli import main as cli
from gmeta.cli.commands.verbosity_options import WITH_JSON
from gmeta.cli.main import COMMANDS, PANELS, RENAMED, load_command
from tests.support.commands import SMALL_MODEL, evaluate, gmeta, write_config


def commands_of(name: str) -> list[Any]:
    found = load_command(name)
    return [*getattr(found, "commands", {name: found}).values()]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_quiet_and_verbose(name: str) -> None:
    for command in commands_of(name):
        words = [word for option in command.params for word in option.opts]
        assert {"-q", "--quiet", "-v", "--verbose", "--plain"} <= set(words)
        assert len(words) == len(set(words)), words
        assert ("--json" in words) or name not in WITH_JSON


def test_help_groups_the_commands() -> None:
    lines = gmeta("--help").stdout.splitlines()
    words = [re.sub(r"[│╭─╮]", " ", line).split() for line in lines]
    first = [
        one[0] for one in words if one and one[0] in (*PANELS, *(n.split()[0] for n in COMMANDS))
    ]
    expected = [
        word for panel, names in PANELS.items() for word in (panel, *(n.split()[0] for n in names))
    ]
    assert first == list(dict.fromkeys(expected))


def test_a_group_lists_its_commands_and_suggests_them() -> None:
    listed = gmeta("channel", "--help").stdout
    assert all(COMMANDS[f"channel {name}"][:40] in listed for name in ("judge", "promote"))
    refused = gmeta("channel", "juge")
    assert refused.returncode == 2
    assert "no such command 'juge': did you mean 'channel judge'?" in refused.stderr


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_name_answers_with_the_new_one(name: str) -> None:
    assert RENAMED[name] in COMMANDS
    done = gmeta(name, "runs/1")
    expected = f"error: gmeta {name} is gmeta {RENAMED[name]} now\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def found(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    """The one JSON object that a command prints."""
    command, *rest = arguments
    done = evaluate(*rest, "--json") if command == "evaluate" else gmeta(*arguments, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    value: dict[str, Any] = json.loads(line)
    return value


@pytest.mark.distributed
def test_results_are_one_json_object_also_of_two_ranks(tmp_path: Path, click_logs: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    config = write_config(tmp_path / "train.toml", click_logs, run)
    said = found("train", config, *SMALL_MODEL, "--nproc-per-node", "2")
    assert (said["run"], said["step"], said["valid"]) == (str(run), 8, None)
    assert 0.0 < said["loss"] < 2.0
    scored = found("evaluate", run, "--split", "user-cold", "--no-trees")
    assert scored["report"].endswith("report.html")
    assert scored["evaluation"]["headline"] == "auc"
    assert found("export", run, model)["step"] == 8
    told = found("inspect", click_logs)
    assert (told["kind"], told["splits"]["train"]["tasks"]) == ("dataset", 200)
    assert [one["step"] for one in found("inspect", run)["checkpoints"]] == [8]
    assert found("inspect", model)["kind"] == "model"
    next(run.glob("checkpoints/*/*.distcp")).write_bytes(b"")
    assert found("inspect", run, code=1)["problems"]


def test_quiet_leaves_results_and_errors(tmp_path: Path) -> None:
    data = tmp_path / "data"
    made = gmeta("prepare", "--recipe", "synthetic", "--tasks", "20", "--items", "20", data, "-q")
    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
    shown = gmeta("inspect", data, "--quiet")
    assert "Episodes" in shown.stdout
    refused = gmeta("inspect", tmp_path / "none", "-q")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")


def test_verbose_shows_where_an_error_comes_from(tmp_path: Path) -> None:
    assert "Traceback" not in gmeta("inspect", tmp_path / "none").stderr
    assert "Traceback" in gmeta("inspect", tmp_path / "none", "-v").stderr


def test_both_at_once_are_refused() -> None:
    done = gmeta("runs", "-q", "-v")
    assert done.returncode == 2
    assert "--quiet and --verbose are given, which say the opposite: leave one out" in done.stderr


def test_a_process_without_standard_streams_gets_some(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    cli._open_streams()
    print("nobody reads it")
    found = [sys.stdin, sys.stdout, sys.stderr]
    assert [stream.mode for stream in found] == ["r", "w", "w"]
    assert all(os.path.samestat(os.fstat(one.fileno()), os.stat(os.devnull)) for one in found)
    for stream in found:
        stream.close()


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("min_rows = 5", "have fewer rows than min_rows = 5. Lower it under [episodes]"),
        (
            'max_rows = 4\nlonger = "drop"',
            "have more rows than max_rows = 4. Raise it under [episodes], or set "
            'longer = "episodes"',
        ),
        ('by = "time"\nat = 8', "lack support or query. Correct [episodes] at, or [membership]"),
    ],
)
def test_a_schema_that_leaves_out_most_tasks_is_warned_of(
    tmp_path: Path, rule: str, why: str
) -> None:
    sizes = {1: 9, **dict.fromkeys((2, 3, 4), 3)} if "max" not in rule else {1: 3, 2: 9, 3: 9, 4: 9}
    lines = [f"{user},{row},1,{row}" for user, rows in sizes.items() for row in range(rows)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,y,at", *lines]) + "\n")
    by = "" if "by =" in rule else "query_rows = 1\n"
    (tmp_path / "schema.toml").write_text(
        '[task]\ncolumn = "user"\n[label]\ncolumn = "y"\n[time]\ncolumn = "at"\n'
        f'[[single]]\ncolumn = "item"\nhash = 9\n[episodes]\n{by}{rule}\n'
    )
    made = gmeta("prepare", "--schema", "schema.toml", "log.csv", "data", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert f"warning: 3 tasks left out, 1 episode left: they {why}\n" in made.stderr


def test_a_stream_carries_of_every_text_what_its_encoding_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "\N{MINUS SIGN}0.1 10\N{EN DASH}30 \N{EM DASH} ↑↓ ≥3 Zoë caf\udcc3\udca9"
    for encoding, carried in (
        ("ascii", b"-0.1 10-30 - ^v >3 Zo\\xeb caf\xc3\xa9"),
        ("latin-1", b"-0.1 10-30 - ^v >3 Zo\xeb caf\xc3\xa9"),
        ("utf-8", text.encode(errors="surrogateescape")),
    ):
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        cli._open_streams()
        for stream in (sys.stdout, sys.stderr):
            stream.write(text)
            stream.flush()
            assert stream.buffer.getvalue() == carried  # type: ignore[attr-defined]
