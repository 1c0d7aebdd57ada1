"""Whole blocks in training: each rank reads its own, the steps are alike at any world size."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from gmeta.config.train_config import DataConfig, RunConfig, TrainConfig
from gmeta.distributed.ranks import Ranks
from gmeta.training import train
from gmeta_models.model_config import ModelConfig
from metaio import Dataset, open_dataset
from metaio.format.block import Block
from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic
from tests.distributed.harness import on_ranks


class Trained(NamedTuple):
    losses: list[float]
    blocks: set[int]


def train_on_rank(ranks: Ranks, config: TrainConfig, folder: Path) -> Trained:
    """Train with whole blocks; what the run read."""
    read_block, blocks = Dataset.read_block, set()

    def noted(self: Dataset, split: str, block: int) -> Block:
        blocks.add(block)
        return read_block(self, split, block)

    Dataset.read_block = noted  # type: ignore[method-assign]
    run = replace(config.run, dir=str(folder / f"blocks-{ranks.world_size}"))
    # Rank 0 looks at the labels of the first block, whoever is to train it.
    with mock.patch("gmeta.training.check_first_labels"):
        trained = train(replace(config, run=run), ranks)
    lines = trained.metrics.read_text().splitlines()
    return Trained([json.loads(line)["loss"] for line in lines], blocks)


@pytest.mark.distributed
def test_ranks_read_their_own_blocks_and_train_the_same_steps(tmp_path: Path) -> None:
    # Episodes of equal length, so that blocks are equal too.
    synthetic = SyntheticConfig(
        num_tasks=64, num_items=60, min_rows=12, max_rows=12, query_rows=5, block_rows=48
    )
    prepare_synthetic(str(tmp_path / "data"), synthetic)
    lengths = open_dataset(str(tmp_path / "data")).splits["train"].blocks.num_episodes_Z.tolist()
    assert len(lengths) % 2 == 0
    assert set(lengths) == {4}
    config = TrainConfig(
        data=DataConfig(path=str(tmp_path / "data"), blocks_per_step=2),
        model=ModelConfig(embedding_dim=4, hidden=(8,), options={"bottom": (4,)}),
        run=RunConfig(log_every_steps=1, seed=3),
    )
    (alone,) = on_ranks(1, train_on_rank, config, tmp_path)
    together = on_ranks(2, train_on_rank, config, tmp_path)
    first, second = together
    assert len(alone.losses) == -(-sum(lengths) // (2 * lengths[0]))
    assert first.losses == pytest.approx(alone.losses, rel=1e-5)
    assert first.blocks.isdisjoint(second.blocks)
    assert first.blocks | second.blocks == alone.blocks == set(range(len(lengths)))
