"""The training step of two TorchRec ranks on the CPU: our table arithmetic against fbgemm's.

Both learners live in the same two processes and take turns, so a slow minute falls on both. The
figure is how many times faster the whole step is, taken as `gmeta train` takes it: ids that travel
while another step computes, lookup, AlltoAll, MAML, backward, updates."""

import os
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import environment, finish, interleaved, make_parser, print_table, spread_of
from _synthetic import even_sizes, random_batch, single_id_features

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.sharding import ShardingConfig
from gmeta.config.train_config import OuterConfig, TrainConfig
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import start_ranks
from gmeta.distributed.sharding import shard_learner
from gmeta.distributed.steps import batch_without_tasks, iterate_steps
from gmeta.learner import MetaLearner
from gmeta_models import InputSizes, ModelConfig, build_model

NUM_FEATURES, WIDTH, ROWS_PER_TABLE, TASKS = 26, 32, 100_000, 128
STEPS = 8  # of a learner in a row: the ids of the first have no step to travel in


def step_seconds(rank: int, world_size: int, folder: str, sizes: list[int], rounds: int) -> None:
    """One rank: time both variants at every support size; rank 0 saves seconds a step."""
    # As torchrun would: start_ranks reads them.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    torch.set_num_threads(1)
    ranks = start_ranks("cpu", 300, store=dist.FileStore(os.path.join(folder, "store"), world_size))
    features = single_id_features(NUM_FEATURES, ROWS_PER_TABLE)
    model = ModelConfig(
        name="dlrm", embedding_dim=WIDTH, hidden=(256, 128), options={"interaction": "cat"}
    )
    config = TrainConfig(
        model=model,
        algorithm=AlgorithmConfig(name="fomaml", adapt_embeddings=False),
        outer=OuterConfig(sparse_optimizer="rowwise_adagrad"),
    )

    def variant(stock: bool, rows: int) -> Any:
        """A learner of its own, and the function that times its steps."""
        learner = MetaLearner(
            build_model(model, InputSizes(NUM_FEATURES, 0, 0)), config.algorithm, "bce"
        )
        sharding = ShardingConfig(exchange="torchrec" if stock else "host")
        sharded = shard_learner(learner, features, replace(config, sharding=sharding), ranks)
        optimizer = build_optimizer(sharded, config.outer)
        share = even_sizes(TASKS // world_size, rows)
        # Other rows on each rank, as in training.
        seeds = range(10 * rank, 10 * rank + STEPS)
        batches = [random_batch(features, share, share, seed) for seed in seeds]
        arranged = [learner.collate(batch) for batch in batches]
        idle = learner.collate(batch_without_tasks(features))

        def run() -> float:
            """Seconds a step, of the slower rank."""
            # Together, so that the time holds no waiting for a rank that came late.
            dist.barrier(group=ranks.control)
            start = torch.tensor([time.perf_counter()], dtype=torch.float64)
            for episodes, totals in iterate_steps(iter(arranged), idle, ranks, sharded=sharded):
                optimizer.begin_step(0, 1)
                sharded(episodes, weight=world_size / totals.num_terms).backward()
                optimizer.step()
            elapsed = torch.tensor([time.perf_counter()], dtype=torch.float64) - start
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=ranks.control)
            return elapsed.item() / STEPS

        # Warm-up: the first collectives open their connections.
        run()
        return run

    results = {
        rows: interleaved({"ours": variant(False, rows), "stock": variant(True, rows)}, rounds)
        for rows in sizes
    }
    if rank == 0:
        torch.save(results, os.path.join(folder, "results.pt"))
    dist.barrier(group=ranks.control)
    # gloo's threads may abort an interpreter that ends in order.
    os._exit(0)


def main() -> None:
    options = make_parser(__doc__).parse_args()
    rounds = options.rounds or (5 if options.quick else 9)
    sizes = [10] if options.quick else [5, 10, 20]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(step_seconds, (2, folder, sizes, rounds), nprocs=2)
        results = torch.load(os.path.join(folder, "results.pt"))
    ratios, lines = {}, []
    for rows, seconds in results.items():
        ours, stock = spread_of(seconds["ours"]), spread_of(seconds["stock"])
        ratios[rows] = stock.median / ours.median
        lines.append(
            [
                f"S = Q = {rows}",
                f"{ours.median * 1e3:.1f}",
                f"{stock.median * 1e3:.1f}",
                f"{ratios[rows]:.2f}",
            ]
        )
    print(
        f"{NUM_FEATURES} features x {WIDTH}, {TASKS} tasks a step, FOMAML, 2 ranks, 1 thread each"
    )
    print_table(["rows", "ours ms", "fbgemm ms", "speed-up"], lines)
    finish(
        "torchrec_step",
        {
            "speedup_vs_stock": min(ratios.values()),
            "speedup_by_rows": ratios,
            "environment": environment(("torch", "torchrec")),
        },
    )


if __name__ == "__main__":
    main()
