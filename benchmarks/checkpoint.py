"""How long a checkpoint stops training: written in the background against written at once.

One rank trains Meta-DLRM and takes checkpoints in both ways by turns. `stall_ratio` is the time for
which the background one stops the steps as a share of the other's; `blocked_share` is that time as
a share of how long it takes until it is on disk, while the steps go on; `stall_to_plain_copy`
compares it with a plain copy of the tables in memory.
"""

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from _common import (
    environment,
    finish,
    interleaved,
    make_parser,
    print_table,
    seconds_of,
    spread_of,
)
from _synthetic import even_sizes, random_batch, single_id_features

from gmeta.adaptation.config import AlgorithmConfig
from gmeta.build import build_learner
from gmeta.checkpoints.writer import CheckpointWriter
from gmeta.config import OuterConfig, RunConfig, TrainConfig
from gmeta.outer.optimizers import build_optimizer
from gmeta.parallel.ranks import start_ranks
from gmeta.parallel.sharding import shard_learner, table_shards
from gmeta.runs.progress import Progress
from gmeta_models import ModelConfig

NUM_FEATURES, WIDTH, TASKS, ROWS = 10, 32, 64, 10


def main() -> None:
    options = make_parser(__doc__).parse_args()
    rounds = options.rounds or (3 if options.quick else 7)
    rows_per_table = 100_000 if options.quick else 400_000
    torch.set_num_threads(1)
    ranks = start_ranks("cpu", 300)
    features = single_id_features(NUM_FEATURES, rows_per_table)
    model = ModelConfig(
        name="dlrm", embedding_dim=WIDTH, hidden=(256, 128), options={"interaction": "cat"}
    )
    config = TrainConfig(model=model, algorithm=AlgorithmConfig(name="fomaml"), outer=OuterConfig())
    learner = build_learner(features, model, config.algorithm, "bce")
    sharded = shard_learner(learner, features, config, ranks)
    optimizer = build_optimizer(sharded, config.outer)
    sizes = even_sizes(TASKS, ROWS)
    episodes = learner.arrange(random_batch(features, sizes, sizes, seed=0))

    def step() -> None:
        """A step of training, always on the same episodes."""
        optimizer.begin_step(0, 1)
        sharded(episodes, weight=1 / TASKS).backward()
        optimizer.step()

    shards = [s.tensor for t in table_shards(sharded).values() for s in t.local_shards()]
    # Made once: touching new memory for the first time would be timed with the copy.
    buffers = [torch.empty_like(shard) for shard in shards]

    def copy_s() -> float:
        """Seconds of a plain copy of the tables."""
        return seconds_of(lambda: [b.copy_(s) for b, s in zip(buffers, shards, strict=True)])

    with tempfile.TemporaryDirectory() as folder:
        in_background, at_once = (
            CheckpointWriter(
                Path(folder, str(background)),
                sharded,
                optimizer,
                replace(config, run=RunConfig(checkpoint_in_background=background)),
                ranks,
            )
            for background in (True, False)
        )
        written_s: list[float] = []

        def background_s() -> float:
            """How long `save` held the steps up; they go on while it is being written."""
            began_s = time.perf_counter()
            in_background.save(Progress(step=1))
            stall_s = time.perf_counter() - began_s
            while in_background.is_writing:
                step()
            written_s.append(time.perf_counter() - began_s)
            in_background.finish()
            return stall_s

        def at_once_s() -> float:
            """How long `save` held the steps up, which is as long as writing takes."""
            return seconds_of(lambda: at_once.save(Progress(step=1)))

        step()
        first_s = background_s()  # makes the buffers of the copy
        written_s.clear()
        measures = {"background": background_s, "at once": at_once_s, "copy": copy_s}
        seconds = {name: spread_of(one) for name, one in interleaved(measures, rounds).items()}
    mib = sum(shard.nbytes for shard in shards) / 2**20
    print(f"{NUM_FEATURES} tables of {rows_per_table:,} rows x {WIDTH} ({mib:.0f} MiB), 1 rank")
    print_table(
        ["the step waits", "median ms", "lowest", "highest"],
        [
            [name, *(f"{value * 1e3:.0f}" for value in (s.median, s.lowest, s.highest))]
            for name, s in [("background, first", spread_of([first_s])), *seconds.items()]
        ],
    )
    background = seconds["background"].median
    finish(
        "checkpoint",
        {
            "stall_ratio": background / seconds["at once"].median,
            "blocked_share": background / spread_of(written_s).median,
            "stall_to_plain_copy": background / seconds["copy"].median,
            "environment": environment(("torch", "torchrec")),
        },
    )
    # Native threads may abort a normal exit, see gmeta.cli.
    os._exit(0)


if __name__ == "__main__":
    main()
