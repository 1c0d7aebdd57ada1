"""A run on leased shards goes on with twice the ranks: no episode is lost or trained twice. The
split counts as too large for memory here, so each shard is a whole stored block."""

import json
from pathlib import Path
from unittest import mock

import pytest

from gmeta.antdt.manifests.shard_manifest import load_manifest
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.config.train_config import DataConfig, OuterConfig, RunConfig, TrainConfig
from gmeta.distributed.ranks import Ranks
from gmeta.training import train
from gmeta_models.model_config import ModelConfig
from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic
from tests.antdt.faults.counting import COUNTS_FILE, count_tasks
from tests.antdt.faults.test_training_job import check_lineage, checkpoints
from tests.antdt.trained import trained_ranges
from tests.distributed.harness import on_ranks

NUM_TASKS = 200
ROWS_PER_TASK = 8
TASKS_PER_BLOCK = 10


def train_on_rank(ranks: Ranks, config: TrainConfig) -> int:
    """Trains with a count of each task's steps beside the weights; the ranks there were."""
    count_tasks()
    with mock.patch("gmeta.feeds.leased.DEFAULT_CACHE_BYTES", 1):
        train(config, ranks)
    return ranks.world_size


@pytest.mark.distributed
def test_a_run_that_stops_inside_an_epoch_goes_on_with_twice_the_ranks(tmp_path: Path) -> None:
    path, run = str(tmp_path / "data"), tmp_path / "run"
    prepare_synthetic(
        path,
        SyntheticConfig(
            num_tasks=NUM_TASKS, num_items=60, min_rows=ROWS_PER_TASK, max_rows=ROWS_PER_TASK,
            query_rows=4, block_rows=ROWS_PER_TASK * TASKS_PER_BLOCK,
        ),
    )  # fmt: skip
    server = ShardServer(ServiceConfig("127.0.0.1:0"))

    def config(epochs: int, max_steps: int) -> TrainConfig:
        return TrainConfig(
            model=ModelConfig(hidden=(16,), options={"bottom": (8,)}, embedding_dim=4),
            data=DataConfig(path=path, source="service", service=server.address, tasks_per_step=16),
            outer=OuterConfig(sparse_lr=0.01),
            run=RunConfig(
                dir=str(run), epochs=epochs, max_steps=max_steps, checkpoint_every_steps=2
            ),
        )

    assert on_ranks(2, train_on_rank, config(1, 5)) == [2, 2]
    (entry,) = load_manifest(checkpoints(run)[-1]).datasets
    assert entry.spec.units_per_shard == TASKS_PER_BLOCK
    assert 0 < sum(end - start for start, end in trained_ranges(entry)) < NUM_TASKS
    assert on_ranks(4, train_on_rank, config(2, 0)) == [4] * 4
    server.stop(0.0)
    assert check_lineage(run) == 2
    counts = json.loads((checkpoints(run)[-1] / COUNTS_FILE).read_text())
    assert list(counts.values()) == [2] * NUM_TASKS
