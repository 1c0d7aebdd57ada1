"""Items drawn by their share of the training rows, a step's own for all ranks alike.

Shape suffixes: M multi-id features, B tables, U unique ids, A items"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from gmeta.data.hash_rng import ITEM_STREAM, draw_uniform, mix_key
from gmeta_models.sequence.encoder import DrawnItems
from metaio.ragged import Int64, offsets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from metaio.read.batch import TaskBatch


@dataclass(frozen=True)
class ItemDraws:
    """How items are drawn: a pure function of the seed, and of a step's place in the run."""

    ids_AM: Int64  # that make each item's vector, its own first; ascending by that
    share_A: npt.NDArray[np.float64]  # of the rows; the sum is 1
    table_M: Int64
    number: int  # drawn a step, each by the shares: one may be drawn twice
    seed: int

    def add_to(self, batches: Iterable[TaskBatch], epoch: int, step: int) -> Iterator[TaskBatch]:
        """Yield the batches of an epoch's steps, from this one on, each with the step's items."""
        for at, batch in enumerate(batches, start=step):
            yield _with_items(batch, self.draw_AM(epoch, at), self.table_M)

    def draw_AM(self, epoch: int, step: int) -> Int64:
        """Return the ids of a step's items."""
        key, names = mix_key(self.seed, epoch, step), np.arange(self.number, dtype=np.uint64)
        place_A = np.searchsorted(self._ends_A, draw_uniform(names, key, ITEM_STREAM), side="right")
        # The last end is below 1 by rounding.
        drawn_AM: Int64 = self.ids_AM[np.minimum(place_A, len(self.ids_AM) - 1)]
        return drawn_AM

    def lay_out(self, batch: TaskBatch) -> DrawnItems | None:
        """Return what a loss needs of a batch's drawn items; None where it has none."""
        if not len(batch.drawn_positions):
            return None
        target_AM = batch.drawn_positions.to(torch.int64)
        item_A = batch.unique_ids_U[target_AM[:, 0]]
        share_A = self.share_A[np.searchsorted(self.ids_AM[:, 0], item_A.numpy())]
        log_expected_A = np.log(self.number * share_A).astype(np.float32)
        return DrawnItems(target_AM, item_A, torch.from_numpy(log_expected_A))

    @cached_property
    def _ends_A(self) -> npt.NDArray[np.float64]:
        return self.share_A.cumsum()


def _with_items(batch: TaskBatch, ids_AM: Int64, table_M: Int64) -> TaskBatch:
    """Return the batch with the ids of these items behind those of its rows, table by table."""
    if not batch.num_rows:
        return batch
    ids_U, lengths_B = batch.unique_ids_U.numpy(), batch.unique_lengths_B.numpy()
    own_B = np.split(ids_U, offsets(lengths_B)[1:-1])
    new_B = [np.unique(ids_AM[:, table_M == table]) for table in range(len(lengths_B))]
    added_B = np.array([len(ids) for ids in new_B])
    first_B = offsets(lengths_B + added_B)[:-1]
    moved_U = np.arange(len(ids_U)) + np.repeat(first_B - offsets(lengths_B)[:-1], lengths_B)
    drawn_AM = np.stack(
        [
            first_B[table] + lengths_B[table] + np.searchsorted(new_B[table], ids_A)
            for table, ids_A in zip(table_M, ids_AM.T, strict=True)
        ],
        axis=1,
    )
    ids = np.concatenate([part for pair in zip(own_B, new_B, strict=True) for part in pair])
    longer = batch.with_ids(
        torch.from_numpy(ids),
        torch.from_numpy(lengths_B + added_B),
        torch.from_numpy(moved_U.astype(np.int32)),
    )
    return replace(longer, drawn_positions=torch.from_numpy(drawn_AM.astype(np.int32)))
