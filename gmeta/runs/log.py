"""What a run tells while it trains: JSON lines, TensorBoard, a progress bar or plain lines, all on
rank 0.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from gmeta.parallel.ranks import Ranks, sum_over_ranks
from gmeta.runs.folder import RunFolder


class StepMeter:
    """Loss, speed and data wait of the steps since the last reading, over all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._wait_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._loss = torch.zeros((), device=self._ranks.device)
        self._steps = 0
        self._shown_steps = 0
        self._rows = 0
        self._began = time.perf_counter()

    def add(self, loss: Tensor, num_rows: int, terms_per_shown: float = 1.0) -> None:
        """Count one outer step over all ranks' `num_rows`; does not wait for the device.

        `terms_per_shown` times the loss is what it shows; nothing where it is 0.
        """
        self._loss.add_(loss.detach(), alpha=terms_per_shown)
        self._steps += 1
        self._shown_steps += terms_per_shown > 0
        self._rows += num_rows

    @property
    def steps(self) -> int:
        """Return the number of steps since the last reading."""
        return self._steps

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of what is done inside out of the speed of steps."""
        self._loss.item()  # what the device still has to do does
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began

    def read(self, wait_s: float) -> dict[str, float | None]:
        """Return the means since the last reading. Collective. `wait_s` is the reader's running
        total; `loss` is None if no step had a query row.
        """
        # Waits for the device: the time below covers the work.
        loss = self._loss.item() / max(self._shown_steps, 1)
        elapsed_s = time.perf_counter() - self._began
        # A local loss is weighted by the world size, so the mean over ranks is the global loss.
        loss_sum, wait_sum = sum_over_ranks([loss, wait_s - self._wait_s], self._ranks)
        world_size = self._ranks.world_size
        values: dict[str, float | None] = {
            "loss": loss_sum / world_size if self._shown_steps else None,
            "samples_per_s": self._rows / elapsed_s,
            "data_wait_share": wait_sum / world_size / elapsed_s,
        }
        self._wait_s = wait_s
        self._reset()
        return values


class RunLog:
    """Writes readings to the run folder and shows them; on ranks other than 0 it does nothing."""

    def __init__(self, folder: RunFolder, ranks: Ranks, total_steps: int, done_steps: int) -> None:
        self._active = ranks.rank == 0
        if not self._active:
            return
        self._console = Console(stderr=True, markup=False)
        self._metrics = folder.metrics.open("a")
        # TensorBoard forgets what a killed run showed beyond its last checkpoint.
        self._tensorboard = SummaryWriter(str(folder.tensorboard), purge_step=done_steps + 1)
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
        self._bar = self._progress.add_task("", total=total_steps, completed=done_steps, reading="")

    def __enter__(self) -> "RunLog":
        if self._active:
            self._excepthook = threading.excepthook
            threading.excepthook = self._unless_told
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            threading.excepthook = self._excepthook
            self._progress.stop()
            self._metrics.close()
            self._tensorboard.close()

    def _unless_told(self, args: threading.ExceptHookArgs) -> None:
        """Show no traceback of TensorBoard's thread on a full disk: the next write raises it."""
        of_tensorboard = type(args.thread).__module__.startswith("tensorboard.")
        if not (of_tensorboard and isinstance(args.exc_value, OSError)):
            self._excepthook(args)

    def tell(self, lines: Sequence[str]) -> None:
        """Show lines that belong to the run, not to a step."""
        if self._active and lines:
            self._console.print(*lines, sep="\n", highlight=False, soft_wrap=True)

    def write(self, step: int, epoch: int, values: dict[str, Any]) -> None:
        """Write one reading: a JSON line, scalars for TensorBoard, a line or bar on the screen."""
        if not self._active:
            return
        print(json.dumps({"step": step, "epoch": epoch, **values}), file=self._metrics, flush=True)
        for name, value in values.items():
            scalars = value if isinstance(value, dict) else {"": value}
            for part, scalar in scalars.items():
                if scalar is not None:
                    self._tensorboard.add_scalar(f"{name}/{part}".rstrip("/"), scalar, step)
        shown = "  ".join(f"{name} {_shown(name, value)}" for name, value in values.items())
        self._progress.update(self._bar, completed=step, reading=shown)
        if self._progress.disable or "valid" in values:
            # In a file, where rich takes 80 columns for granted, a reading stays one line.
            self._console.print(
                f"epoch {epoch + 1}  step {step}  {shown}", highlight=False, soft_wrap=True
            )


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {_shown(key, item)}" for key, item in value.items())
    if value is None:
        return "-"
    if name == "samples_per_s":
        return f"{value:,.0f}"
    return f"{value:.1%}" if name.endswith("share") else f"{value:.4f}"
