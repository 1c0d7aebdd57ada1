"""Plans of an exchange, from a batch's ids before its step. Among ranks the others stand in order,
then this one.

Shape suffixes: N rows, B tables, U unique ids, W ranks or workers, G groups of tables, Y shards of
tables"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gmeta.data.episodes import RowPlan
from gmeta.distributed.tables.rows_to_send import RepeatFinder, RowsAsGiven, RowsToSend

if TYPE_CHECKING:
    from gmeta.data.accumulate import Collated

# On the host, from numbers alone, so that a worker process can plan.
Ints = npt.NDArray[np.int64]


class Shard(NamedTuple):
    """A part of a table; messages between two ranks name shards in this order."""

    kind: int  # kinds that cut columns come last
    table: int
    first_column: int
    num_columns: int
    first_row: int
    num_rows: int
    rank: int


@dataclass(frozen=True)
class LookupRequest:
    """A rank's request, shard by shard in the order of the wire: its own shards come last."""

    counts_Y: Ints
    # Of every id, its row within the shard; int32 where it may travel and that is enough.
    row_of_shard: Tensor
    # The place of each id's row (int32), and the id of each row; None: in the order of ids.
    place_U: Tensor | None = None
    id_U: Tensor | None = None


class Routes:
    """All shards of all tables, as one rank sees them."""

    def __init__(self, shards: Sequence[Shard], rank: int, world_size: int) -> None:
        # Answers come rank by rank: fetched rows stand in the order of the wire. Rows cut by
        # columns are put together from several answers, and follow the others, table by table.
        others = [peer for peer in range(world_size) if peer != rank]
        width_of: dict[int, int] = {}
        for shard in shards:
            end = shard.first_column + shard.num_columns
            width_of[shard.table] = max(width_of.get(shard.table, 0), end)
        self.widest = max(width_of.values())

        # Shards of one kind and width are kept together, and so stand together.
        def order(shard: Shard) -> tuple[int, ...]:
            return shard.kind, width_of[shard.table], *shard

        self.of_peer = [
            sorted((s for s in shards if s.rank == peer and s.num_rows), key=order)
            for peer in (*others, rank)
        ]
        self.shards = [shard for of_peer in self.of_peer for shard in of_peer]
        self.num_local = len(self.of_peer[-1])
        fits = max(s.num_rows for s in shards) < 2**31
        self.id_dtype = torch.int32 if others and fits else torch.int64
        self.columns_Y = np.array([s.num_columns for s in self.shards])
        self.is_cut_Y = self.columns_Y < [width_of[shard.table] for shard in self.shards]
        # Ids and values that travel between a peer and this rank for an id of a shard.
        ends = np.cumsum([len(of_peer) for of_peer in self.of_peer])
        peer_Y = np.searchsorted(ends, np.arange(len(self.shards)), side="right")
        self.is_of_peer_YW = np.eye(world_size, dtype=np.int64)[peer_Y]
        self.columns_YW = self.is_of_peer_YW * self.columns_Y[:, None]
        num_rows_B: dict[int, int] = {}
        for shard in shards:
            end = shard.first_row + shard.num_rows
            num_rows_B[shard.table] = max(num_rows_B.get(shard.table, 0), end)
        self.cut_tables = sorted({s.table for s in shards if s.num_columns < width_of[s.table]})
        self.is_even = min(width_of.values()) == self.widest
        # Rows of all tables numbered in one go; whole shards are ranges of them.
        self._first_B = np.cumsum([0] + [num_rows_B[table] for table in sorted(num_rows_B)])[:-1]
        self._start_Y = np.array([self._first_B[s.table] + s.first_row for s in self.shards])
        self._rows_Y = np.array([s.num_rows for s in self.shards])
        # One rank and one kind: ids arrive in the order of the wire, and no row is gathered into it
        # and back. It saves a hundredth of a step on a CPU, 2 of 35 launches of a graph on a GPU.
        tables = [s.table for s in self.shards]
        self._in_order = world_size == 1 and tables == sorted(num_rows_B)

    def make_request(self, unique_ids_U: Tensor, unique_lengths_B: Tensor) -> LookupRequest:
        """Return a step's ids, table by table as a batch holds them, sorted by the shard to ask."""
        lengths_B = unique_lengths_B.numpy()
        if self._in_order:
            return LookupRequest(lengths_B.astype(np.int64), unique_ids_U.to(self.id_dtype))
        row_U = np.repeat(self._first_B, lengths_B)
        row_U += unique_ids_U.numpy()
        ends_B = np.cumsum(lengths_B)
        # A table cut by columns is requested of all its ranks at once: its ids need no sorting.
        whole_row_U = np.ones(row_U.size, bool)
        for table in self.cut_tables:
            whole_row_U[ends_B[table] - lengths_B[table] : ends_B[table]] = False
        id_U = np.flatnonzero(whole_row_U)
        whole_rows = row_U.take(id_U)
        order = np.argsort(whole_rows, kind="stable")  # one pass where they ascend already
        id_U, whole_rows = id_U.take(order), whole_rows.take(order)
        # Ascending: what a shard is asked for is one range.
        begin_Y = np.searchsorted(whole_rows, self._start_Y)
        end_Y = np.searchsorted(whole_rows, self._start_Y + self._rows_Y)
        counts_Y = np.where(self.is_cut_Y, 0, end_Y - begin_Y)
        # The ranges of the shards, one after the other in the order of the wire, without a loop
        # over ranks: place i of shard s reads begin_s + (i - places before s).
        on_wire = np.repeat(begin_Y - (np.cumsum(counts_Y) - counts_Y), counts_Y)
        on_wire += np.arange(on_wire.size)
        id_U, whole_rows = id_U.take(on_wire), whole_rows.take(on_wire)
        row_of_shard = whole_rows - np.repeat(self._start_Y, counts_Y)
        if self.cut_tables:
            id_U = np.concatenate([id_U, np.flatnonzero(~whole_row_U)])
            by_slot = np.split(row_of_shard, np.cumsum(counts_Y)[:-1])
            for slot_of_part in np.flatnonzero(self.is_cut_Y):
                table = self.shards[slot_of_part].table
                first, counts_Y[slot_of_part] = ends_B[table] - lengths_B[table], lengths_B[table]
                by_slot[slot_of_part] = unique_ids_U.numpy()[first : ends_B[table]]
            row_of_shard = np.concatenate(by_slot)
        # With the inverse beside it, gathering and its backward are both gathers.
        place_U = np.empty(id_U.size, np.int32)
        place_U[id_U] = np.arange(id_U.size, dtype=np.int32)
        rows = torch.from_numpy(row_of_shard).to(self.id_dtype)
        return LookupRequest(counts_Y, rows, torch.from_numpy(place_U), torch.from_numpy(id_U))


class Planner(Protocol):
    """Plans an exchange; can be pickled, and holds no table."""

    def plan(self, episodes: "Collated") -> RowPlan:
        """Return the rows that these episodes, on the host, need of each rank."""


class KnownCounts(NamedTuple):
    """A step's exchange as this rank's host knows it before any message."""

    counts_Y: Tensor  # ids asked for, shard by shard in the order of the wire
    row_of_shard: Tensor  # these ids
    ids_W: tuple[int, ...]  # how many are asked of each rank
    values_W: tuple[int, ...]  # how many numbers it gives for them
    # Rows of each group that each rank asks of this one; None: the other ranks must tell.
    to_send_WG: tuple[tuple[int, ...], ...] | None
    # These rows; None: they stand among the numbers for the device, or are not known.
    rows_G: tuple[RowsToSend, ...] | None = None


class SendPlan(NamedTuple):
    """The rows of each group that a rank sends, rank by rank, and how many to each."""

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
        repeats_G: Sequence[RepeatFinder | RowsAsGiven],
        world_size: int,
    ) -> None:
        self._routes = routes
        # Of this rank's shards, once for every rank that asks.
        self._first_row_WY = np.tile(np.array(first_row_of_shard, np.int64), world_size)
        self._is_of_group_YG = is_of_group_YG
        self._repeats_G = list(repeats_G)
        # Rows that a cache has by other numbers go to the device with these.
        self._has_cache = any(isinstance(one, RowsAsGiven) for one in repeats_G)
        self._is_alone = world_size == 1

    def plan(self, episodes: "Collated") -> RowPlan:
        """Return the ids sorted by the rank that holds them; alone, also rows sent to itself."""
        routes = self._routes
        request = routes.make_request(episodes.unique_ids_U, episodes.unique_lengths_B)
        to_send = None
        # A single rank knows all requests before any message: they are its own.
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
        if self._has_cache:
            known, rows_G = known._replace(rows_G=rows_G), None
        return RowPlan(known, (request.place_U, request.id_U, rows_G))

    def plan_send(self, counts_WY: Ints, ids: Tensor) -> SendPlan:
        """Return the rows that this rank sends, from the ids that each rank requests of its shards
        and their numbers [W, Y]."""
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
