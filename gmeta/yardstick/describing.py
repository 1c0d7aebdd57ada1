"""Which columns follow from the item, told by the rows alone."""

import numpy as np

from gmeta.yardstick.rows import EpisodeRows, Lists
from metaio.format.features import Features
from metaio.ragged import offsets

NO_ITEM = -1
# A column describes the item if it agrees with the item's first row in so many of its others.
DESCRIBING_SHARE = 0.99


def describing_columns(rows: EpisodeRows, features: Features, item: int) -> tuple[bool, ...]:
    """Return which sparse columns follow from the item, as a film's director does; the item's own
    does."""
    if item == NO_ITEM:
        return (False,) * len(features.sparse)
    id_N = rows.ids_of(item)
    _, first, index_N = np.unique(id_N, return_index=True, return_inverse=True)
    # Row 0 is no item: it stands for all that the vocabulary lacks. A first row agrees with itself.
    tells_N = id_N != 0
    tells_N[first] = False
    found = []
    for column in range(len(features.sparse)):
        lists = lists_of(rows, column)
        # Of equal lists these sums are equal; of others hardly ever.
        weight_V = np.random.default_rng(0).random(4099)[lists.ids_V % 4099]
        mark_N = np.bincount(lists.row_V, weight_V, minlength=rows.num_rows)
        # A share, not all: a log may correct a film's genre once.
        agrees_N = np.isclose(mark_N, mark_N[first][index_N])[tells_N]
        share = float(agrees_N.mean()) if agrees_N.size else 0.0
        found.append(column == item or share >= DESCRIBING_SHARE)
    return tuple(found)


def lists_of(rows: EpisodeRows, column: int) -> Lists:
    """Return a sparse column's ids as lists: of one id in a single column."""
    num_single = rows.ids_NF.shape[1]
    if column >= num_single:
        lists: Lists = rows.multi[column - num_single]
        return lists
    return Lists(rows.ids_NF[:, column], offsets(np.ones(rows.num_rows, np.int64)))
