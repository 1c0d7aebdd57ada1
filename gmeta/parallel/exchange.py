"""The exchange: ids go out to the ranks that hold their rows, the rows come back, and their
gradients go the same way again.

One AlltoAll each way a step, whatever the kinds of sharding: support and query together, each id
once. A rank's own rows enter no collective. An id travels as its row number within the shard that
holds it, in 4 bytes where that is enough. Who is to get how many ids is announced before: the ids
of a step can then travel while another step computes.

Shape suffixes: U ids that a rank asks for, N rows that it gives out, W ranks, S shards that it
holds, G groups of tables that these are in, D embedding width.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from gmeta.batches.accumulate import Arranged
from gmeta.batches.episodes import RowFetch, ids_of_query_rows
from gmeta.parallel.ranks import Ranks
from gmeta.parallel.routes import Asked, Ints, Routes, Shard
from gmeta.parallel.row_swap import Learning, RowSwap
from gmeta.parallel.stock_exchange import Exchange
from gmeta.parallel.transport import Swap
from gmeta.tables.groups import table_kernels
from gmeta.tables.repeated_rows import ascend
from gmeta.tables.sharding import WireDtype
from gmeta.tables.updates import FastGroup, OwnRows
from metaio.batch import TaskBatch

KINDS = ("row_wise", "table_wise", "column_wise")
WIRE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class WireExchange(Exchange):
    """Ours, for the CPU: see the top of the file."""

    def __init__(
        self,
        tables: ShardedEmbeddingCollection,
        plan: EmbeddingModuleShardingPlan,
        width: int,
        wire_dtype: WireDtype,
        ranks: Ranks,
        support_learns: bool,
    ) -> None:
        super().__init__()
        shards = [
            Shard(
                KINDS.index(sharding.sharding_type),
                table,
                shard.shard_offsets[1],
                shard.shard_sizes[1],
                shard.shard_offsets[0],
                shard.shard_sizes[0],
                shard.placement.rank(),
            )
            for table, sharding in enumerate(plan.values())
            for shard in sharding.sharding_spec.shards
        ]
        self.ranks = ranks
        self.support_learns = support_learns
        self.routes = Routes(
            shards, ranks.rank, ranks.world_size, width, some_only_read=not support_learns
        )
        self.wire_dtype = WIRE_DTYPES.get(wire_dtype)
        places = _places_of_shards(tables, list(plan))
        own = self.routes.of_peer[-1]
        mine = [places[s.table, s.first_row, s.first_column] for s in own]
        # Shards of one group stand together, because a group serves one kind of sharding. It comes
        # a second time for rows that are only read.
        group_S = [(group, shard.only_read) for (group, _), shard in zip(mine, own, strict=True)]
        groups = list(dict.fromkeys(group_S))
        self.groups = [group for group, _ in groups]
        self.num_learning_groups = sum(not only_read for _, only_read in groups)
        self.is_of_group_SG = np.array(
            [[one == other for other in groups] for one in group_S], np.int64
        ).reshape(len(mine), len(groups))
        # Of this rank's shards, once for every rank that asks.
        self.first_row_WS = np.tile(np.array([row for _, row in mine], np.int64), ranks.world_size)
        self.columns_S = np.array([s.num_columns for s in own], np.int64)
        self.learns_S = np.array([not s.only_read for s in own], np.int64)
        self.gradient_columns_S = self.columns_S * self.learns_S
        nothing_travels = ranks.world_size == 1 and len(set(self.groups)) == 1
        self._fetch = _OwnFetch if nothing_travels else _WireFetch

    def __call__(self, episodes: Arranged) -> Arranged:
        """See Exchange."""
        asked = self.routes.ask(episodes.unique_ids_U, episodes.unique_lengths_B)
        return episodes.fetched_by(self._fetch(self, asked, None))

    def arranged(
        self, batch: TaskBatch, arrange: Callable[[TaskBatch], Arranged], device: torch.device
    ) -> Arranged:
        """See Exchange. Positions that follow the wire cost less than rows moved to their order."""
        learns_U = None if self.support_learns else ids_of_query_rows(batch)
        asked = self.routes.ask(batch.unique_ids_U, batch.unique_lengths_B, learns_U)
        if asked.place_U is not None:
            moved_NF, moved_V = (
                asked.place_U.index_select(0, positions.flatten()).view_as(positions)
                for positions in (batch.positions_NF, batch.multi_positions_V)
            )
            batch = replace(batch, positions_NF=moved_NF, multi_positions_V=moved_V)
        return arrange(batch).to(device).fetched_by(self._fetch(self, asked, asked.id_U))


class _OwnFetch(RowFetch):
    """One rank's rows of one group of tables: nothing travels, and they may be asked for again."""

    def __init__(self, exchange: WireExchange, asked: Asked, id_of_row_U: Tensor | None) -> None:
        self.id_of_row_U = id_of_row_U
        self._group = exchange.groups[0]
        self._asked = asked
        row_N = _row_numbers_N(exchange.first_row_WS, asked.counts_S, asked.row_of_shard)
        num_learning = int(asked.counts_S @ exchange.learns_S)  # they come first
        ascends = ascend(row_N[:num_learning].numpy())
        self._own = OwnRows(row_N, num_learning, ascends, exchange.saw_gradient)

    def send(self) -> None:
        """See RowFetch."""

    def look_up(self) -> None:
        """See RowFetch."""

    def rows_UD(self, gradient_unit: float) -> Tensor:
        """See RowFetch."""
        rows_UD = self._group.rows_ND(self._own)
        return _in_order_UD(rows_UD, self._asked, self.id_of_row_U)


class _WireFetch(RowFetch):
    """One step's exchange, as one rank sees it. Peers: the other ranks in order, itself last."""

    def __init__(self, exchange: WireExchange, asked: Asked, id_of_row_U: Tensor | None) -> None:
        routes = exchange.routes
        self.id_of_row_U = id_of_row_U
        self._exchange = exchange
        self._asked = asked
        self._swap: Swap | None = None  # what is under way: the counts, then the ids
        self._sent = False
        self._rows: RowSwap | None = None
        others = len(routes.of_peer) - 1
        if not others:
            self._counts_WS, self._own_ids = asked.counts_S.reshape(1, -1), asked.row_of_shard
            return
        remote_counts_S, own_counts_S = np.split(
            asked.counts_S, [len(asked.counts_S) - routes.num_local]
        )
        self._counts_WS = np.zeros((others + 1, routes.num_local), np.int64)
        self._counts_WS[-1] = own_counts_S
        self._remote_ids, self._own_ids = asked.row_of_shard.split_with_sizes(
            [int(remote_counts_S.sum()), int(own_counts_S.sum())]
        )
        counts = torch.from_numpy(remote_counts_S).int()
        of_peer = [len(shards) for shards in routes.of_peer[:-1]]
        self._swap = exchange.ranks.transport.swap(counts, of_peer, [routes.num_local] * others)

    def send(self) -> None:
        """See RowFetch."""
        self._sent = True
        if self._swap is None:
            return
        routes = self._exchange.routes
        for counts_S, told in zip(self._counts_WS[:-1], self._swap.parts(), strict=True):
            counts_S[:] = told.numpy()
        self._swap = self._exchange.ranks.transport.swap(
            self._remote_ids,
            self._asked_of_peer(routes.is_of_peer_SW)[:-1],
            self._counts_WS[:-1].sum(axis=1).tolist(),
        )

    def look_up(self) -> None:
        """See RowFetch."""
        if not self._sent:
            self.send()
        exchange, routes = self._exchange, self._exchange.routes
        self._rows = RowSwap(
            exchange.ranks.transport,
            exchange.groups,
            exchange.wire_dtype,
            self._rows_to_give_WG(),
            (self._counts_WS @ exchange.columns_S).tolist(),
            self._asked_of_peer(routes.columns_SW),
            Learning(
                exchange.num_learning_groups,
                (self._counts_WS @ exchange.gradient_columns_S).tolist(),
                self._asked_of_peer(routes.gradient_columns_SW),
            ),
            exchange.saw_gradient,
        )

    def rows_UD(self, gradient_unit: float) -> Tensor:
        """See RowFetch."""
        if self._rows is None:
            self.look_up()
        rows, self._rows = self._rows, None
        assert rows is not None
        # A power of two changes no digit.
        rows_UD = self._put_together(rows.values(2.0 ** -round(math.log2(gradient_unit))))
        return _in_order_UD(rows_UD, self._asked, self.id_of_row_U)

    def _asked_of_peer(self, values_of_id_SW: Ints) -> list[int]:
        """Values that each peer is asked for."""
        values_W: list[int] = (self._asked.counts_S @ values_of_id_SW).tolist()
        return values_W

    def _row_numbers_N(self) -> Tensor:
        """Of every id that a peer asks of this rank, its row number within its group of tables."""
        ids = self._own_ids
        if self._swap is not None:
            ids = torch.cat([*self._swap.parts(), ids])
            self._swap = None
        return _row_numbers_N(self._exchange.first_row_WS, self._counts_WS.reshape(-1), ids)

    def _rows_to_give_WG(self) -> list[list[Tensor]]:
        """The same by peer and group."""
        counts_WG = self._counts_WS @ self._exchange.is_of_group_SG
        rows = iter(self._row_numbers_N().split_with_sizes(counts_WG.reshape(-1).tolist()))
        return [[next(rows) for _ in counts_G] for counts_G in counts_WG]

    def _put_together(self, flat: Tensor) -> Tensor:
        """Fetched rows [U, D] from the values that the peers gave."""
        routes = self._exchange.routes
        if not routes.cut_tables:
            return flat.view(-1, routes.width)
        values = flat.split_with_sizes((self._asked.counts_S * routes.columns_S).tolist())
        whole: list[Tensor] = []
        parts: dict[int, list[tuple[int, Tensor]]] = {table: [] for table in routes.cut_tables}
        for shard, of_shard in zip(routes.shards, values, strict=True):
            rows = of_shard.view(-1, shard.num_columns)
            if shard.num_columns == routes.width:
                whole.append(rows)
            elif not shard.only_read:
                parts[shard.table].append((shard.first_column, rows))
        joined = [
            torch.cat([rows for _, rows in sorted(parts[table], key=lambda part: part[0])], dim=1)
            for table in routes.cut_tables
        ]
        return torch.cat([*whole, *joined])


def _row_numbers_N(first_row_S: Ints, counts_S: Ints, row_of_shard_N: Tensor) -> Tensor:
    """Row numbers within a group, of rows that stand shard by shard."""
    row_N = np.repeat(first_row_S, counts_S)
    row_N += row_of_shard_N.numpy()
    return torch.from_numpy(row_N)


def _in_order_UD(rows_UD: Tensor, asked: Asked, id_of_row_U: Tensor | None) -> Tensor:
    """Fetched rows in the order of ids, unless the episodes index them as they come."""
    if asked.place_U is None or id_of_row_U is not None:
        return rows_UD
    in_order_UD: Tensor = _Permuted.apply(rows_UD, asked.place_U, asked.id_U)
    return in_order_UD


class _Permuted(torch.autograd.Function):
    """Rows gathered from `place`; `inverse` tells where each went, so backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor, place_U: Tensor, inverse_U: Tensor) -> Tensor:
        ctx.inverse_U = inverse_U
        return rows_UD.index_select(0, place_U)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.inverse_U), None, None


def _places_of_shards(
    tables: ShardedEmbeddingCollection, names: list[str]
) -> dict[tuple[int, int, int], tuple[FastGroup, int]]:
    """(table, first row, first column) of this rank's shards -> its group, its first row there."""
    places = {}
    for kernel in table_kernels(tables):
        group = FastGroup(kernel.emb_module)
        first_value_B = kernel.emb_module.weights_offsets.tolist()
        for table, first_value in zip(kernel._config.embedding_tables, first_value_B, strict=True):
            first_row, first_column = table.local_metadata.shard_offsets
            place = names.index(table.name), first_row, first_column
            places[place] = group, first_value // table.local_cols
    return places
