"""How often each item is a row's in a split, for losses that are corrected by popularity."""

import numpy as np

from metaio.format.dataset import Dataset
from metaio.ragged import Float32

# So many rows say how popular an item is; a split is in the order of tasks' hashes.
_MOST_ROWS = 10_000_000


def log_shares(dataset: Dataset, split: str, feature: int) -> Float32:
    """Return the logarithm of each item's share of the rows of a split [rows of its table], one row
    more for each; `feature` is the item among the single features."""
    name = dataset.features.single[feature].table
    num_items = next(table.num_rows for table in dataset.features.tables if table.name == name)
    count_A = np.ones(num_items, np.float64)
    rows = 0
    for index in range(dataset.split(split).num_blocks):
        block = dataset.read_block(split, index)
        id_N = block.unique_ids_U[block.positions_NF[:, feature]]
        count_A += np.bincount(id_N, minlength=num_items)
        rows += len(id_N)
        if rows >= _MOST_ROWS:
            break
    shares: Float32 = np.log(count_A / count_A.sum()).astype(np.float32)
    return shares
