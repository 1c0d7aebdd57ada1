"""Ranks each query row's item among all items of the catalogue, for a model that scores by the
product of a user's and an item's vector.

Shape suffixes: N rows, A items, M multi-id features, F single-id or pooled features, V values, B
tables, D embedding width, U unique ids"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gmeta.data.episodes import collate_plain_rows
from gmeta.data.item_catalogue import ItemCatalogue
from gmeta.distributed.steps import batch_without_tasks
from metaio.ragged import Int32, Int64, offsets

if TYPE_CHECKING:
    from gmeta.distributed.sharded_learner import DistributedLearner
    from metaio.format.dataset import Dataset

ALL_ITEMS = -1  # in evaluation.candidates
# Items fetched at a time, and pairs of a row and an item scored at a time: 32 MB.
_ITEMS_AT_ONCE, _PAIRS_AT_ONCE = 65_536, 8_000_000


@dataclass(frozen=True)
class ItemVectors:
    """The vectors of all items of a catalogue."""

    catalogue: ItemCatalogue
    vectors_AD: Tensor

    def rank_N2(self, user_ND: Tensor, item_N: Int64, known: tuple[Int64, Int64]) -> Int32:
        """Return how many items score above each row's own, and how many the same, those that the
        row knows already left out. `known`: items, row after row, and how many each row has. An
        item that is not in the catalogue ranks below all."""
        known_V, known_N = known
        place_N, place_V = self.catalogue.find(item_N), self.catalogue.find(known_V)
        starts_N1, num_items = offsets(known_N), len(self.vectors_AD)
        found = np.empty((len(item_N), 2), np.int32)
        rows_at_once = max(_PAIRS_AT_ONCE // max(num_items, 1), 1)
        for first in range(0, len(item_N), rows_at_once):
            stop = min(first + rows_at_once, len(item_N))
            score_NA = user_ND[first:stop] @ self.vectors_AD.mT
            own = torch.from_numpy(np.maximum(place_N[first:stop], 0))
            own_N1 = score_NA.gather(1, own.unsqueeze(1))
            values = slice(int(starts_N1[first]), int(starts_N1[stop]))
            row_V = np.repeat(np.arange(stop - first), known_N[first:stop])
            is_there = place_V[values] >= 0
            at = torch.from_numpy(row_V[is_there]), torch.from_numpy(place_V[values][is_there])
            score_NA[at] = -torch.inf
            # Itself is not among the others, even if it is known.
            score_NA.scatter_(1, own.unsqueeze(1), -torch.inf)
            above_N, tied_N = (
                (mask.sum(dim=1)) for mask in (score_NA > own_N1, score_NA == own_N1)
            )
            found[first:stop] = torch.stack([above_N, tied_N], dim=1).numpy()
        found[place_N < 0] = num_items, 0
        return found


def fetch_item_vectors(
    sharded: DistributedLearner, dataset: Dataset, catalogue: ItemCatalogue
) -> ItemVectors:
    """Return the vectors of a catalogue, on every rank, on the host. Collective."""
    learner = sharded.local.learner
    columns = learner.event_columns
    assert columns is not None  # the catalogue was made with them
    tables = [int(dataset.features.table_of_single[at]) for at in columns.target]
    nothing = batch_without_tasks(dataset.features)
    parts = [torch.zeros(0, learner.tables.width)]
    for first in range(0, len(catalogue.ids_AM), _ITEMS_AT_ONCE):
        ids_AM = catalogue.ids_AM[first : first + _ITEMS_AT_ONCE]
        ids = [np.zeros(0, np.int64)] * len(dataset.features.tables)
        for table in set(tables):
            own = [ids_AM[:, at] for at, each in enumerate(tables) if each == table]
            ids[table] = np.unique(np.concatenate(own))
        starts = offsets([len(each) for each in ids])
        batch = nothing.tasks(0, 0)
        batch.unique_ids_U = torch.from_numpy(np.concatenate(ids))
        batch.unique_lengths_B = torch.from_numpy(np.diff(starts))
        with torch.no_grad():
            episodes, rows_UD = sharded.local.fetch(collate_plain_rows(batch, "cpu"))
            rows_UD = learner.starting_rows_UD(rows_UD, episodes.rows_of_tables).cpu().float()
        position_AM = [
            starts[table] + np.searchsorted(ids[table], ids_AM[:, at])
            for at, table in enumerate(tables)
        ]
        parts.append(torch.stack([rows_UD[torch.from_numpy(at)] for at in position_AM]).sum(dim=0))
    return ItemVectors(catalogue, torch.cat(parts))
