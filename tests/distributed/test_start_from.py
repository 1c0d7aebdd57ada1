"""A run that starts from another takes its weights and nothing else, and says whose."""

import io
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gmeta.checkpoints.summary import summarise_checkpoint
from gmeta.config import TrainConfig, config_from_dict
from gmeta.export import CheckpointReader
from gmeta.parallel.ranks import Ranks
from gmeta.runs.folder import RunFolder, list_checkpoints
from gmeta.train import train
from tests.distributed.harness import on_ranks


def begin_and_begin_anew(ranks: Ranks, config: TrainConfig, anew: TrainConfig) -> str:
    """What the second run says on the screen."""
    train(config, ranks)
    screen = io.StringIO()
    with redirect_stderr(screen):
        train(anew, ranks)
    return screen.getvalue()


@pytest.mark.distributed
def test_a_run_starts_with_the_weights_of_another_at_step_0_with_any_optimizer(
    tmp_path: Path, click_logs: Path
) -> None:
    config = config_from_dict(
        {
            "data": {"path": str(click_logs), "tasks_per_step": 16},
            "model": {"name": "melu", "hidden": [4], "embedding_dim": 4},
            "run": {"dir": str(tmp_path / "first"), "device": "cpu", "max_steps": 3},
        }
    )
    # Without rates the weights stay what they are at the beginning.
    outer = replace(
        config.outer,
        dense_optimizer="sgd",
        dense_lr=0.0,
        sparse_optimizer="adagrad",
        sparse_lr=0.0,
    )
    run = replace(config.run, dir=str(tmp_path / "second"), start_from=config.run.dir, max_steps=1)
    # Another seed would draw other weights, if any were drawn.
    anew = replace(config, outer=outer, run=replace(run, seed=7))
    said, silence = on_ranks(2, begin_and_begin_anew, config, anew)
    (first,) = list_checkpoints(RunFolder(tmp_path / "first").checkpoints)
    (second,) = list_checkpoints(RunFolder(tmp_path / "second").checkpoints)
    assert second.name == "step-00000001"
    assert f"begins with the weights of {first}\n" in said
    assert "begins with" not in silence
    before, after = CheckpointReader(first), CheckpointReader(second)
    summary = summarise_checkpoint(second)
    names = [f"model.learner.{layer.name}" for layer in summary.layers]
    names += [f"model.tables.embeddings.{table.name}.weight" for table in summary.tables]
    weights = after.read(names)
    for name, values in before.read(names).items():
        assert torch.equal(values, weights[name]), name
