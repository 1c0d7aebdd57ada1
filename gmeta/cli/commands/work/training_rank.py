"""The work of `gmeta train` on each rank, and the summary that rank 0 prints."""

import statistics
from pathlib import Path

from gmeta.cli.commands.console import make_console, print_result
from gmeta.cli.commands.work.rank_process import run_as_rank
from gmeta.config.train_config import TrainConfig
from gmeta.distributed.launch import restarts
from gmeta.distributed.ranks import Ranks
from gmeta.runs.checkpoints.run_mirror import check_new_mirror
from gmeta.runs.checkpoints.selected_checkpoint import best_not_kept
from gmeta.runs.run_folder import CONFIG_FILE, RunFolder
from gmeta.training import train


def train_on_rank(config: TrainConfig, is_new: bool) -> None:
    """Train together with the other ranks; the mirror of a new run must hold none."""
    if is_new:
        # Under torchrun no process has checked it before the ranks start.
        check_new_mirror(config.run.mirror, Path(config.run.dir))

    def work(ranks: Ranks) -> None:
        used, allowed = restarts()
        if used and ranks.rank == 0:
            make_console(stderr=True).print(f"restart {used} of {allowed}: all ranks begin again")
        try:
            folder = train(config, ranks)
        # A full disk, mostly: with some space the run goes on from its checkpoint.
        except OSError as error:
            # Only a run that has begun can be resumed.
            if (Path(config.run.dir) / CONFIG_FILE).exists():
                error.add_note("go on with --resume")
            raise
        if ranks.rank == 0:
            _print_outcome(folder)

    # Whether all ranks were started alike is asked as the config is resolved.
    run = config.run
    run_as_rank(run.device, run.collective_timeout_s, {}, work)


def _print_outcome(folder: RunFolder) -> None:
    # Each of these numbers may be missing in a line: the log may have been edited.
    history = folder.read_metrics()
    speeds, waits = (
        [line[key] for line in history if isinstance(line.get(key), int | float)]
        for key in ("samples_per_s", "data_wait_share")
    )
    speed = statistics.median(speeds) if speeds else None
    wait = statistics.mean(waits) if waits else None
    print_result(
        run=folder.root,
        step=max((line["step"] for line in history), default=0),
        loss=next((one["loss"] for one in reversed(history) if "loss" in one), None),
        valid=next((one["valid"] for one in reversed(history) if "valid" in one), None),
        samples_per_s=speed,
        data_wait_share=wait,
    )
    parts = ("metrics.jsonl", "tensorboard/", "checkpoints/")
    folders = ", ".join(part for part in parts if (folder.root / part).exists())
    lines = [f"\ntrained: {folder.root}  ({folders})"]
    # A finished run that is resumed takes no step, and its log may be gone.
    if speed is not None and wait is not None:
        lines += [f"speed: {speed:,.0f} samples/s, {wait:.1%} of the time waiting for data"]
    if line := best_not_kept(folder):
        lines += [line]
    lines += [f"evaluate it: gmeta evaluate {folder.root}"]
    make_console(stderr=True).print("\n".join(lines))
