"""The copies of this rank's rows in other groups, which every step updates alike.

Shape suffixes: U unique ids, G groups of tables"""

from collections.abc import Sequence
from typing import Protocol, final

from torch import Tensor

from gmeta.data.transfer import move_to_device
from gmeta.distributed.groups.row_sums import sum_rows
from gmeta.distributed.groups.row_union import UnionRequest
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.tables.rows_to_send import Ints, RowsToSend
from gmeta.distributed.transport.narrow_transport import NarrowTransport


class Copies(Protocol):
    """Copies of this rank's rows in other groups."""

    def touch(self, rows_G: Sequence[Ints]) -> "TouchedRows | None":
        """Hear of a step's distinct rows of each group of tables before they are looked up; None:
        the other groups bring nothing for them in this step. Collective."""


@final
class TouchedRows:
    """The rows of a step, here and in the copies."""

    def __init__(self, rows_G: Sequence[Ints], ranks: Ranks, wire: NarrowTransport) -> None:
        self._request = UnionRequest(ranks.transport, rows_G)
        self._device, self._wire = ranks.device, wire

    def send(self) -> None:
        """Start to tell which rows, so that the answers travel beside forward and backward."""
        self._request.send()

    def add_up(
        self, given_G: Sequence[RowsToSend], grads_G: Sequence[Tensor], scale: float
    ) -> tuple[list[RowsToSend], list[Tensor]]:
        """Return the rows that any group touches, and the sums of their gradients over all."""
        unions = move_to_device(tuple(self._request.unions()), self._device)
        own_G = [given.sum_gradients(grad)[1] for given, grad in zip(given_G, grads_G, strict=True)]
        sums_G = sum_rows(unions, own_G, self._wire, scale)
        return [RowsToSend(union.row_U, None) for union in unions], sums_G


@final
class ExactCopies:
    """Copies to which the gradients of every step go: a step is that of one group of all ranks."""

    def __init__(self, across: Ranks, wire: NarrowTransport) -> None:
        self._ranks, self._wire = across, wire

    def touch(self, rows_G: Sequence[Ints]) -> TouchedRows:
        """Ask for the rows that the copies touch, see Copies."""
        return TouchedRows(rows_G, self._ranks, self._wire)
