"""Consoles of the commands: text as it is, lines of any length, tables in columns."""

import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

from rich import box
from rich import progress as rich_progress
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gmeta.platform.folding_console import FoldingConsole, TimeLeftColumn
from gmeta.platform.verbosity import is_json, is_plain, is_quiet, result_stream

# Rich assumes 80 columns for a file or a pipe and folds: a folded cell can neither be read nor
# found by a script.
COLUMNS_OF_A_FILE = 250
# Columns of text fold to no less than this many characters: rich would fold to one letter a line.
FOLDED_WIDTH = 16


def make_console(*, stderr: bool = False) -> Console:
    """Return a console for results, or for notes on standard error, which -q hides."""
    # With --json standard output has the result alone, so that a script can parse it.
    is_note, stderr = stderr, stderr or is_json()
    stream = sys.stderr if stderr else sys.stdout
    is_known = stream.isatty() or "COLUMNS" in os.environ
    return FoldingConsole(
        folds=is_known,
        stderr=stderr,
        quiet=is_note and is_quiet(),
        width=None if is_known and not is_plain() else COLUMNS_OF_A_FILE,
    )


def print_result(**result: Any) -> None:
    """Print a command's result as one line of JSON on standard output, if --json is given."""
    if is_json():
        stream = result_stream()
        stream.write(json.dumps(_to_json_value(result), default=str) + "\n")
        stream.flush()


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _to_json_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(one) for one in value]
    # JSON has neither NaN nor infinities.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show_table(console: Console, table: RenderableType) -> None:
    """Print a table or a group of them; text folds where the terminal is too narrow."""
    terminal = console.width
    for part in table.renderables if isinstance(table, Group) else [table]:
        if isinstance(part, Table):
            # Lines longer than the terminal are better than numbers without digits or lost columns.
            console.width = max(terminal, _least_width(console, part))
            # By rich it would fold to the width of its table, which may be a few characters.
            if part.title:
                console.print(Text(str(part.title), style="table.title"), soft_wrap=False)
            title, part.title = part.title, None
            console.print(part, soft_wrap=False)
            part.title = title
            console.width = terminal
        else:
            console.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))


def _least_width(console: Console, table: Table) -> int:
    """Return the least width that shows all digits of a table's numbers, and enough of its text."""
    wide = console.options.update_width(COLUMNS_OF_A_FILE)
    for column in table.columns:
        measurements = (
            Measurement.get(console, wide, one) for one in (column.header, *column.cells)
        )
        widest = max(one.maximum for one in measurements)
        column.overflow = "fold"
        column.min_width = column.width or (widest if column.no_wrap else min(widest, FOLDED_WIDTH))
    # The borders and the padding that rich adds to the columns.
    return sum(column.min_width or 0 for column in table.columns) + 3 * len(table.columns) + 1


def make_table(title: str, *heads: str, text: Collection[str]) -> Table:
    """Return an empty table: columns in `text` flush left, to be folded; others flush right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        is_text = head in text
        # Folded, not cut: a path has no place to break, and is needed in full to be copied.
        table.add_column(
            head, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold"
        )
    return table


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as text, in the largest unit that leaves at least one."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


@final
class _RateColumn(rich_progress.ProgressColumn):
    """Shows how much of a bar is done in a second, where it is known."""

    def render(self, task: rich_progress.Task) -> Text:
        """Return the text of a bar."""
        rate = task.speed or 0.0
        number = f"{rate / 1000:,.0f}k" if rate >= 10_000 else f"{rate:.3g}"
        return Text(f"{number}/s" if rate else "")


def progress_bars() -> rich_progress.Progress:
    """Return progress bars on standard error, removed at the end; none with -q or in a file. With
    --plain a line for each tenth, where the total is known."""
    if is_plain():
        return _PlainProgress(disable=True)
    columns = (
        rich_progress.TextColumn("{task.description}"),
        # All columns together fit into 80.
        rich_progress.BarColumn(bar_width=8),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        _RateColumn(),
        TimeLeftColumn(),
    )
    is_shown = sys.stderr.isatty() and not is_quiet()
    return rich_progress.Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not is_shown
    )


@final
class _PlainProgress(rich_progress.Progress):
    """Prints a line for each tenth of a task, for logs."""

    def update(self, task_id: rich_progress.TaskID, **fields: Any) -> None:
        """Take in how far the task is."""
        task = next(one for one in self.tasks if one.id == task_id)
        before, total = task.completed, fields.get("total", task.total)
        super().update(task_id, **fields)
        tenth = int(10 * task.completed / total) if total else 0
        if total and (before == 0 or tenth > int(10 * before / total)) and task.completed > before:
            elapsed = timedelta(seconds=round(task.elapsed or 0))
            make_console(stderr=True).print(
                f"{task.description}: {task.completed:,.0f} of {total:,.0f} in {elapsed}"
            )


@contextmanager
def show_progress(what: str, rank: int = 0) -> Iterator[Callable[[int, int], None]]:
    """Yield a function (done, total) that moves one progress bar, on rank 0 alone."""
    if rank:
        yield lambda done, total: None
        return
    with progress_bars() as progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


@contextmanager
def show_phases() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function (phase, done, total) that moves a progress bar for each phase."""
    bars: dict[str, rich_progress.TaskID] = {}
    with progress_bars() as progress:

        def tell(phase: str, done: int, total: int) -> None:
            if phase not in bars:
                bars[phase] = progress.add_task(phase, total=total)
            progress.update(bars[phase], completed=done, total=total)

        yield tell
