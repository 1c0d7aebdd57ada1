"""What an exchange works out of a batch's ids before its step: on the host, from numbers alone, so
that another process can do it.

Shape suffixes: W ranks: the others in order, then this one; S shards, G groups of tables that they
are in.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import numpy as np
import torch
from torch import Tensor

from gmeta.batches.episodes import RowPlan
from gmeta.parallel.exchange.routes import Ints, Routes
from gmeta.tables.given import GivenRows, Repeats

if TYPE_CHECKING:
    from gmeta.batches.accumulate import Arranged


class Planner(Protocol):
    """Can be pickled, and holds no table."""

    def plan(self, episodes: "Arranged") -> RowPlan:
        """Return which rows these episodes, which are on the host, need of each rank."""


class Known(NamedTuple):
    """What this rank's host knows of a step's exchange before any message."""

    counts_S: Tensor  # ids asked for, shard by shard in the order of the wire
    row_of_shard: Tensor  # these ids
    ids_W: tuple[int, ...]  # how many are asked of each rank
    values_W: tuple[int, ...]  # how many numbers it gives for them
    # Rows of each group that each rank asks of this one; None: the other ranks must tell.
    given_WG: tuple[tuple[int, ...], ...] | None


class Given(NamedTuple):
    """The rows of each group that a rank gives out, rank by rank, and how many to each."""

    counts_WG: tuple[tuple[int, ...], ...]
    rows_G: tuple[GivenRows, ...]


@final
class WirePlanner:
    """Plans for WireExchange: holds the shards of one rank, their groups, and `routes`."""

    def __init__(
        self,
        routes: Routes,
        first_row_of_shard: Sequence[int],
        is_of_group_SG: Ints,
        repeats_G: Sequence[Repeats],
        world_size: int,
    ) -> None:
        self._routes = routes
        # Of this rank's shards, once for every rank that asks.
        self._first_row_WS = np.tile(np.array(first_row_of_shard, np.int64), world_size)
        self._is_of_group_SG = is_of_group_SG
        self._repeats_G = list(repeats_G)
        self._is_alone = world_size == 1

    def plan(self, episodes: "Arranged") -> RowPlan:
        """Return the ids sorted by the rank that holds their rows; on a single rank also the rows
        that it gives out, to itself."""
        routes = self._routes
        asked = routes.ask(episodes.unique_ids_U, episodes.unique_lengths_B)
        given = None
        if self._is_alone:
            given = self.given(asked.counts_S[np.newaxis], asked.row_of_shard)
        known = Known(
            torch.from_numpy(asked.counts_S),
            asked.row_of_shard,
            tuple((asked.counts_S @ routes.is_of_peer_SW).tolist()),
            tuple((asked.counts_S @ routes.columns_SW).tolist()),
            None if given is None else given.counts_WG,
        )
        rows_G = None if given is None else given.rows_G
        return RowPlan(known, (asked.place_U, asked.id_U, rows_G))

    def given(self, counts_WS: Ints, ids: Tensor) -> Given:
        """Return the rows that this rank gives out, from the ids that each rank asks of its shards,
        and how many these are [W, S]."""
        row_N = np.repeat(self._first_row_WS, counts_WS.reshape(-1))
        # Ids travel as rows of a shard; here they become rows of the group that holds it.
        row_N += ids.numpy()
        counts_WG = counts_WS @ self._is_of_group_SG
        num_ranks, num_groups = counts_WG.shape
        group_N = np.repeat(np.tile(np.arange(num_groups), num_ranks), counts_WG.ravel())
        rows_G = (
            repeats.given(row_N[group_N == group]) for group, repeats in enumerate(self._repeats_G)
        )
        return Given(tuple(map(tuple, counts_WG.tolist())), tuple(rows_G))


@final
class IdsPlanner:
    """Plans for an exchange that sorts ids on the device, as TorchRec's does."""

    def plan(self, episodes: "Arranged") -> RowPlan:
        """Return the ids as the device needs them."""
        return RowPlan(None, (episodes.unique_ids_U, episodes.unique_lengths_B))
