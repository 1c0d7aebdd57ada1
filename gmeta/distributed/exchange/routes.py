"""Which rank to ask for which row, and where the answer stands: integer bookkeeping on the host.
Among ranks the others stand in order, then this one; shards stand in the order of the wire.

Shape suffixes: B tables, U unique ids, W ranks or workers, Y shards of tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
    """What a rank asks for, shard by shard in the order of the wire: its own shards come last."""

    counts_Y: Ints
    # Of every id, its row within the shard; int32 where it may travel and that is enough.
    row_of_shard: Tensor
    # The place of each id's row (int32), and the id of each row; None: in the order of ids.
    place_U: Tensor | None = None
    id_U: Tensor | None = None


class Routes:
    """All shards of all tables, as one rank sees them.

    Answers come rank by rank, so the fetched rows stand in the order of the wire. Rows that are cut
    by columns are put together from several answers: they follow the others, table by table.
    """

    def __init__(self, shards: Sequence[Shard], rank: int, world_size: int) -> None:
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
        # and back. That saves a hundredth of a step on a CPU, and 2 of 35 launches of a graph on a
        # GPU.
        tables = [s.table for s in self.shards]
        self._in_order = world_size == 1 and tables == sorted(num_rows_B)

    def make_request(self, unique_ids_U: Tensor, unique_lengths_B: Tensor) -> LookupRequest:
        """Sort the ids of a step, table by table as a batch holds them, by the shard to ask."""
        lengths_B = unique_lengths_B.numpy()
        if self._in_order:
            return LookupRequest(lengths_B.astype(np.int64), unique_ids_U.to(self.id_dtype))
        row_U = np.repeat(self._first_B, lengths_B)
        row_U += unique_ids_U.numpy()
        ends_B = np.cumsum(lengths_B)
        # A table cut by columns is asked of all its ranks at once: its ids are not sorted among
        # them.
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
