"""The rows that a group of tables sends in a step, and which of them repeat: worked out on the
host.

Shape suffixes: N rows, U unique ids, R rows of tables, D embedding width"""

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


class _RowMerge(NamedTuple):
    """How the gradients of repeated rows are summed: `once` are the places of the distinct rows
    `row`; the gradient at each place in `again` is added to the one in place `into` among them."""

    once_U: Tensor
    row_U: Tensor
    again: Tensor
    into: Tensor


@dataclass(frozen=True)
class RowsToSend:
    """The rows that a group sends in a step, by their numbers among those of all its tables."""

    row_N: Tensor
    merge: _RowMerge | None  # None: no row repeats
    # Of rows in a cache, which `row_N` and `merge` name by their slots: what holds these, and the
    # numbers that the rows have among those of all tables.
    hold: Any = None
    row_of_tables_N: Tensor | None = None

    @property
    def number_N(self) -> Tensor:
        """Return the rows' numbers among those of all tables."""
        return self.row_N if self.row_of_tables_N is None else self.row_of_tables_N

    @property
    def distinct_rows(self) -> Ints:
        """Return the distinct rows, in the order of `sum_gradients`; they are on the host."""
        return (self.row_N if self.merge is None else self.merge.row_U).numpy()

    @property
    def distinct_numbers(self) -> Tensor:
        """Return the numbers of the distinct rows among those of all tables, in this order."""
        number_N = self.number_N
        return number_N if self.merge is None else number_N.index_select(0, self.merge.once_U)

    def sum_gradients(self, grad_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct rows and the sum of the gradients of each: [U], [U, D]."""
        if self.merge is None:
            return self.row_N, grad_ND
        summed_UD = grad_ND.index_select(0, self.merge.once_U)
        summands = grad_ND.index_select(0, self.merge.again)
        # Only repeated rows, the few of popular ids: all would be a pass over every gradient.
        return self.merge.row_U, summed_UD.index_add_(0, self.merge.into, summands)


class RowsAsGiven:
    """In place of a RepeatFinder, for rows that are yet to get slots in a cache."""

    def prepare_rows(self, row_N: Ints) -> RowsToSend:
        """Return these rows as they are."""
        return RowsToSend(torch.from_numpy(row_N), None)


@final
class RepeatFinder:
    """Finds repeated rows, in 4 bytes for each row of a group's tables."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        # The last place of each row among those given out: written before it is read.
        self._last_R: npt.NDArray[np.int32] | None = None
        self._lock = threading.Lock()  # several threads may make batches ready

    def __reduce__(self) -> tuple[Any, ...]:
        return RepeatFinder, (self._num_rows,)  # the last places are of no use elsewhere

    def prepare_rows(self, row_N: Ints) -> RowsToSend:
        """Return these rows as an update takes them."""
        # On the host, where it is known without waiting for a device which rows repeat. Even a
        # single rank may repeat a row: the blocks of a batch each bring their ids.
        rows = torch.from_numpy(row_N)
        # In a tenth of the time of `sum_by_row`, which sorts: again a fifth of a step.
        place_N = np.arange(row_N.size, dtype=np.int32)
        with self._lock:
            if self._last_R is None:
                self._last_R = np.empty(self._num_rows, np.int32)
            # Of equal indices numpy keeps the last, so a row's last place wins; never cleared,
            # since only places that were just written are read.
            self._last_R[row_N] = place_N
            last_N = self._last_R.take(row_N)
        again = np.flatnonzero(last_N != place_N)
        if not again.size:
            return RowsToSend(rows, None)
        once_U = np.flatnonzero(last_N == place_N)
        into = np.searchsorted(once_U, last_N.take(again))
        numbers = once_U, row_N.take(once_U), again, into
        return RowsToSend(rows, _RowMerge(*map(torch.from_numpy, numbers)))
