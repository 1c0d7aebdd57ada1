"""Plain epochs on one rank and two, stopped or not: the first epoch is a plain run's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.distributed.ranks import Ranks
from gmeta.runs.checkpoints.checkpoint_summary import summarise_checkpoint
from gmeta.runs.run_folder import RunFolder, list_checkpoints
from gmeta.serving.export import CheckpointReader
from gmeta.training import train
from tests.distributed.harness import on_ranks


def run_of(path: Path, dataset: Path, name: str, epochs: int) -> TrainConfig:
    return config_from_dict(
        {
            "data": {"path": str(dataset), "tasks_per_step": 64},
            "model": {"name": "melu", "hidden": [4], "embedding_dim": 4},
            "algorithm": {"name": name, "plain_epochs": 1},
            "run": {"dir": str(path), "device": "cpu", "epochs": epochs, "keep_last": 2},
        }
    )


def train_all(ranks: Ranks, configs: list[TrainConfig]) -> None:
    for config in configs:
        train(config, ranks)


def weights_of(run: Path, epoch: int) -> dict[str, Tensor]:
    """The layers and tables behind an epoch, counted from 0."""
    checkpoint = list_checkpoints(RunFolder(run).checkpoints)[epoch]
    summary = summarise_checkpoint(checkpoint)
    names = [f"model.learner.{layer.name}" for layer in summary.layers]
    names += [f"model.tables.embeddings.{table.name}.weight" for table in summary.tables]
    return CheckpointReader(checkpoint).read(names)


@pytest.mark.distributed
def test_the_first_epoch_is_a_plain_run_s_on_any_number_of_ranks_and_behind_a_stop(
    tmp_path: Path, click_logs: Path
) -> None:
    plain = run_of(tmp_path / "plain", click_logs, "none", epochs=1)
    both = run_of(tmp_path / "both", click_logs, "metasgd", epochs=2)
    alone = replace(both, run=replace(both.run, dir=str(tmp_path / "alone")))
    early = replace(alone, run=replace(alone.run, max_steps=1))
    on_ranks(2, train_all, [plain, both])
    on_ranks(1, train_all, [early])
    on_ranks(1, train_all, [alone])
    first, trained = weights_of(tmp_path / "both", 0), weights_of(tmp_path / "both", 1)
    for name, values in weights_of(tmp_path / "plain", 0).items():
        assert torch.equal(values, first[name]), name
    assert any(not torch.equal(first[name], trained[name]) for name in first if "rates" in name)
    for name, values in weights_of(tmp_path / "alone", -1).items():
        torch.testing.assert_close(values, trained[name], rtol=1e-4, atol=1e-5)
