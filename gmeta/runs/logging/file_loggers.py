"""Readings in the run folder: JSON lines, and TensorBoard's event files."""

import json
import threading
from typing import Any, TextIO, final

from gmeta.runs.logging.logger import Logger, Reading, RunInfo, Status
from gmeta.runs.run_folder import RunFolder


@final
class JsonLines(Logger):
    """metrics.jsonl, which every run has: resuming and `gmeta runs` read it."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def begin(self, run: RunInfo) -> None:
        """Open the file to append to it."""
        self._file = RunFolder(run.folder).metrics.open("a")

    def log(self, reading: Reading) -> None:
        """Write a line."""
        line = {"step": reading.step, "epoch": reading.epoch, **reading.values}
        # Flushed: a killed run keeps every line.
        print(json.dumps(line), file=self._file, flush=True)

    def end(self, status: Status) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


@final
class TensorBoard(Logger):
    """Event files in tensorboard/: scalars, and the config as hyperparameters."""

    def __init__(self) -> None:
        self._writer: Any = None

    def begin(self, run: RunInfo) -> None:
        """Open a file, with the config as the run's hyperparameters."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = str(RunFolder(run.folder).tensorboard)
        # First: its thread writes as soon as it is made.
        self._excepthook = threading.excepthook
        threading.excepthook = self._hide_disk_errors
        # Readings of a killed run after its last checkpoint are dropped.
        self._writer = SummaryWriter(folder, purge_step=run.done_steps + 1)
        # Not add_hparams, which writes a folder of its own: HPARAMS shows these scalars then.
        for summary in hparams(run.parameters(), {"loss": 0.0, f"valid/{run.metric}": 0.0}):
            self._writer.file_writer.add_summary(summary)

    def log(self, reading: Reading) -> None:
        """Add each number to its curve."""
        for name, value in reading.scalars().items():
            self._writer.add_scalar(name, value, reading.step)

    def end(self, status: Status) -> None:
        """Close the file."""
        if self._writer is not None:
            try:
                self._writer.close()  # which writes the rest
            finally:
                threading.excepthook = self._excepthook

    def _hide_disk_errors(self, args: threading.ExceptHookArgs) -> None:
        # On a full disk no traceback of TensorBoard's thread: the next write raises the error.
        of_tensorboard = type(args.thread).__module__.startswith("tensorboard.")
        if not (of_tensorboard and isinstance(args.exc_value, OSError)):
            self._excepthook(args)
