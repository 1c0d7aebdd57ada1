"""The rows that any group of ranks touches, and who adds up what their copies bring. Among ranks
the others stand in order.

Shape suffixes: N rows, U unique ids, W ranks or workers, G groups of tables"""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from gmeta.data.transfer import map_tree
from gmeta.distributed.tables.rows_to_send import Ints
from gmeta.distributed.transport.transport import Transport


class RowUnion(NamedTuple):
    """The rows [U] of a group of tables that any of the ranks with its copies touches, ascending.

    One rank that touches a row adds up what all bring and gives the others the sum: n ranks of N
    send (n - 1) + (N - 1) times its values, and fewer cannot do."""

    row_U: Tensor
    num_U: Tensor  # ranks that touch each
    place_own: Tensor  # of the rows that this rank brings, in their order
    send_W: tuple[Tensor, ...]  # which of these each other rank adds up
    keep: Tensor  # which of them this rank adds up
    summed: Tensor  # the places of the rows that this rank adds up
    into_own: Tensor  # where its own, and those of each other rank, stand among them
    into_W: tuple[Tensor, ...]
    receive_W: tuple[Tensor, ...]  # the places of the sums of each other rank

    @classmethod
    def of(cls, rows_W: Sequence[Ints], own: int) -> "RowUnion":
        """Return the union of the distinct rows that each rank brings; `own` is this one."""
        row_U, place_N = np.unique(np.concatenate(rows_W), return_inverse=True)
        place_W = np.split(place_N, np.cumsum([rows.size for rows in rows_W])[:-1])
        touches_WU = np.zeros((len(rows_W), row_U.size), bool)
        for touches_U, place in zip(touches_WU, place_W, strict=True):
            touches_U[place] = True
        num_U = touches_WU.sum(axis=0)
        # By number, so that popular rows, which all touch, are added up by all alike.
        adder_U = (touches_WU.cumsum(axis=0) > row_U % np.maximum(num_U, 1)).argmax(axis=0)
        adder_of_own, is_summed_U = adder_U[place_W[own]], adder_U == own
        among_summed_U = np.cumsum(is_summed_U) - 1
        into_W = [among_summed_U[place[adder_U[place] == own]] for place in place_W]
        others = [rank for rank in range(len(rows_W)) if rank != own]
        numbers: tuple[Any, ...] = (
            row_U,
            num_U,
            place_W[own],
            tuple(np.flatnonzero(adder_of_own == rank) for rank in others),
            np.flatnonzero(adder_of_own == own),
            np.flatnonzero(is_summed_U),
            into_W[own],
            tuple(into_W[rank] for rank in others),
            tuple(np.flatnonzero(adder_U == rank) for rank in others),
        )
        return cls(*map_tree(numbers, torch.from_numpy, np.ndarray))


@final
class UnionRequest:
    """Asks the ranks that hold copies of this rank's rows which of them they touch: their numbers
    are on the way once it is made, the rows after `send`. Collective.

    `rows_G` are distinct rows of each group of tables, on the host."""

    def __init__(self, transport: Transport, rows_G: Sequence[Ints]) -> None:
        self._transport, self._rows_G = transport, rows_G
        self._others = transport.num_others
        counts = torch.tensor([rows.size for rows in rows_G] * self._others, dtype=torch.int64)
        of_each = [len(rows_G)] * self._others
        self._swap = transport.swap(counts, of_each, of_each)
        self._counts_WG: list[list[int]] | None = None

    def send(self) -> None:
        """Start to send the rows; waits for the numbers of all."""
        self._counts_WG = [counts_G.tolist() for counts_G in self._swap.parts()]
        # Four bytes a row: no rank holds 2**31 rows of a group.
        mine = torch.from_numpy(np.concatenate(self._rows_G).astype(np.int32))
        self._swap = self._transport.swap(
            mine.repeat(self._others),
            [mine.numel()] * self._others,
            [sum(counts_G) for counts_G in self._counts_WG],
        )

    def unions(self) -> list[RowUnion]:
        """Return the union of each group of tables; waits for the rows."""
        if self._counts_WG is None:
            self.send()
        assert self._counts_WG is not None
        rows_WG: list[Sequence[Ints]] = [
            np.split(rows.numpy().astype(np.int64), np.cumsum(counts_G)[:-1])
            for rows, counts_G in zip(self._swap.parts(), self._counts_WG, strict=True)
        ]
        rows_WG.insert(self._transport.rank, self._rows_G)
        return [RowUnion.of(rows_W, self._transport.rank) for rows_W in zip(*rows_WG, strict=True)]
