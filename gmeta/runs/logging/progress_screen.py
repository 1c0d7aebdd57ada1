"""Readings on standard error: a progress bar on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Sequence
from typing import Any, final

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from gmeta.platform.folding_console import FoldingConsole, TimeLeftColumn
from gmeta.platform.verbosity import is_plain, is_quiet, is_verbose
from gmeta.runs.logging.logger import Logger, Reading, RunInfo, Status

# In the files, and with -v.
HIDDEN_VALUES = ("dense_lr", "sparse_lr", "dense_grad_norm", "grad_norm")
# Beside the bar there is room for little more.
ON_THE_BAR = ("loss", "samples_per_s")


@final
class ProgressScreen(Logger):
    """The screen of a run while it trains; nothing with -q."""

    def __init__(self) -> None:
        is_terminal = sys.stderr.isatty()
        self._console = FoldingConsole(folds=is_terminal, stderr=True, quiet=is_quiet())
        self._progress = Progress(
            # All columns together fit into 80.
            BarColumn(bar_width=8),
            TextColumn("step {task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[reading]}"),
            TimeLeftColumn(),
            console=self._console,
            # In a file each move of the bar would be one more line.
            disable=not is_terminal or is_plain(),
        )

    def begin(self, run: RunInfo) -> None:
        """Show the bar."""
        self._bar = self._progress.add_task(
            "", total=run.total_steps, completed=run.done_steps, reading=""
        )
        self._progress.start()

    def show_lines(self, lines: Sequence[str]) -> None:
        """Show lines that belong to the run, not to a step."""
        if lines:
            self._console.print(*lines, sep="\n")

    def log(self, reading: Reading) -> None:
        """Show the reading beside the bar; of a split, or without a bar, on its own line."""
        hidden = () if is_verbose() else HIDDEN_VALUES
        texts = {
            name: _format_reading(name, value)
            for name, value in reading.values.items()
            if name not in hidden
        }
        beside = "  ".join(text for name, text in texts.items() if name in ON_THE_BAR)
        fields: dict[str, Any] = {"reading": beside} if beside else {}
        self._progress.update(self._bar, completed=reading.step, **fields)
        if self._progress.disable or "valid" in reading.values:
            self._console.print(
                f"epoch {reading.epoch + 1}  step {reading.step}  {'  '.join(texts.values())}"
            )

    def end(self, status: Status) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


def _format_reading(name: str, value: Any) -> str:
    """Return a value in words; metrics.jsonl has its key."""
    text = _format_value(name, value)
    if name == "samples_per_s":
        return f"{text} samples/s"
    words = {"valid": "validation", "data_wait_share": "waiting for data"}
    return f"{words.get(name, name.replace('_', ' '))} {text}"


def _format_value(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {_format_value(key, item)}" for key, item in value.items())
    if value is None:
        return "-"
    if name == "samples_per_s":
        return f"{value:,.0f}"
    return f"{value:.1%}" if name.endswith("share") else f"{value:.4f}"
