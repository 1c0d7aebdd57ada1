"""Checkpoints of a sharded run: torch.distributed.checkpoint in a folder that appears whole or not
at all.

The rename of the temporary folder is the one commit point. Any world size reads what any other
wrote.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from gmeta.errors import GMetaError
from gmeta.optimizers import create_state
from gmeta.parallel import Ranks, barrier

PROGRESS_FILE = "progress.json"
STEP_FOLDER = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Progress:
    """Where in the data a checkpoint stands: `step` outer steps done, `epoch_step` of them in
    `epoch`.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0


def save_checkpoint(
    folder: Path,
    progress: Progress,
    sharded: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    ranks: Ranks,
    keep_last: int,
    files: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write `folder`/step-N with all ranks, make it durable, then remove all but the `keep_last`
    newest. Rank 0's `files` (texts by name) lie beside the model.

    Raises:
        GMetaError: it cannot be written; nothing of it is kept.
    """
    final = folder / f"step-{progress.step:08d}"
    temporary = folder / f"tmp-{final.name}"
    if ranks.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    barrier(ranks)
    try:
        save_shards(
            _state(sharded, optimizer), checkpoint_id=str(temporary), process_group=ranks.control
        )
    except (OSError, RuntimeError, CheckpointException) as error:
        free_bytes = shutil.disk_usage(folder).free
        shutil.rmtree(temporary, ignore_errors=True)
        raise GMetaError(
            f"checkpoint {final} cannot be written: {_reason(error)}; {free_bytes:,} bytes were "
            "free there. Free some, then go on from the checkpoint before with --resume"
        ) from error
    if ranks.rank == 0:
        (temporary / PROGRESS_FILE).write_text(json.dumps(asdict(progress)))
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            _fsync(path)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _fsync(folder)
        for old in list_checkpoints(folder)[:-keep_last]:
            shutil.rmtree(old)
    barrier(ranks)
    return final


def load_checkpoint(
    path: Path, sharded: DistributedModelParallel, optimizer: CombinedOptimizer | None, ranks: Ranks
) -> Progress:
    """Fill the model, and the optimizer if given, from a checkpoint; any number of ranks may have
    written it.

    Raises:
        GMetaError: the folder is incomplete or fits another model.
    """
    if optimizer is not None:
        create_state(optimizer)
    state = _state(sharded, optimizer)
    try:
        progress = Progress(**json.loads((path / PROGRESS_FILE).read_text()))
        load_shards(state, checkpoint_id=str(path), process_group=ranks.control)
    except (OSError, ValueError, RuntimeError, KeyError, CheckpointException) as error:
        raise GMetaError(
            f"checkpoint {path} cannot be loaded: {_reason(error)}. "
            "It must come from a run of the same model on the same dataset; "
            "remove it to fall back to the one before"
        ) from error
    sharded.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    return progress


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if STEP_FOLDER.fullmatch(path.name))


def _reason(error: BaseException) -> str:
    """The first line of what went wrong, on the first rank where it did."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    first = next((failure for failure, _ in failures.values()), error)
    return (str(first).splitlines() or [type(first).__name__])[0]


def _state(
    sharded: DistributedModelParallel, optimizer: CombinedOptimizer | None
) -> dict[str, Any]:
    state: dict[str, Any] = {"model": sharded.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    return state


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
