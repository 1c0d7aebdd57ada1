"""All items of a dataset, and the ids that make the vector of each.

Shape suffixes: N rows, A items, F single-id or pooled features, M multi-id features, U unique
ids"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from metaio.ragged import Int64

if TYPE_CHECKING:
    from gmeta.data.event_layout import EventColumns
    from metaio.format.dataset import Dataset


@dataclass(frozen=True)
class ItemCatalogue:
    """All items of a dataset: the ids that make the vector of each, the item's own first."""

    ids_AM: Int64  # ascending by the first

    @classmethod
    def of(cls, dataset: Dataset, columns: EventColumns) -> ItemCatalogue:
        """Return the items of all rows of a dataset, but for those without a row of their own. Of
        items without attributes the vocabulary tells; else all rows are read, once a dataset."""
        name = dataset.features.single[columns.target[0]].table
        if len(columns.target) == 1 and name in dataset.manifest.vocabularies:
            values = next(one.num_rows for one in dataset.features.tables if one.name == name)
            return cls(np.arange(1, values).reshape(-1, 1))
        if dataset not in _CATALOGUES:
            _CATALOGUES[dataset] = cls._read(dataset, columns)
        return _CATALOGUES[dataset]

    @classmethod
    def _read(cls, dataset: Dataset, columns: EventColumns) -> ItemCatalogue:
        parts = [np.zeros((0, len(columns.target)), np.int64)]
        for split in dataset.splits:
            for index in range(dataset.split(split).num_blocks):
                block = dataset.read_block(split, index)
                ids_NM = block.unique_ids_U[block.positions_NF[:, list(columns.target)]]
                _, first = np.unique(ids_NM[:, 0], return_index=True)
                parts.append(ids_NM[first])
        ids_NM = np.concatenate(parts)
        ids, first = np.unique(ids_NM[:, 0], return_index=True)
        return cls(ids_NM[first][ids > 0])

    def find(self, item_N: Int64) -> Int64:
        """Return the place of each item; -1 for one that is not there."""
        ids = self.ids_AM[:, 0]
        if not len(ids):
            return np.full(len(item_N), -1)
        place_N = np.minimum(np.searchsorted(ids, item_N), len(ids) - 1)
        return np.where(ids[place_N] == item_N, place_N, -1)


# Every validation asks for it, with one encoder of events a process.
_CATALOGUES: WeakKeyDictionary[Dataset, ItemCatalogue] = WeakKeyDictionary()
