"""A learner of one rank whose large table is in memory or in a file, for placement.py."""

import time

import torch
from _synthetic import SPREAD, even_sizes, random_batch, single_id_features

from gmeta.adaptation.algorithms.algorithm import TableSizes
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.sharding import ShardingConfig
from gmeta.config.train_config import OuterConfig, TrainConfig
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import start_ranks
from gmeta.distributed.sharding import shard_learner
from gmeta.distributed.steps import batch_without_tasks, iterate_steps
from gmeta.distributed.tables.cached_group import CachedGroup
from gmeta.distributed.tables.row_mover import HostMover
from gmeta.distributed.tables.rows_to_send import RowsToSend
from gmeta.learner import MetaLearner
from gmeta_models import InputSizes, ModelConfig, build_model

WARM_ROWS = 100_000  # at a time, for less memory
SMALL_TABLES = (201, 25, 9, 51, 3_001)
WIDTH, TASKS, ROWS_OF_TASK, SKEW = 64, 128, 10, 15.0
BYTES_OF_ROW = 4 * (WIDTH + 1)  # with row-wise Adagrad
TURN_STEPS = 10
CACHE_SHARE = 0.1


class Steps:
    """A learner of one rank, and turns of steps that it takes; with a folder, a file there has the
    large table."""

    def __init__(self, rows: int, turns: int, folder: str = "") -> None:
        torch.set_num_threads(1)
        self.ranks = start_ranks("cpu", 300)
        features = single_id_features(1 + len(SMALL_TABLES), (rows, *SMALL_TABLES))
        placements = ("f0=file",) if folder else ()
        config = TrainConfig(
            model=ModelConfig(name="dlrm", embedding_dim=WIDTH, hidden=(128, 64)),
            algorithm=AlgorithmConfig(name="maml", adapt_embeddings=False),
            outer=OuterConfig(sparse_optimizer="rowwise_adagrad"),
            sharding=ShardingConfig(
                placements=placements, cache_share=CACHE_SHARE, file_dir=folder
            ),
        )
        torch.manual_seed(0)
        sizes = InputSizes(len(features.single), 0, 0)
        tables = TableSizes(len(features.single), WIDTH)
        model = build_model(config.model, sizes)
        self.learner = MetaLearner(model, config.algorithm, "bce", tables)
        self.sharded = shard_learner(self.learner, features, config, self.ranks)
        self.optimizer = build_optimizer(self.sharded, config.outer)
        self.idle = self.learner.collate(batch_without_tasks(features))
        share = even_sizes(TASKS, ROWS_OF_TASK)
        self.batches = [
            random_batch(features, share, share, seed, SKEW) for seed in range(turns * TURN_STEPS)
        ]
        for group in self.sharded.local.exchange.groups:
            if isinstance(group, CachedGroup):
                self.cached = group
                popular = torch.arange(int(CACHE_SHARE * rows) - 1) * SPREAD % rows
                mover = HostMover([group])
                for some in popular.split(WARM_ROWS):
                    mover.admit([group], [RowsToSend(some, None)], lambda: True)

    def counts(self) -> tuple[int, int]:
        """Distinct rows of the large table that steps needed, and those that were in the cache."""
        return self.cached.slots.num_asked, self.cached.slots.num_found

    def turn(self, number: int) -> tuple[float, float, list[float]]:
        """Seconds a step, elapsed and of processors, and the losses, of one turn's steps."""
        losses = []
        own = self.batches[number * TURN_STEPS :][:TURN_STEPS]
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for episodes, totals in iterate_steps(
            map(self.learner.collate, own), self.idle, self.ranks, sharded=self.sharded
        ):
            self.optimizer.begin_step(0, 1)
            loss = self.sharded(episodes, weight=1 / totals.num_terms)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        return elapsed_s / len(own), cpu_s / len(own), losses
