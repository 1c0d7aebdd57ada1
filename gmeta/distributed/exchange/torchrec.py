"""TorchRec's exchange: one AlltoAll each way for every kind of sharding.

Shape suffixes: B tables, U unique ids, D embedding width"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection

from gmeta.data.episodes import RowFetch, RowPlan
from gmeta.data.transfer import unpack
from gmeta.distributed.exchange.exchange import Exchange
from gmeta.distributed.exchange.planning import IdsPlanner


class TorchRecExchange(Exchange):
    """Fetches rows through TorchRec's sharded collection; fbgemm updates them in backward."""

    def __init__(
        self, tables: ShardedEmbeddingCollection, names: list[str], device: torch.device
    ) -> None:
        super().__init__(device)
        self._tables = tables
        self._names = names
        self.planner = IdsPlanner()

    def _prefetch(self, plan: RowPlan) -> "_TorchRecFetch":
        """Start TorchRec's distribution of the ids."""
        ids_U, lengths_B = unpack(plan.numbers)
        # Lengths of one id each and stride 1: every table's ids are one jagged sample.
        ids = KeyedJaggedTensor(keys=self._names, values=ids_U, lengths=lengths_B, stride=1)
        return _TorchRecFetch(self._tables, self._names, ids, self.on_gradient)


class _TorchRecFetch(RowFetch):
    def __init__(
        self,
        tables: ShardedEmbeddingCollection,
        names: list[str],
        ids: KeyedJaggedTensor,
        on_gradient: Callable[[Tensor], None],
    ) -> None:
        self._tables = tables
        self._names = names
        self._context = tables.create_context()
        self._travelling = tables.input_dist(self._context, ids)
        self._on_gradient = on_gradient
        self._sent = False
        self._fetched: Any = None  # by table, once they are on their way

    def send(self) -> None:
        """Wait for the numbers of ids, and let the ids travel."""
        self._travelling = self._travelling.wait()
        self._sent = True

    def look_up(self) -> None:
        """Wait for the ids, look their rows up and let them travel."""
        if not self._sent:
            self.send()
        ids = self._travelling.wait()
        self._fetched = self._tables.compute_and_output_dist(self._context, ids)

    def rows_UD(self, gradient_unit: float) -> Tensor:
        """Return the rows of all tables, one table after the other: [U, D]."""
        if self._fetched is None:
            self.look_up()
        fetched, self._fetched = self._fetched, None
        rows_UD = torch.cat([fetched[name].values() for name in self._names])
        if rows_UD.requires_grad:
            rows_UD.register_hook(self._on_gradient)
        return rows_UD
