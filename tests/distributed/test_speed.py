"""The speed that a run tells is that of its steps."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.distributed.ranks import Ranks
from gmeta.evaluation.validation import score_validation
from gmeta.runs.checkpoints.checkpoint_writer import CheckpointWriter
from gmeta.training import train
from tests.distributed.harness import on_ranks

LONG_S = 1e6


def speeds(ranks: Ranks, config: TrainConfig) -> list[float]:
    """Samples a second of each reading, where validations and checkpoints take very long."""
    later_s = 0.0

    def taking_long(work: Any) -> Any:
        def worked(*arguments: Any, **named: Any) -> Any:
            nonlocal later_s
            later_s += LONG_S
            return work(*arguments, **named)

        return worked

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + later_s)
    with (
        mock.patch("gmeta.runs.step_meter.time", clock),
        mock.patch("gmeta.training.score_validation", taking_long(score_validation)),
        mock.patch.object(CheckpointWriter, "save", taking_long(CheckpointWriter.save)),
    ):
        lines = train(config, ranks).read_metrics()
    return [line["samples_per_s"] for line in lines if "loss" in line]


@pytest.mark.distributed
def test_validations_and_checkpoints_make_no_step_slower(tmp_path: Path, click_logs: Path) -> None:
    run = {"dir": str(tmp_path / "run"), "log_every_steps": 2, "max_steps": 8}
    config = config_from_dict(
        {
            "data": {"path": str(click_logs), "tasks_per_step": 16, "valid_split": "valid"},
            "model": {"hidden": [4], "options": {"bottom": [4]}, "embedding_dim": 4},
            "run": {**run, "valid_every_steps": 3, "checkpoint_every_steps": 3},
        }
    )
    (found,) = on_ranks(1, speeds, config)
    assert len(found) == 4
    # Of the some 200 samples a step: a validation or a checkpoint would make it 0.0004 a second.
    assert min(found) > 0.01
