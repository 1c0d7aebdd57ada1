"""Where commands print: what a file gets, what a terminal gets."""

import pytest
from rich.table import Table

from gmeta.commands.screen import screen, show_table

LONG = "a long line of words, " * 8


def wide_table() -> Table:
    table = Table("key", "meaning", box=None)
    table.add_row("first", "word " * 30)
    return table


def test_a_row_of_a_table_is_one_line_of_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show_table(screen(), wide_table())
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["key", "meaning"]
    assert row.split() == ["first", *["word"] * 30]


def test_a_narrow_terminal_folds_cells_but_no_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    console = screen()
    show_table(console, wide_table())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 60
    console.print(LONG)
    assert capsys.readouterr().out == f"{LONG}\n"


def test_words_are_shown_as_they_are_on_the_stream_that_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for stderr in (False, True):
        screen(stderr=stderr).print("of [bold]/data/[x] 12 'a'")
    shown = capsys.readouterr()
    assert shown.out == shown.err == "of [bold]/data/[x] 12 'a'\n"
