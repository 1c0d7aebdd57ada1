"""Our exchange, on any device: ids go out to the ranks that hold their rows, the rows come back,
and their gradients go the same way again.

One AlltoAll each way a step for all kinds of sharding, support and query together, each id once for
each block of the batch.

Shape suffixes: B tables, U unique ids, D embedding width, W ranks or workers, G groups of tables, Y
shards of tables"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from gmeta.config.sharding import WireDtype
from gmeta.data.episodes import RowFetch, RowPlan
from gmeta.data.transfer import move_to_device, unpack
from gmeta.distributed.exchange.exchange import Exchange
from gmeta.distributed.exchange.planning import KnownCounts, Routes, SendPlan, Shard, WirePlanner
from gmeta.distributed.exchange.row_swap import RowSwap
from gmeta.distributed.groups.copies import Copies, ExactCopies, TouchedRows
from gmeta.distributed.groups.levels import Levels
from gmeta.distributed.groups.local_rows import LocalRows
from gmeta.distributed.tables.cached_group import CachedGroup
from gmeta.distributed.tables.row_mover import make_mover
from gmeta.distributed.tables.rows_to_send import RowsAsGiven
from gmeta.distributed.tables.updates import FastGroup
from gmeta.distributed.transport.narrow_transport import NarrowTransport
from gmeta.distributed.transport.transport import Swap
from gmeta.platform.internals import TableKernel, table_kernels
from gmeta_models.table_projections import pad_width_UD

# Ids travel and are sorted on the host, where a batch has them, and rows between the devices: every
# size is known before a kernel is launched, so the host waits for none. A rank's own rows enter no
# collective. An id travels as its row within its shard, in 4 bytes where that is enough.
KINDS = ("row_wise", "table_wise", "column_wise")
WIRE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class WireExchange(Exchange):
    """Fetches rows by one AlltoAll each way; their gradients update the shards that hold them."""

    planner: WirePlanner
    copies: Copies | None  # of this rank's rows in other groups

    def __init__(
        self,
        tables: nn.Module,
        plan: EmbeddingModuleShardingPlan,
        wire_dtype: WireDtype,
        levels: Levels,
    ) -> None:
        self.ranks = ranks = levels.inside
        super().__init__(ranks.device)
        shards = [
            Shard(
                KINDS.index(sharding.sharding_type),
                table,
                shard.shard_offsets[1],
                shard.shard_sizes[1],
                shard.shard_offsets[0],
                shard.shard_sizes[0],
                shard.placement.rank() % ranks.world_size,
            )
            for table, sharding in enumerate(plan.values())
            for shard in sharding.sharding_spec.shards
        ]
        self.routes = Routes(shards, ranks.rank, ranks.world_size)
        narrow = WIRE_DTYPES.get(wire_dtype)
        self.wire = NarrowTransport(ranks.transport, narrow)
        places = _find_shards(list(table_kernels(tables)), list(plan))
        own = self.routes.of_peer[-1]
        mine = [places[s.table, s.first_row, s.first_column] for s in own]
        # Shards of one group stand together: it serves one kind of sharding and one width.
        self.groups = list(dict.fromkeys(group for group, _ in mine))
        is_of_group_YG = np.array(
            [[group is other for other in self.groups] for group, _ in mine], np.int64
        ).reshape(len(mine), len(self.groups))
        repeats = [
            RowsAsGiven() if isinstance(group, CachedGroup) else group.repeats
            for group in self.groups
        ]
        cached = [group for group in self.groups if isinstance(group, CachedGroup)]
        self.mover = make_mover(cached, ranks.device) if cached else None
        # Makes the rows of steps to come ready, step after step.
        self.ahead = ThreadPoolExecutor(1, "rows", ranks.enter_thread) if cached else None
        firsts = [row for _, row in mine]
        self.num_ranks, self.copies = ranks.world_size, None
        if (across := levels.across) is not None:
            self.num_ranks *= across.world_size
            exact = ExactCopies(across, NarrowTransport(across.transport, narrow))
            self.copies = LocalRows(self.groups) if levels.is_local else exact
        # With copies the host is to know which rows the ranks ask for.
        is_alone = self.num_ranks == 1
        self.planner = WirePlanner(
            self.routes, firsts, is_of_group_YG, repeats, ranks.world_size, is_alone
        )

    def _prefetch(self, plan: RowPlan) -> "_WireFetch":
        return _WireFetch(self, plan)

    def reading(self) -> dict[str, float]:
        """Return the hit rate of this rank's caches, if there are any."""
        return {} if self.mover is None else self.mover.reading()

    def admit(self, to_send: SendPlan, is_awaited: Callable[[], bool]) -> SendPlan:
        """Return a plan, its rows on the device, and in the caches of groups that have one."""
        if self.mover is not None:
            return to_send._replace(
                rows_G=self.mover.admit(self.groups, to_send.rows_G, is_awaited)
            )
        return to_send._replace(rows_G=move_to_device(to_send.rows_G, self.ranks.device))


class _WireFetch(RowFetch):
    def __init__(self, exchange: WireExchange, plan: RowPlan) -> None:
        self._exchange = exchange
        self._known: KnownCounts = plan.known
        self._swap: Swap | None = None  # what is under way: the counts, then the ids
        self._rows: RowSwap | None = None
        # The place of each id's row, on the device.
        self._place_U, self._id_U, rows_G = unpack(plan.numbers)
        self._to_send: SendPlan | None = None
        self._touched: TouchedRows | None = None
        # With rows in caches: their plan, once they are there, and whether the step waits for it.
        self._admission: Future[SendPlan] | None = None
        self._is_awaited = threading.Event()
        if self._known.to_send_WG is not None:
            if self._known.rows_G is None:
                self._to_send = SendPlan(self._known.to_send_WG, rows_G)
            else:
                known_plan = SendPlan(self._known.to_send_WG, self._known.rows_G)
                self._admit_ahead(lambda: known_plan)
            return
        routes = exchange.routes
        others = len(routes.of_peer) - 1
        counts_Y = self._known.counts_Y.numpy()
        remote_counts_Y, own_counts_Y = np.split(counts_Y, [len(counts_Y) - routes.num_local])
        self._counts_WY = np.zeros((others + 1, routes.num_local), np.int64)
        self._counts_WY[-1] = own_counts_Y
        self._remote_ids, self._own_ids = self._known.row_of_shard.split_with_sizes(
            [int(remote_counts_Y.sum()), int(own_counts_Y.sum())]
        )
        self._sent = False
        # First the numbers of ids: then every later message has a length that both sides know.
        counts = torch.from_numpy(remote_counts_Y).int()
        of_peer = [len(shards) for shards in routes.of_peer[:-1]]
        self._swap = exchange.ranks.transport.swap(counts, of_peer, [routes.num_local] * others)

    def send(self) -> None:
        if self._swap is None:
            return  # there is no other rank
        self._sent = True
        for counts_Y, received in zip(self._counts_WY[:-1], self._swap.parts(), strict=True):
            counts_Y[:] = received.numpy()
        transport, counts_W = self._exchange.ranks.transport, self._counts_WY[:-1].sum(axis=1)
        self._swap = transport.swap(self._remote_ids, self._known.ids_W[:-1], counts_W.tolist())
        if self._exchange.ahead is not None:
            self._admit_ahead(self._receive_requests)

    def look_up(self) -> None:
        exchange = self._exchange
        to_send = self._take_send_plan()
        if exchange.mover is not None:
            exchange.mover.wait_for(to_send.rows_G)
        self._rows = RowSwap(
            exchange.wire,
            exchange.groups,
            exchange.ranks.device,
            to_send.rows_G,
            to_send.counts_WG,
            self._known.values_W,
            exchange.on_gradient,
            exchange.num_ranks,
            self._touched,
        )

    def _admit_ahead(self, plan: Callable[[], SendPlan]) -> None:
        """Begin to bring the rows of a plan, which may have to be waited for, into the caches."""
        exchange, is_awaited = self._exchange, self._is_awaited.is_set
        assert exchange.ahead is not None
        self._admission = exchange.ahead.submit(lambda: exchange.admit(plan(), is_awaited))

    def _take_send_plan(self) -> SendPlan:
        """Return the rows to send, on the device; waits for the other ranks and for the caches."""
        if self._to_send is not None:
            return self._to_send
        if self._known.to_send_WG is None and not self._sent:
            self.send()
        if self._admission is None:
            return self._exchange.admit(self._receive_requests(), self._is_awaited.is_set)
        if self._exchange.mover is not None:
            self._exchange.mover.settle()
        self._is_awaited.set()
        # Not kept: rows stay in a cache as long as something refers to their plan.
        admission, self._admission = self._admission, None
        return admission.result()

    def _receive_requests(self) -> SendPlan:
        assert self._swap is not None
        ids = torch.cat([*self._swap.parts(), self._own_ids])
        self._swap = None
        to_send = self._exchange.planner.plan_send(self._counts_WY, ids)
        copies = self._exchange.copies
        if copies is not None and torch.is_grad_enabled():  # predictions change no row
            self._touched = copies.touch([rows.distinct_rows for rows in to_send.rows_G])
        return to_send

    def rows_UD(self, gradient_unit: float) -> Tensor:
        if self._rows is None:
            self.look_up()
        rows, self._rows = self._rows, None
        assert rows is not None
        if self._touched is not None:
            self._touched.send()
        # A power of two changes no digit.
        rows_UD = self._assemble_rows(rows.values(2.0 ** -round(math.log2(gradient_unit))))
        if self._place_U is None:
            return rows_UD
        in_order_UD: Tensor = _PermuteRows.apply(rows_UD, self._place_U, self._id_U)
        return in_order_UD

    def _assemble_rows(self, flat: Tensor) -> Tensor:
        routes = self._exchange.routes
        # Every shard has whole rows of one width: what arrived is the matrix already.
        if routes.is_even and not routes.cut_tables:
            return flat.view(-1, routes.widest)
        # Behind the rows of narrower tables are zeros, which did not travel.
        values = flat.split_with_sizes((self._known.counts_Y.numpy() * routes.columns_Y).tolist())
        uncut: list[Tensor] = []
        parts: dict[int, list[tuple[int, Tensor]]] = {table: [] for table in routes.cut_tables}
        for shard, is_cut, of_shard in zip(routes.shards, routes.is_cut_Y, values, strict=True):
            rows = of_shard.view(-1, shard.num_columns)
            if is_cut:
                parts[shard.table].append((shard.first_column, rows))
            else:
                uncut.append(rows)
        joined = [
            torch.cat([rows for _, rows in sorted(parts[table], key=lambda part: part[0])], dim=1)
            for table in routes.cut_tables
        ]
        return torch.cat([pad_width_UD(rows, routes.widest) for rows in (*uncut, *joined)])


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor, place_U: Tensor, inverse_U: Tensor) -> Tensor:
        # `inverse_U` is where each row went: backward is a gather, too.
        ctx.inverse_U = inverse_U
        return rows_UD.index_select(0, place_U)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.inverse_U), None, None


def _find_shards(
    kernels: list[TableKernel], names: list[str]
) -> dict[tuple[int, int, int], tuple[FastGroup, int]]:
    """Return group and first row of each of this rank's shards, by (table, first row, column)."""
    places = {}
    for kernel in kernels:
        group = (
            FastGroup(kernel.group) if kernel.group.storage is None else CachedGroup(kernel.group)
        )
        starts_B = kernel.group.first_row_of_table
        for table, first_row_of_table in zip(kernel.tables, starts_B, strict=True):
            first_row, first_column = table.local_metadata.shard_offsets
            place = names.index(table.name), first_row, first_column
            places[place] = group, first_row_of_table
    return places
