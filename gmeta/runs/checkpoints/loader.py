"""Loads and collects the state of a sharded run; any world size reads what any other wrote."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from gmeta.config.table_names import TABLES_PREFIX
from gmeta.distributed.collective_errors import run_on_all
from gmeta.distributed.optim.local_layers import OUTER_MOMENTUM
from gmeta.distributed.ranks import Ranks, broadcast_value, lost_contact
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.errors import GMetaError, UserError
from gmeta.runs.checkpoints.index import IndexedReader, fit_grown_index
from gmeta.runs.checkpoints.integrity import DAMAGE, check_files, describe_failure, first_failure
from gmeta.runs.checkpoints.joined_inputs import GrownLayers, JoinedInputs
from gmeta.runs.checkpoints.progress_file import (
    FALL_BACK,
    choose_remedy,
    read_about,
    read_file_entries,
    read_progress,
)
from gmeta.runs.run_progress import RunProgress

# What algorithms learn beside the model: weights to begin with may be of a run without.
PARTS_OF_ALGORITHMS = ("learner.encoder.", "learner.generator.", "learner.rates.")
SHARED_VECTORS = "learner.projections.shared_BD"
# What has a row for each id: weights, what an optimizer keeps of them, what is known of items.
TABLE_KEYS = (
    f"model.{TABLES_PREFIX}",
    f"optimizer.state.{TABLES_PREFIX}",
    "model.learner.items.",
    "model.learner.neighbours.",
)


def load_checkpoint(
    path: Path,
    sharded: DistributedLearner,
    optimizer: CombinedOptimizer | None,
    ranks: Ranks,
    may_lack: tuple[str, ...] = (),
    tables_may_grow: bool = False,
    joined: JoinedInputs | None = None,
) -> RunProgress:
    """Fill the model, and the optimizer if there is one, from a checkpoint. It may lack tensors
    whose names begin with one of `may_lack`; with `tables_may_grow` also rows of tables, and what
    reads the inputs that `joined` since."""
    if optimizer is not None:
        # torch makes the state at the first step, and only what exists can be filled.
        initialise_optimizer_state(optimizer)
    state = collect_state(sharded, optimizer)
    path = broadcast_checkpoint(path, ranks)
    # Each rank its share: all of it is read once, whatever their number.
    run_on_all(lambda: check_files(path, ranks.rank, ranks.world_size), ranks)
    progress = read_progress(path)
    try:
        reader = IndexedReader(path)
        there = reader.index.state_dict_metadata
        if f"model.{SHARED_VECTORS}" in there and SHARED_VECTORS not in state["model"]:
            raise UserError(
                f"checkpoint {path} is of a run with model.admission, whose rare rows are zeros in "
                "place of a vector that they share, and this config has none. Set model.admission "
                "as it was in that run"
            )
        model = {
            name: value
            for name, value in state["model"].items()
            if f"model.{name}" in there or not name.startswith(may_lack)
        }
        wanted = {**state, "model": model, **_without_outer_momentum(state, there)}
        if tables_may_grow:
            reader.index = fit_grown_index(reader.index, wanted, TABLE_KEYS)
        grown = None
        if joined is not None:
            grown = GrownLayers(joined, sharded.local.learner, reader.index)
            wanted = grown.fit(wanted)
        # Each group of ranks fills its own copy of the tables.
        inside = sharded.local.levels.inside
        load_shards(wanted, storage_reader=reader, process_group=inside.control)
    except DAMAGE as error:
        if lost := lost_contact(error):
            raise lost from error
        reason = describe_failure(error).rstrip(".")
        # The checksums held a moment ago, so what does not fit is the config.
        if read_file_entries(read_about(path)) and not isinstance(first_failure(error), OSError):
            # It is what was written: removing it would lose a good checkpoint.
            remedy = (
                "Set model and algorithm as they were in the run that wrote it"
                if optimizer is None
                else "Set model, algorithm and outer as they were in the run that wrote it, or "
                "choose another run.dir"
            )
            raise UserError(
                f"checkpoint {path} does not fit the config: {reason}. {remedy}"
            ) from error
        damaged = f"It must come from a run of the same model on the same dataset. {FALL_BACK}"
        raise GMetaError(
            f"checkpoint {path} cannot be loaded: {reason}. "
            f"{choose_remedy(first_failure(error), damaged)}"
        ) from error
    if grown is not None:
        grown.place()
    # The live tensors were filled in place; this notifies the modules.
    sharded.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(optimizer.state_dict())  # filled in place
    return progress


def _without_outer_momentum(state: dict[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizers' part of a state; a run without outer momentum stored none."""
    # A run may go on with it: then it begins with zeros.
    kept = {
        name: {
            key: value
            for key, value in own.items()
            if key != OUTER_MOMENTUM or f"optimizer.state.{name}.{key}" in there
        }
        for name, own in state.get("optimizer", {}).get("state", {}).items()
    }
    return {"optimizer": {"state": kept}} if kept else {}


def broadcast_checkpoint(path: Path, ranks: Ranks) -> Path:
    """Return rank 0's checkpoint on every rank. Collective."""
    # While the run trains, another rank may find a newer one: half a model of each.
    return path.with_name(broadcast_value(path.name, ranks))


def collect_state(
    sharded: DistributedLearner, optimizer: CombinedOptimizer | None
) -> dict[str, Any]:
    """Return the state for a checkpoint: the live tensors, not copies."""
    state: dict[str, Any] = {"model": sharded.state_dict()}
    kept = optimizer.state_dict()["state"] if optimizer is not None else {}
    # A part without state, as a table under SGD, has an empty entry on some ranks: one more key,
    # which the other ranks would not write.
    if filled := {name: own for name, own in kept.items() if own}:
        state["optimizer"] = {"state": filled}
    return state


def initialise_optimizer_state(optimizer: CombinedOptimizer) -> None:
    """Make the state that a first step would; it may move the layers: load them afterwards."""
    # torch's optimizers make it at their first step: this takes one with zero gradients, and weight
    # decay moves the layers.
    for _, part in optimizer.optimizers:
        if isinstance(part, KeyedOptimizerWrapper):
            part.init_state()
            part.zero_grad()
