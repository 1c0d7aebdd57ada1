"""A console whose lines of text fold at words, where the width of the terminal is known."""

import re
from datetime import timedelta
from textwrap import wrap
from typing import Any, final

from rich.console import Console
from rich.progress import ProgressColumn, Task
from rich.text import Text

from gmeta.platform.verbosity import is_plain

# A command that somebody may copy stays in one piece, on a line of its own if need be.
_COMMAND = re.compile(r"(?:^|(?<=: )|(?<= or ))(?=gmeta[ .]\S)")


@final
class FoldingConsole(Console):
    """Prints strings folded at words to its width, if `folds`; all else as rich does."""

    def __init__(self, *, folds: bool, **options: Any) -> None:
        """Take rich's options; --plain allows neither colours nor what redraws a line."""
        self._folds = folds and not is_plain()
        if is_plain():
            options |= {"force_terminal": False, "color_system": None}
        # No markup: names and notes are other people's words, and may have brackets. No folding by
        # rich, which also folds at the edge of a file: a script finds a line as it was printed.
        super().__init__(markup=False, highlight=False, soft_wrap=True, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print the objects."""
        if self._folds:
            objects = tuple(
                fold_at_words(one, self.width) if isinstance(one, str) else one for one in objects
            )
        super().print(*objects, **options)


@final
class TimeLeftColumn(ProgressColumn):
    """Shows the time left of a bar, where it is known."""

    def render(self, task: Task) -> Text:
        """Return the text of a bar."""
        left_s = None if task.finished else task.time_remaining
        return Text("" if left_s is None else f"{timedelta(seconds=round(left_s))} left")


def fold_at_words(text: str, width: int) -> str:
    """Return the text with lines of at most `width` characters; words and commands stay whole."""
    return "\n".join(part for line in text.split("\n") for part in _fold_line(line, width))


def _fold_line(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    words, *commands = _COMMAND.split(line, maxsplit=1)
    indent = line[: len(line) - len(line.lstrip())]
    folded = wrap(
        words,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return folded + [f"{indent}  {command}" if folded else command for command in commands]
