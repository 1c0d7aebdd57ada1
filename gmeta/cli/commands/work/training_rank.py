"""`gmeta train` as a rank, and what rank 0 says at the end."""

import statistics
from pathlib import Path

from gmeta.cli.commands.console import make_console, print_result
from gmeta.cli.commands.work.rank_process import run_as_rank
from gmeta.config.train_config import TrainConfig
from gmeta.distributed.launch import restarts
from gmeta.distributed.ranks import Ranks
from gmeta.runs.checkpoints.choice import best_not_kept
from gmeta.runs.checkpoints.run_mirror import check_new_mirror
from gmeta.runs.run_folder import CONFIG_FILE, RunFolder
from gmeta.train import train


def train_on_rank(config: TrainConfig, is_new: bool) -> None:
    """Train together with the other ranks; a new run needs a mirror that holds none."""
    if is_new:
        # Under torchrun no launcher has asked before.
        check_new_mirror(config.run.mirror, Path(config.run.dir))

    def work(ranks: Ranks) -> None:
        used, allowed = restarts()
        if used and ranks.rank == 0:
            make_console(stderr=True).print(f"restart {used} of {allowed}: all ranks begin again")
        try:
            folder = train(config, ranks)
        except OSError as error:  # as of a full disk
            if (Path(config.run.dir) / CONFIG_FILE).exists():  # the run has begun
                error.add_note("go on with --resume")
            raise
        if ranks.rank == 0:
            _print_outcome(folder)

    # Whether all ranks were started alike is asked as the config is resolved.
    run = config.run
    run_as_rank(run.device, run.collective_timeout_s, {}, work)


def _print_outcome(folder: RunFolder) -> None:
    # Numbers that every logged step has, unless its line was edited.
    history = folder.read_metrics()
    speeds, waits = (
        [line[key] for line in history if isinstance(line.get(key), int | float)]
        for key in ("samples_per_s", "data_wait_share")
    )
    speed = statistics.median(speeds) if speeds else None
    wait = statistics.mean(waits) if waits else None
    print_result(
        {
            "run": folder.root,
            "step": max((line["step"] for line in history), default=0),
            "loss": next((one["loss"] for one in reversed(history) if "loss" in one), None),
            "valid": next((one["valid"] for one in reversed(history) if "valid" in one), None),
            "samples_per_s": speed,
            "data_wait_share": wait,
        }
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
