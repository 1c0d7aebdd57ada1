"""Where commands print: what a file gets, what a terminal gets."""

import io
import logging
import math
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from rich import progress as rich_progress
from rich.table import Table

from gmeta.cli.commands.console import (
    _RateColumn,
    make_console,
    make_table,
    print_result,
    show_progress,
    show_table,
)
from gmeta.platform.folding_console import TimeLeftColumn
from gmeta.platform.verbosity import JSON_VARIABLE, PLAIN_VARIABLE, QUIET, VERBOSITY_VARIABLE

LONG = "a long line of words, " * 8


def wide_table() -> Table:
    table = Table("key", "meaning", box=None)
    table.add_row("first", "word " * 30)
    return table


def test_a_row_of_a_table_is_one_line_of_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show_table(make_console(), wide_table())
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["key", "meaning"]
    assert row.split() == ["first", *["word"] * 30]


def test_a_narrow_terminal_folds_cells_and_lines_at_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    console = make_console()
    show_table(console, wide_table())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 60
    console.print(LONG)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert " ".join(lines).split() == LONG.split()  # no word in two
    # What may be copied stays in one piece.
    command = "gmeta train runs/a-long-name/config.json 'item_features.columns=[*]' run.dir=b"
    console.print(f"to try next: {command}\nshort")
    assert capsys.readouterr().out == f"to try next:\n  {command}\nshort\n"
    # Nothing of a file or a log is folded.
    monkeypatch.setenv(PLAIN_VARIABLE, "1")
    make_console().print(LONG)
    assert capsys.readouterr().out == f"{LONG}\n"


def test_the_title_of_a_narrow_table_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    table = make_table("What this table of two short columns says", "a", "b", text=())
    table.add_row("1", "2")
    show_table(make_console(), table)
    assert capsys.readouterr().out.splitlines()[0] == "What this table of two short columns says"


@pytest.mark.parametrize("columns", ["20", "50"])
def test_a_table_wider_than_the_terminal_loses_no_digit_and_no_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    table = make_table("", "run", "algorithm", "steps", "best auc", text=("run", "algorithm"))
    table.add_row("runs/a-long-name/trials/0004", "maml", "1,234,567,890", "0.123456")
    show_table(console := make_console(), table)
    name, *others = (lines := capsys.readouterr().out.splitlines())[3].split()
    assert others == ["maml", "1,234,567,890", "0.123456"]
    assert name + lines[4].strip() == "runs/a-long-name/trials/0004"
    assert console.width == int(columns)


def test_words_are_shown_as_they_are_on_their_stream(capsys: pytest.CaptureFixture[str]) -> None:
    for stderr in (False, True):
        make_console(stderr=stderr).print("of [bold]/data/[x] 12 'a'")
    shown = capsys.readouterr()
    assert shown.out == shown.err == "of [bold]/data/[x] 12 'a'\n"


class Terminal(io.StringIO):
    """One that says so."""

    def isatty(self) -> bool:
        """It is."""
        return True


@pytest.mark.parametrize("verbosity", ["", QUIET])
def test_progress_fits_into_80_columns_and_is_for_a_terminal_that_wants_it(
    monkeypatch: pytest.MonkeyPatch, verbosity: str
) -> None:
    monkeypatch.setenv(VERBOSITY_VARIABLE, verbosity)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stream)
        with show_progress("scoring a-run-of-a-name", rank=0) as advance:
            advance(1_234_567, 12_345_678)
        shown = stream.getvalue()
        if verbosity == QUIET or not stream.isatty():
            assert shown == ""
            continue
        lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).replace("\r", "\n").splitlines()
        assert max(map(len, lines)) <= 80
        # The time so far; neither a rate nor the time left is known yet.
        assert any(re.search(r"1234567/12345678 \d:\d\d:\d\d *$", line) for line in lines)
    monkeypatch.setattr(sys, "stderr", other := Terminal())
    with show_progress("of another rank", rank=1) as advance:
        advance(1, 2)
    assert other.getvalue() == ""


def test_a_bar_tells_rate_and_time_left_once_they_are_known() -> None:
    now_s = iter(range(100))
    bars = rich_progress.Progress(get_time=lambda: next(now_s), disable=True)
    bars.update(bars.add_task("reading", total=1000), completed=10)
    bars.update(bars.task_ids[0], completed=60)
    (task,) = bars.tasks
    assert (str(_RateColumn().render(task)), str(TimeLeftColumn().render(task))) == (
        f"{task.speed:.3g}/s",
        f"{timedelta(seconds=round(task.time_remaining or 0))} left",
    )
    assert task.time_remaining


def test_with_plain_progress_is_a_line_for_each_tenth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PLAIN_VARIABLE, "1")
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with show_progress("reading") as advance:
        for done in range(0, 2001, 50):
            advance(done, 2000)
    shown = stream.getvalue()
    lines = shown.splitlines()
    assert lines[0] == "reading: 50 of 2,000 in 0:00:00"
    assert [line.split()[1] for line in lines[1:]] == [f"{n:,}" for n in range(200, 2001, 200)]
    assert not re.search(r"[\r\x1b]", shown)


def test_a_result_is_one_line_of_json_and_what_is_no_number_is_null(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_result(nobody="asked")
    assert capsys.readouterr().out == ""
    monkeypatch.setenv(JSON_VARIABLE, "1")
    print_result(out=Path("a"), scores=[0.5, math.nan], by={1: math.inf})
    make_console().print("for people")
    shown = capsys.readouterr()
    assert shown.out == '{"out": "a", "scores": [0.5, null], "by": {"1": null}}\n'
    assert shown.err == "for people\n"


def test_fbgemm_s_warnings_alone_are_left_out_and_no_faulty_line_of_a_program_fails() -> None:
    def is_kept(**said: object) -> bool:
        return bool(logging.getLogger().filter(logging.makeLogRecord(said)))

    assert is_kept(msg="%d tasks", args=("ten",))
    assert not is_kept(msg="_fbgemm_torch_compat_table has no entry for 1.6.0 of FBGEMM")
