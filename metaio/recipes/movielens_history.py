"""The behaviour history of every rating: what its user liked, as far as support rows tell.

Shape suffixes: T tasks, N rows, M multi-id features, V values"""

import numpy as np

from metaio.ragged import Int32, Int64, reorder_row_by_row, sum_rows

LIKED = 4  # least rating, of 1 to 5, that counts as liked


def liked_before(
    lengths_T: Int64, support_lengths_T: Int64, item_N: Int64, rating_N: Int64, longest: int
) -> tuple[Int64, Int32]:
    """Return the last `longest` items [V] liked in support before each row, and lengths [N]."""
    histories, start = [], 0
    for rows, support in zip(lengths_T.tolist(), support_lengths_T.tolist(), strict=True):
        liked = np.flatnonzero(rating_N[start : start + support] >= LIKED)
        for row in range(rows):
            # A row is not in its own history: neither its label nor any query label may show.
            others = liked[liked != row] if row < support else liked
            histories.append(item_N[start + others[-longest:]])
        start += rows
    lengths_N = np.array([len(history) for history in histories], dtype=np.int32)
    return np.concatenate([np.zeros(0, dtype=np.int64), *histories]), lengths_N


def with_history(
    ids_V: Int64, lengths_NM: Int32, history_V: Int64, history_lengths_N: Int32
) -> tuple[Int64, Int32]:
    """Return row-by-row multi-hot lists with each row's history as its last feature."""
    both_N2 = np.stack([sum_rows(lengths_NM), history_lengths_N], axis=1)
    lengths_NM = np.concatenate([lengths_NM, history_lengths_N[:, None]], axis=1)
    return reorder_row_by_row(both_N2, [ids_V, history_V]), lengths_NM
