"""Rows that belong together: a positive and the negatives that were drawn for it.

Shape suffixes: T tasks, N rows"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from metaio.ragged import Int64, find_firsts, owners, ragged_indices

Floats = npt.NDArray[np.float64]


class RaggedEpisodes(Protocol):
    """Episodes with contiguous rows, support before query, as tensors or arrays."""

    @property
    def task_T(self) -> Any:
        """Return the task of each episode."""

    @property
    def label_N(self) -> Any:
        """Return the label of each row."""

    @property
    def row_offsets_T1(self) -> Any:
        """Return the first row of each episode, then N."""

    @property
    def support_lengths_T(self) -> Any:
        """Return how many support rows each episode has."""


def find_groups(rows: RaggedEpisodes) -> Int64:
    """Return the group of each row, from 0 on: a group begins with each label above 0, each task
    and each side. Labels of query rows may be unknown."""
    begins_N = np.asarray(rows.label_N) > 0
    starts_T = np.asarray(rows.row_offsets_T1)[:-1]
    # Sides without rows begin where the next one does, or behind the last row.
    starts = np.concatenate([starts_T, starts_T + np.asarray(rows.support_lengths_T)])
    begins_N[starts[starts < len(begins_N)]] = True
    return np.cumsum(begins_N) - 1


def order_groups(
    firsts: Int64, sizes: Int64, tasks: Int64, draws: Floats, supporting_T: Int64
) -> tuple[Int64, Int64]:
    """Return the rows with each task's groups in the order of their draws, and how many rows the
    first `supporting_T` groups of each have."""
    order = np.lexsort((draws, tasks))
    firsts, sizes = firsts[order], sizes[order]
    groups_T = np.bincount(tasks, minlength=len(supporting_T))
    rows = np.bincount(tasks, find_firsts(groups_T, supporting_T) * sizes, len(supporting_T))
    return ragged_indices(firsts, sizes), rows.astype(np.int64)


def redraw_groups(rows: RaggedEpisodes, group_N: Int64, draw_N: Floats) -> tuple[Int64, Int64]:
    """Return each task's rows with its groups in the order of what was drawn for their first rows,
    and how many of them support it: those of as many groups as before."""
    rows_T, support_T = np.diff(rows.row_offsets_T1), np.asarray(rows.support_lengths_T)
    firsts = np.flatnonzero(np.diff(group_N, prepend=-1))
    tasks = owners(rows_T)[firsts]
    were_support = tasks[find_firsts(rows_T, support_T)[firsts]]
    supporting_T = np.bincount(were_support, minlength=len(rows_T))
    return order_groups(firsts, np.bincount(group_N), tasks, draw_N[firsts], supporting_T)
