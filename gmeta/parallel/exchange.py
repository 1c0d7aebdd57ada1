"""The exchange: ids go out to the ranks that hold their rows, the rows come back, and their
gradients go the same way again.

One AlltoAll each way a step, whatever the kinds of sharding: support and query together, each id
once. A rank's own rows enter no collective. An id travels as its row number within the shard that
holds it, in 4 bytes where that is enough. Who is to get how many ids is announced before: the ids
of a step can then travel while another step computes.

Shape suffixes: U ids that a rank asks for, N rows that it gives out, W ranks, S shards that it
holds, D embedding width.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from gmeta.accumulate import Arranged
from gmeta.episodes import RowFetch
from gmeta.parallel.ranks import Ranks
from gmeta.parallel.routes import Asked, Ints, Routes, Shard
from gmeta.parallel.transport import Pending
from gmeta.table_sharding import WireDtype
from metaio.batch import TaskBatch

KINDS = ("row_wise", "table_wise", "column_wise")
WIRE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT16_MAX = 65_504.0

Lookup = Callable[[Tensor, Tensor | None], Tensor]


class Exchange(ABC):
    """Brings the rows that episodes need."""

    @abstractmethod
    def __call__(self, episodes: Arranged) -> Arranged:
        """Announce the ids of these episodes to all ranks."""

    def arranged(
        self, batch: TaskBatch, arrange: Callable[[TaskBatch], Arranged], device: torch.device
    ) -> Arranged:
        """Episodes of a batch on the host, on their device and announced."""
        return self(arrange(batch).to(device))


class TorchRecExchange(Exchange):
    """TorchRec's own: an AlltoAll each way for every kind of sharding."""

    def __init__(self, tables: ShardedEmbeddingCollection, names: list[str]) -> None:
        self._tables = tables
        self._names = names

    def __call__(self, episodes: Arranged) -> Arranged:
        """See Exchange."""
        # Lengths of one id each and stride 1: every table's ids are one jagged sample.
        ids = KeyedJaggedTensor(
            keys=self._names,
            values=episodes.unique_ids_U,
            lengths=episodes.unique_lengths_B,
            stride=1,
        )
        return episodes.fetched_by(_TorchRecFetch(self._tables, self._names, ids))


class _TorchRecFetch(RowFetch):
    def __init__(
        self, tables: ShardedEmbeddingCollection, names: list[str], ids: KeyedJaggedTensor
    ) -> None:
        self._tables = tables
        self._names = names
        self._context = tables.create_context()
        self._travelling = tables.input_dist(self._context, ids)
        self._sent = False

    def send(self) -> None:
        """See RowFetch."""
        self._travelling = self._travelling.wait()
        self._sent = True

    def rows_UD(self, gradient_unit: float) -> Tensor:
        """See RowFetch."""
        if not self._sent:
            self.send()
        ids = self._travelling.wait()
        fetched = self._tables.compute_and_output_dist(self._context, ids)
        return torch.cat([fetched[name].values() for name in self._names])


class WireExchange(Exchange):
    """Ours, for the CPU: see the top of the file."""

    def __init__(
        self,
        tables: ShardedEmbeddingCollection,
        plan: EmbeddingModuleShardingPlan,
        width: int,
        wire_dtype: WireDtype,
        ranks: Ranks,
    ) -> None:
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
        self.routes = Routes(shards, ranks.rank, ranks.world_size, width)
        self.wire_dtype = WIRE_DTYPES.get(wire_dtype)
        places = _places_of_shards(tables, list(plan))
        mine = [places[s.table, s.first_row, s.first_column] for s in self.routes.of_peer[-1]]
        # Shards of one lookup stand together, because a lookup serves one kind of sharding.
        self.lookups: list[Lookup] = list(dict.fromkeys(lookup for lookup, _ in mine))
        self.lookup_S = np.array([self.lookups.index(lookup) for lookup, _ in mine], np.int64)
        # Of this rank's shards, once for every rank that asks.
        self.first_row_WS = np.tile(np.array([row for _, row in mine], np.int64), ranks.world_size)
        self.columns_S = np.array([s.num_columns for s in self.routes.of_peer[-1]], np.int64)

    def __call__(self, episodes: Arranged) -> Arranged:
        """See Exchange."""
        asked = self.routes.ask(episodes.unique_ids_U, episodes.unique_lengths_B)
        return episodes.fetched_by(_WireFetch(self, asked, None))

    def arranged(
        self, batch: TaskBatch, arrange: Callable[[TaskBatch], Arranged], device: torch.device
    ) -> Arranged:
        """See Exchange. Positions that follow the wire cost less than rows moved to their order."""
        asked = self.routes.ask(batch.unique_ids_U, batch.unique_lengths_B)
        if asked.place_U is not None:
            place_U = asked.place_U.numpy().astype(np.int32)
            batch = replace(
                batch,
                positions_NF=torch.from_numpy(place_U[batch.positions_NF.numpy()]),
                multi_positions_V=torch.from_numpy(place_U[batch.multi_positions_V.numpy()]),
            )
        return arrange(batch).to(device).fetched_by(_WireFetch(self, asked, asked.id_U))


class _WireFetch(RowFetch):
    """One step's exchange, as one rank sees it. Peers: the other ranks in order, itself last."""

    def __init__(self, exchange: WireExchange, asked: Asked, id_of_row_U: Tensor | None) -> None:
        routes = exchange.routes
        self.id_of_row_U = id_of_row_U
        self._exchange = exchange
        self._asked = asked
        self._work: Pending | None = None  # what is under way: the counts, then the ids
        self._sent = False
        others = len(routes.of_peer) - 1
        if not others:
            self._counts_WS, self._own_ids = asked.counts_S.reshape(1, -1), asked.row_of_shard
            return
        remote_counts_S, own_counts_S = np.split(
            asked.counts_S, [len(asked.counts_S) - routes.num_local]
        )
        self._counts_WS = np.zeros((others + 1, routes.num_local), np.int64)
        self._counts_WS[-1] = own_counts_S
        self._remote_ids, self._own_ids = asked.row_of_shard.split(
            [int(remote_counts_S.sum()), int(own_counts_S.sum())]
        )
        counts = torch.from_numpy(remote_counts_S).int()
        self._counts = torch.empty(others * routes.num_local, dtype=torch.int32)
        of_peer = [len(shards) for shards in routes.of_peer[:-1]]
        self._work = exchange.ranks.transport.swap(
            counts, of_peer, self._counts, [routes.num_local] * others
        )

    def send(self) -> None:
        """See RowFetch."""
        self._sent = True
        if self._work is None:
            return
        self._work.wait()
        self._counts_WS[:-1] = self._counts.view(len(self._counts_WS) - 1, -1).numpy()
        counts_taken = self._counts_WS[:-1].sum(axis=1).tolist()
        self._taken_ids = self._remote_ids.new_empty(sum(counts_taken))
        self._work = self._exchange.ranks.transport.swap(
            self._remote_ids, self._asked_of_peer(1)[:-1], self._taken_ids, counts_taken
        )

    def rows_UD(self, gradient_unit: float) -> Tensor:
        """See RowFetch."""
        if not self._sent:
            self.send()
        lookups, row_N = self._exchange.lookups, self._rows_to_give_N()
        if self._work is None and self._asked.place_U is None and len(lookups) == 1:
            return lookups[0](row_N, None)  # one rank, and its rows are in order
        flat = self._given_rows(row_N)
        if self._work is not None:
            given = (self._counts_WS @ self._exchange.columns_S).tolist()
            asked = self._asked_of_peer(self._exchange.routes.columns_S)
            swapped: Tensor = _Swap.apply(flat, self._exchange, given, asked, gradient_unit)
            flat = swapped
        rows_UD = self._put_together(flat)
        if self._asked.place_U is None or self.id_of_row_U is not None:
            return rows_UD
        in_order_UD: Tensor = _Permuted.apply(rows_UD, self._asked.place_U, self._asked.id_U)
        return in_order_UD

    def _asked_of_peer(self, values_of_id_S: int | Ints) -> list[int]:
        """Values that each peer is asked for."""
        values_S = self._asked.counts_S * values_of_id_S
        ends = np.cumsum([len(shards) for shards in self._exchange.routes.of_peer])[:-1]
        return [int(part.sum()) for part in np.split(values_S, ends)]

    def _rows_to_give_N(self) -> Tensor:
        """Of every id that a peer asks of this rank, its row number within its lookup."""
        ids = self._own_ids
        if self._work is not None:
            self._work.wait()
            ids = torch.cat([self._taken_ids, ids])
        counts = self._counts_WS.reshape(-1)
        first_row_N = torch.from_numpy(np.repeat(self._exchange.first_row_WS, counts))
        return first_row_N.add_(ids)

    def _given_rows(self, row_N: Tensor) -> Tensor:
        """The values of these rows, peer by peer: flat."""
        lookups, lookup_S = self._exchange.lookups, self._exchange.lookup_S
        if not lookups:
            return torch.zeros(0, requires_grad=True)  # backward must still join the AlltoAll
        if len(lookups) == 1:
            return lookups[0](row_N, None).view(-1)
        lookup_of_segment = np.tile(lookup_S, len(self._counts_WS))
        lookup_N = torch.from_numpy(np.repeat(lookup_of_segment, self._counts_WS.reshape(-1)))
        by_lookup = []
        for index, lookup in enumerate(lookups):
            counts_W = self._counts_WS[:, lookup_S == index].sum(axis=1).tolist()
            by_lookup.append(lookup(row_N[lookup_N == index], None).split(counts_W))
        return torch.cat(
            [rows.reshape(-1) for of_peer in zip(*by_lookup, strict=True) for rows in of_peer]
        )

    def _put_together(self, flat: Tensor) -> Tensor:
        """Fetched rows [U, D] from the values that the peers gave."""
        routes = self._exchange.routes
        if not routes.cut_tables:
            return flat.view(-1, routes.width)
        values = flat.split((self._asked.counts_S * routes.columns_S).tolist())
        whole: list[Tensor] = []
        parts: dict[int, list[tuple[int, Tensor]]] = {table: [] for table in routes.cut_tables}
        for shard, of_shard in zip(routes.shards, values, strict=True):
            rows = of_shard.view(-1, shard.num_columns)
            if shard.num_columns == routes.width:
                whole.append(rows)
            else:
                parts[shard.table].append((shard.first_column, rows))
        joined = [
            torch.cat([rows for _, rows in sorted(parts[table], key=lambda part: part[0])], dim=1)
            for table in routes.cut_tables
        ]
        return torch.cat([*whole, *joined])


class _Swap(torch.autograd.Function):
    """Values that this rank gives, for those that it asked for; gradients go the other way.

    The gradients that reach a row's owner are divided by the number of ranks, as data-parallel
    averaging divides those of the layers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        given: Tensor,
        exchange: WireExchange,
        given_of_peer: list[int],
        asked_of_peer: list[int],
        gradient_unit: float,
    ) -> Tensor:
        ctx.of_peer = given_of_peer, asked_of_peer
        ctx.exchange = exchange
        # A power of two changes no digit.
        ctx.scale = 2.0 ** -round(math.log2(gradient_unit))
        return _swapped(exchange, given, given_of_peer, asked_of_peer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        given_of_peer, asked_of_peer = ctx.of_peer
        grad = _swapped(
            ctx.exchange,
            grads[0].contiguous(),
            asked_of_peer,
            given_of_peer,
            ctx.scale,
            ctx.exchange.ranks.world_size,
        )
        return grad, None, None, None, None


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


def _swapped(
    exchange: WireExchange,
    values: Tensor,
    given: list[int],
    taken: list[int],
    scale: float = 1.0,
    divisor: int = 1,
) -> Tensor:
    """What the peers give for these values, and the last part, of this rank itself: all divided by
    whoever gives them, on the way, so that nobody goes over them once more.

    `scale` brings the values to the middle of float16's range on the wire.
    """
    dtype = exchange.wire_dtype
    result = values.new_empty(sum(taken))
    taken_remote = result[: sum(taken[:-1])]
    remote, own = values.split([sum(given[:-1]), given[-1]])
    sent, received, on_the_way = remote, taken_remote, divisor
    if dtype is not None:
        remote = remote * ((scale if dtype == torch.float16 else 1.0) / divisor)
        if dtype == torch.float16:
            remote.clamp_(-FLOAT16_MAX, FLOAT16_MAX)
        # gloo does not know bfloat16: its bits travel as float16.
        sent = remote.to(dtype).view(torch.float16)
        received, on_the_way = sent.new_empty(taken_remote.numel()), 1
    work = exchange.ranks.transport.swap(sent, given[:-1], received, taken[:-1], on_the_way)
    torch.div(own, divisor, out=result[taken_remote.numel() :])
    work.wait()
    if dtype is not None:
        taken_remote.copy_(received.view(dtype))
    if dtype == torch.float16:
        taken_remote.div_(scale)
    return result


def _places_of_shards(
    tables: ShardedEmbeddingCollection, names: list[str]
) -> dict[tuple[int, int, int], tuple[Lookup, int]]:
    """(table, first row, first column) of this rank's shards -> its lookup, its first row there."""
    places = {}
    for lookup in tables._lookups:
        for kernel in getattr(lookup, "module", lookup)._emb_modules:
            group = kernel.emb_module
            for table, first_value in zip(
                kernel._config.embedding_tables, group.weights_offsets.tolist(), strict=True
            ):
                first_row, first_column = table.local_metadata.shard_offsets
                place = names.index(table.name), first_row, first_column
                places[place] = group, first_value // table.local_cols
    return places
