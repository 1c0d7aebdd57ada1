"""Rows that the steps of one group of ranks alone move, until what all groups moved is added up.

`values` of a row are its weights and, behind them, its optimizer's state.

Shape suffixes: U unique ids, R rows of tables, D embedding width, V values, G groups of tables"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from gmeta.distributed.groups.row_sums import sum_rows
from gmeta.distributed.groups.row_union import RowUnion, UnionRequest
from gmeta.distributed.tables.rows_to_send import Ints
from gmeta.distributed.tables.updates import FastGroup
from gmeta.distributed.transport.narrow_transport import NarrowTransport
from gmeta.distributed.transport.transport import Transport

TINY = 1e-30  # a sum of squares that is 0


@dataclass(frozen=True)
class MovedRows:
    """The rows that steps touched, their values and optimizer state before, and how far they moved
    (on the host)."""

    row_U: Ints
    before_UV: Tensor
    moved_UV: Tensor


@dataclass(frozen=True)
class RowsOfAll:
    """The rows that any group touched, and the sums of what the groups moved them (on the host)."""

    union: RowUnion
    total_UV: Tensor


@final
class LocalRows:
    """The rows that steps touched since `close`; Copies that bring nothing within a step."""

    def __init__(self, groups: Sequence[FastGroup]) -> None:
        self._open_G = [_OpenRows(group) for group in groups]

    def touch(self, rows_G: Sequence[Ints]) -> None:
        """Keep what these rows are before a step moves them."""
        for rows_of_group, row_U in zip(self._open_G, rows_G, strict=True):
            rows_of_group.touch(row_U)

    def close(self) -> list[MovedRows]:
        """Return what has moved; from now on rows are touched anew."""
        return [rows_of_group.close() for rows_of_group in self._open_G]

    def settle(self, moved_G: Sequence[MovedRows], all_G: Sequence[RowsOfAll]) -> None:
        """Have rows that were closed stand where all groups together moved them, see sum_moved."""
        for rows_of_group, moved, of_all in zip(self._open_G, moved_G, all_G, strict=True):
            rows_of_group.settle(moved, of_all)


def sum_moved(moved_G: Sequence[MovedRows], transport: Transport) -> list[RowsOfAll]:
    """Return what all groups of ranks moved; any thread may call it. Collective."""
    unions = UnionRequest(transport, [moved.row_U for moved in moved_G]).unions()
    wire = NarrowTransport(transport, None)
    totals = sum_rows(unions, [moved.moved_UV for moved in moved_G], wire)
    return [RowsOfAll(*one) for one in zip(unions, totals, strict=True)]


class _OpenRows:
    def __init__(self, group: FastGroup) -> None:
        self._group = group
        # The place of each row among the open ones.
        self._place_R = np.full(len(group.rows.values_RD), -1, np.int32)
        self._begin()

    def _begin(self) -> None:
        self._num_open = 0
        # What came since it was last put together: a copy of all in every step would cost more.
        self._parts: list[tuple[Ints, Tensor]] = []

    def _index(self, numbers: Ints) -> Tensor:
        return torch.from_numpy(numbers).to(self._group.rows.values_RD.device)

    def touch(self, row_U: Ints) -> None:
        new = row_U[self._place_R[row_U] < 0]
        self._place_R[new] = np.arange(self._num_open, self._num_open + new.size)
        self._num_open += new.size
        self._parts.append((new, self._group.copy_all(self._index(new))))

    def _join(self) -> tuple[Ints, Tensor]:
        none = np.zeros(0, np.int64)
        parts = self._parts or [(none, self._group.copy_all(self._index(none)))]
        rows, before = zip(*parts, strict=True)
        self._parts = [(np.concatenate(rows), torch.cat(before))]
        return self._parts[0]

    def close(self) -> MovedRows:
        row_U, before_UV = self._join()
        now_UV = self._group.copy_all(self._index(row_U))
        self._place_R[row_U] = -1
        self._begin()
        return MovedRows(row_U, before_UV, (now_UV - before_UV).cpu())

    def settle(self, moved: MovedRows, of_all: RowsOfAll) -> None:
        union, (_, before_UV) = of_all.union, self._join()
        row_U = union.row_U.to(device := before_UV.device)
        now_UV = self._group.copy_all(row_U)
        # Before the movements that were added up: this group's own rows as it kept them, others as
        # they are, or as they were when touched since.
        place_U = self._place_R[union.row_U.numpy()]
        open_U = np.flatnonzero(place_U >= 0)
        here_U, place = self._index(open_U), self._index(place_U[open_U].astype(np.int64))
        base_UV, since_UV = now_UV.clone(), torch.zeros_like(now_UV)
        base_UV[here_U] = before_UV[place]
        since_UV[here_U] = now_UV[here_U] - before_UV[place]
        base_UV[union.place_own.to(device)] = moved.before_UV
        # All groups get the same bits here.
        base_UV += self._weigh(base_UV, of_all).to(device)
        before_UV[place] = base_UV[here_U]
        self._group.write_all(row_U, base_UV + since_UV)

    def _weigh(self, base_UV: Tensor, of_all: RowsOfAll) -> Tensor:
        """Return how far rows and their state go, as nearly as one optimizer would have moved them
        that saw the gradients of all groups, which are parts of the mean over all ranks."""
        # SGD's steps add up. So do the squares of gradients that are mostly noise: Adagrad's steps,
        # had they been divided by the sums of all squares. Adam's forget, and gradients' scale with
        # them: of n groups the steps would have been the square root of n times their mean.
        widths = [store.width for store in self._group.stores]
        (rows, *state), num_U1 = of_all.total_UV.split(widths, dim=1), of_all.union.num_U[:, None]
        if "sum" in self._group.state:
            before = base_UV.cpu().split(widths, dim=1)[1]
            seen, all_squares = before + state[0] / num_U1, before + state[0]
            rows = rows * (seen / all_squares.clamp(min=TINY)).sqrt()
        elif state:
            rows, state = rows / num_U1.sqrt(), [moments / num_U1 for moments in state]
        return torch.cat([rows, *state], dim=1)
