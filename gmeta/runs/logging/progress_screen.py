"""Readings on standard error: a progress bar on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Sequence
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gmeta.platform.verbosity import is_quiet, is_verbose
from gmeta.runs.logging.logger import Logger, Reading, RunInfo, Status

# In the files, and with -v.
HIDDEN_VALUES = ("dense_lr", "sparse_lr", "dense_grad_norm", "grad_norm")


@final
class ProgressScreen(Logger):
    """The screen of a run while it trains; nothing with -q."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, markup=False, quiet=is_quiet())
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("step {task.completed}/{task.total}"),
            TextColumn("{task.fields[reading]}"),
            TimeRemainingColumn(),
            console=self._console,
            # In a file each move of the bar would be one more line.
            disable=not sys.stderr.isatty(),
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
            self._console.print(*lines, sep="\n", highlight=False, soft_wrap=True)

    def log(self, reading: Reading) -> None:
        """Show the reading beside the bar; of a split, or without a bar, on its own line."""
        hidden = () if is_verbose() else HIDDEN_VALUES
        texts = "  ".join(
            f"{name} {_format_value(name, value)}"
            for name, value in reading.values.items()
            if name not in hidden
        )
        self._progress.update(self._bar, completed=reading.step, reading=texts)
        if self._progress.disable or "valid" in reading.values:
            # In a file, where rich takes 80 columns for granted, a reading stays one line.
            self._console.print(
                f"epoch {reading.epoch + 1}  step {reading.step}  {texts}",
                highlight=False,
                soft_wrap=True,
            )

    def end(self, status: Status) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


def _format_value(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {_format_value(key, item)}" for key, item in value.items())
    if value is None:
        return "-"
    if name == "samples_per_s":
        return f"{value:,.0f}"
    return f"{value:.1%}" if name.endswith("share") else f"{value:.4f}"
