"""A profile of some steps, on rank 0: a trace for a viewer and a table for a terminal."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from gmeta.distributed.ranks import Ranks

TRACE_FILE = "trace.json"  # opens in https://ui.perfetto.dev and chrome://tracing
SUMMARY_FILE = "summary.txt"
# A process's first steps make buffers and optimizer state: they are like no others.
SKIPPED_STEPS = 3
SUMMARY_ROWS = 60


class StepProfiler:
    """Records `num_steps` steps after the first few, on rank 0 alone, into `folder`."""

    def __init__(self, folder: Path, num_steps: int, ranks: Ranks) -> None:
        self._folder = folder
        self._active = num_steps > 0 and ranks.rank == 0
        self._written = False
        self._ended = False
        if not self._active:
            return
        on_cuda = ranks.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        self._sort_by = "self_cuda_time_total" if on_cuda else "self_cpu_time_total"
        self._profile = profile(
            activities=activities,
            # One step of warm-up: the profiler's own start-up falls into it.
            schedule=schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=num_steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )

    def __enter__(self) -> "StepProfiler":
        if self._active:
            self._profile.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end()

    def end(self) -> None:
        """Write the profile, if the run ends before all of its steps."""
        if self._active and not self._ended:
            # `with` ends it once more, after the run has said what became of it.
            self._ended = True
            self._profile.stop()

    def step(self) -> None:
        """Count a step; call it after each."""
        if self._active:
            self._profile.step()

    def summary_lines(self) -> Sequence[str]:
        """Return lines on where the profile is, or why there is none."""
        if not self._active:
            return []
        if self._written:
            return [f"profile: {self._folder}  ({SUMMARY_FILE}, {TRACE_FILE})"]
        return [f"no profile: the run ended within the first {SKIPPED_STEPS} steps, which it skips"]

    def _write(self, recorded: "profile") -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        table = recorded.key_averages().table(
            sort_by=self._sort_by, row_limit=SUMMARY_ROWS, max_name_column_width=80
        )
        (self._folder / SUMMARY_FILE).write_text(
            f"torch {torch.__version__}, {torch.get_num_threads()} threads, rank 0\n{table}\n"
        )
        # A viewer that watches the folder must not open half a trace.
        temporary = self._folder / f"tmp-{TRACE_FILE}"
        recorded.export_chrome_trace(str(temporary))
        temporary.rename(self._folder / TRACE_FILE)
        self._written = True
