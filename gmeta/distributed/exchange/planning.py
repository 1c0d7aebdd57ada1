"""What an exchange works out of a batch's ids before its step: on the host, from numbers alone, so
that another process can do it. Among ranks the others stand in order, then this one.

Shape suffixes: N rows, B tables, U unique ids, W ranks or workers, G groups of tables, Y shards of
tables.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import numpy as np
import torch
from torch import Tensor

from gmeta.data.episodes import RowPlan
from gmeta.distributed.exchange.routes import Ints, Routes
from gmeta.distributed.tables.rows_to_send import RepeatFinder, RowsToSend

if TYPE_CHECKING:
    from gmeta.data.accumulate import Collated


class Planner(Protocol):
    """Can be pickled, and holds no table."""

    def plan(self, episodes: "Collated") -> RowPlan:
        """Return which rows these episodes, which are on the host, need of each rank."""


class KnownCounts(NamedTuple):
    """What this rank's host knows of a step's exchange before any message."""

    counts_Y: Tensor  # ids asked for, shard by shard in the order of the wire
    row_of_shard: Tensor  # these ids
    ids_W: tuple[int, ...]  # how many are asked of each rank
    values_W: tuple[int, ...]  # how many numbers it gives for them
    # Rows of each group that each rank asks of this one; None: the other ranks must tell.
    to_send_WG: tuple[tuple[int, ...], ...] | None


class SendPlan(NamedTuple):
    """The rows of each group that a rank gives out, rank by rank, and how many to each."""

    counts_WG: tuple[tuple[int, ...], ...]
    rows_G: tuple[RowsToSend, ...]


@final
class WirePlanner:
    """Plans for WireExchange: holds the shards of one rank, their groups, and `routes`."""

    def __init__(
        self,
        routes: Routes,
        first_row_of_shard: Sequence[int],
        is_of_group_YG: Ints,
        repeats_G: Sequence[RepeatFinder],
        world_size: int,
    ) -> None:
        self._routes = routes
        # Of this rank's shards, once for every rank that asks.
        self._first_row_WY = np.tile(np.array(first_row_of_shard, np.int64), world_size)
        self._is_of_group_YG = is_of_group_YG
        self._repeats_G = list(repeats_G)
        self._is_alone = world_size == 1

    def plan(self, episodes: "Collated") -> RowPlan:
        """Return the ids sorted by the rank that holds their rows; on a single rank also the rows
        that it gives out, to itself."""
        routes = self._routes
        request = routes.make_request(episodes.unique_ids_U, episodes.unique_lengths_B)
        to_send = None
        if self._is_alone:
            to_send = self.plan_send(request.counts_Y[np.newaxis], request.row_of_shard)
        known = KnownCounts(
            torch.from_numpy(request.counts_Y),
            request.row_of_shard,
            tuple((request.counts_Y @ routes.is_of_peer_YW).tolist()),
            tuple((request.counts_Y @ routes.columns_YW).tolist()),
            None if to_send is None else to_send.counts_WG,
        )
        rows_G = None if to_send is None else to_send.rows_G
        return RowPlan(known, (request.place_U, request.id_U, rows_G))

    def plan_send(self, counts_WY: Ints, ids: Tensor) -> SendPlan:
        """Return the rows that this rank gives out, from the ids that each rank asks of its shards,
        and how many these are [W, Y]."""
        row_N = np.repeat(self._first_row_WY, counts_WY.reshape(-1))
        # Ids travel as rows of a shard; here they become rows of the group that holds it.
        row_N += ids.numpy()
        counts_WG = counts_WY @ self._is_of_group_YG
        num_ranks, num_groups = counts_WG.shape
        group_N = np.repeat(np.tile(np.arange(num_groups), num_ranks), counts_WG.ravel())
        rows_G = (
            repeats.prepare_rows(row_N[group_N == group])
            for group, repeats in enumerate(self._repeats_G)
        )
        return SendPlan(tuple(map(tuple, counts_WG.tolist())), tuple(rows_G))


@final
class IdsPlanner:
    """Plans for an exchange that sorts ids on the device, as TorchRec's does."""

    def plan(self, episodes: "Collated") -> RowPlan:
        """Return the ids as the device needs them."""
        return RowPlan(None, (episodes.unique_ids_U, episodes.unique_lengths_B))
