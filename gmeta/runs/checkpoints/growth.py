"""Loads a checkpoint into grown tables: old rows as they were, new rows as if always there."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchrec.optim.keyed import CombinedOptimizer

from gmeta.config.table_names import TABLES_PREFIX, table_of_weight
from gmeta.config.train_config import ADAGRADS, OuterConfig
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.platform.internals import ShardedTensor
from gmeta.runs.checkpoints.joined_inputs import JoinedInputs
from gmeta.runs.checkpoints.loader import collect_state, load_checkpoint
from metaio.ragged import Int64


def load_into_grown_tables(
    path: Path,
    sharded: DistributedLearner,
    optimizer: CombinedOptimizer,
    ranks: Ranks,
    outer: OuterConfig,
    reset_rows: Mapping[str, Int64],
    joined: JoinedInputs | None = None,
) -> None:
    """Fill a fresh model and its optimizer from a checkpoint of any number of ranks, whose tables
    may have fewer rows, and which may lack inputs that `joined` since; Adagrad's sums are
    discounted as `outer` says."""
    # Rows in `reset_rows` mean another value from now on: they keep initial values and no momentum.
    fresh = [
        (part, rows, part[rows].clone())
        for table, first_row, part in _iterate_table_parts(sharded, optimizer)
        if (rows := _select_rows(reset_rows.get(table), first_row, len(part))).numel()
    ]
    load_checkpoint(path, sharded, optimizer, ranks, tables_may_grow=True, joined=joined)
    with torch.no_grad():
        for values in _iterate_adagrad_sums(sharded, optimizer, outer):
            decay_sums(values, outer.adagrad_decay)
        # Loading wrote the old values there: back to what the fresh model and its optimizer had.
        for part, rows, values in fresh:
            part[rows] = values
        if (near := sharded.local.learner.neighbours) is not None:
            near.forget(reset_rows.get(near.table))


def decay_sums(sums: Tensor, decay: float) -> None:
    """Multiply Adagrad's sums of squares by `decay`, in place."""
    if decay != 1.0:
        sums.mul_(decay)


def _iterate_table_parts(
    sharded: DistributedLearner, optimizer: CombinedOptimizer
) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (table, first row, values) of this rank's tables, optimizer state and statistics."""
    state = collect_state(sharded, optimizer)
    kept = state.get("optimizer", {}).get("state", {})
    for name, weight in state["model"].items():
        if not name.startswith(TABLES_PREFIX):
            continue
        table = table_of_weight(name)
        for value in (weight, *kept.get(name, {}).values()):
            for first_row, part in _list_local_parts(value):
                yield table, first_row, part
    # Statistics of items are replicated: every rank holds all rows.
    if (items := sharded.local.learner.items) is not None:
        yield from ((table, 0, values) for table, values in items.table_buffers())
    if (near := sharded.local.learner.neighbours) is not None:
        yield from ((near.table, 0, values) for values in near.buffers())


def _iterate_adagrad_sums(
    sharded: DistributedLearner, optimizer: CombinedOptimizer, outer: OuterConfig
) -> Iterator[Tensor]:
    for name, kept in (
        collect_state(sharded, optimizer).get("optimizer", {}).get("state", {}).items()
    ):
        is_table = name.startswith(TABLES_PREFIX)
        kind = outer.sparse_optimizer if is_table else outer.dense_optimizer
        for key, value in kept.items() if kind in ADAGRADS else ():
            # Beside it torch counts its steps, and tables those that ask for a row.
            if key.endswith("momentum1") if is_table else key == "sum":
                yield from (part for _, part in _list_local_parts(value))


def _list_local_parts(value: Tensor | ShardedTensor) -> list[tuple[int, Tensor]]:
    """Return (first row, values) of this rank's parts of a tensor over rows."""
    if isinstance(value, ShardedTensor):
        return [(one.metadata.shard_offsets[0], one.tensor) for one in value.local_shards()]
    return [(0, value)]


def _select_rows(rows: Int64 | None, first_row: int, num_rows: int) -> Tensor:
    # This rank holds a range of the table's rows, or a part of its columns: count from there.
    own = np.zeros(0, np.int64) if rows is None else rows - first_row
    return torch.from_numpy(own[(own >= 0) & (own < num_rows)])
