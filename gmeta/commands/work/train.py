"""`gmeta train` as a rank, and what rank 0 says at the end."""

import statistics

from gmeta.checkpoints.loader import best_not_kept
from gmeta.commands.screen import screen
from gmeta.commands.work.rank import be_rank
from gmeta.config import TrainConfig
from gmeta.parallel.ranks import Ranks
from gmeta.runs.folder import RunFolder
from gmeta.train import train


def train_on_rank(config: TrainConfig) -> None:
    """Train together with the other ranks."""

    def work(ranks: Ranks) -> None:
        folder = train(config, ranks)
        if ranks.rank == 0:
            _tell(folder)

    be_rank(
        config.run.device,
        config.run.collective_timeout_s,
        work,
        shared_memory=config.sharding.shared_memory,
    )


def _tell(folder: RunFolder) -> None:
    readings = [line for line in folder.read_metrics() if "loss" in line]
    lines = [f"\ntrained: {folder.root}  (metrics.jsonl, tensorboard/, checkpoints/)"]
    if readings:  # a finished run that is resumed takes no step, and its log may be gone
        speed = statistics.median(line["samples_per_s"] for line in readings)
        wait = statistics.mean(line["data_wait_share"] for line in readings)
        lines += [f"speed: {speed:,.0f} samples/s, {wait:.1%} of the time waiting for data"]
    if line := best_not_kept(folder):
        lines += [line]
    lines += [f"evaluate it: gmeta evaluate {folder.root}"]
    screen(stderr=True).print("\n".join(lines))
