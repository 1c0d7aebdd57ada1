"""Checkpoints appear whole or not at all, and say why when they cannot."""

import errno
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gmeta.checkpoint import Progress, list_checkpoints, load_checkpoint, save_checkpoint
from gmeta.config import RunConfig, TrainConfig
from gmeta.errors import GMetaError
from gmeta.learner import MetaLearner
from gmeta.optimizers import build_optimizer
from gmeta.parallel import Ranks, shard_learner
from models import InputSizes, ModelConfig, build_model
from tests import reference
from tests.distributed.harness import on_ranks

COLUMNS = (2, 0, 0)


def work_on_rank(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Saves steps 1 to 3 keeping two, fails at step 4, and loads what is broken."""
    model = ModelConfig(name="melu", embedding_dim=4, hidden=(3,))
    config = TrainConfig(model=model, run=RunConfig(seed=1))
    torch.manual_seed(0)
    learner = MetaLearner(build_model(model, InputSizes(*COLUMNS)), config.algorithm, "bce")
    sharded = shard_learner(learner, reference.some_features(*COLUMNS), config, ranks)
    optimizer = build_optimizer(sharded, config.outer)

    def save(step: int) -> None:
        save_checkpoint(folder, Progress(step=step), sharded, optimizer, ranks, keep_last=2)

    for step in (1, 2, 3):
        save(step)

    def disk_full(state: Any, *, checkpoint_id: str, process_group: Any) -> None:
        (Path(checkpoint_id) / "half.distcp").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    messages = []
    with mock.patch("gmeta.checkpoint.save_shards", disk_full):
        try:
            save(4)
        except GMetaError as error:
            messages.append(str(error))
    newest = list_checkpoints(folder)[-1]
    (newest / ".metadata").write_bytes(b"")
    try:
        load_checkpoint(newest, sharded, optimizer, ranks)
    except GMetaError as error:
        messages.append(str(error))
    return {"messages": messages, "left": sorted(path.name for path in folder.iterdir())}


@pytest.mark.distributed
def test_a_checkpoint_that_cannot_be_written_or_read_says_why_and_harms_no_other(
    tmp_path: Path,
) -> None:
    (result,) = on_ranks(1, work_on_rank, tmp_path)
    assert result["left"] == ["step-00000002", "step-00000003"]
    written, read = result["messages"]
    assert written.startswith(
        f"checkpoint {tmp_path}/step-00000004 cannot be written: "
        "[Errno 28] No space left on device; "
    )
    assert written.endswith(
        " bytes were free there. Free some, then go on from the checkpoint before with --resume"
    )
    assert read.startswith(f"checkpoint {tmp_path}/step-00000003 cannot be loaded: ")
    assert read.endswith(
        "It must come from a run of the same model on the same dataset; "
        "remove it to fall back to the one before"
    )
