"""Where commands print: what a file gets, what a terminal gets."""

import io
import logging
import math
import re
import sys
from pathlib import Path

import pytest
from rich.table import Table

from gmeta.cli.commands.console import (
    make_console,
    make_table,
    print_result,
    show_progress,
    show_table,
)
from gmeta.platform.verbosity import JSON_VARIABLE, QUIET, VERBOSITY_VARIABLE

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


def test_a_narrow_terminal_folds_cells_but_no_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    console = make_console()
    show_table(console, wide_table())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 60
    console.print(LONG)
    assert capsys.readouterr().out == f"{LONG}\n"


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
        # The time so far, then the time that is left.
        shape = r"1234567/12345678 \d:\d\d:\d\d \+ [-\d:]+ left *"
        assert any(re.search(shape, line) for line in lines)
    monkeypatch.setattr(sys, "stderr", other := Terminal())
    with show_progress("of another rank", rank=1) as advance:
        advance(1, 2)
    assert other.getvalue() == ""


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
