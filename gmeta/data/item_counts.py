"""How often each item is a row's in a split, for losses that are corrected by popularity.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, U unique ids, A
items"""

from collections.abc import Iterator, Sequence

import numpy as np

from metaio.format.dataset import Dataset
from metaio.ragged import Float32, Int64

# So many rows say how popular an item is; a split is in the order of tasks' hashes.
_MOST_ROWS = 10_000_000


def log_shares(dataset: Dataset, split: str, feature: int) -> Float32:
    """Return the logarithm of each item's share of the rows of a split [rows of its table], one row
    more for each; `feature` is the item among the single features."""
    name = dataset.features.single[feature].table
    num_items = next(table.num_rows for table in dataset.features.tables if table.name == name)
    count_A = np.ones(num_items, np.float64)
    for ids_NM in _iterate_ids(dataset, split, [feature]):
        count_A += np.bincount(ids_NM[:, 0], minlength=num_items)
    shares: Float32 = np.log(count_A / count_A.sum()).astype(np.float32)
    return shares


def count_items(dataset: Dataset, split: str, features: Sequence[int]) -> tuple[Int64, Int64]:
    """Return the ids that make each item's vector, its own first, and how many rows of a split it
    has; the item is the first of these single features. Unknown ones are none."""
    parts, counts = list[Int64](), list[Int64]()
    for ids_NM in _iterate_ids(dataset, split, features):
        _, first, count = np.unique(ids_NM[:, 0], return_index=True, return_counts=True)
        parts.append(ids_NM[first])
        counts.append(count)
    ids_NM = np.concatenate([np.zeros((0, len(features)), np.int64), *parts])
    ids_A, first, place = np.unique(ids_NM[:, 0], return_index=True, return_inverse=True)
    count_A = np.bincount(place, np.concatenate([np.zeros(0), *counts]), len(ids_A))
    return ids_NM[first][ids_A > 0], count_A[ids_A > 0].astype(np.int64)


def _iterate_ids(dataset: Dataset, split: str, features: Sequence[int]) -> Iterator[Int64]:
    """Yield the ids of these single features, block by block, of as many rows as are looked at."""
    rows = 0
    for index in range(dataset.split(split).num_blocks):
        block = dataset.read_block(split, index)
        yield block.unique_ids_U[block.positions_NF[:, list(features)]]
        rows += len(block.positions_NF)
        if rows >= _MOST_ROWS:
            return
