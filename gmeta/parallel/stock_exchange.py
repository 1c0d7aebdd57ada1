"""What brings the rows of a step to the ranks that need them, and TorchRec's way to do it.

Shape suffixes: U ids that a rank asks for, B tables, D embedding width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection

from gmeta.batches.episodes import RowFetch

if TYPE_CHECKING:
    from gmeta.batches.accumulate import Arranged
    from metaio.batch import TaskBatch


class Exchange(ABC):
    """Brings the rows that episodes need."""

    def __init__(self) -> None:
        # Of this rank's rows in the last backward, on the device: finite where the gradient was.
        self.gradient_sum = torch.tensor(0.0)

    def saw_gradient(self, grad_UD: Tensor) -> None:
        """Take note of the gradient of all rows of a step."""
        # One pass without a mask; a sum that overflows is as far off as one that is infinite.
        self.gradient_sum = grad_UD.sum()

    @abstractmethod
    def __call__(self, episodes: "Arranged") -> "Arranged":
        """Announce the ids of these episodes to all ranks."""

    def arranged(
        self, batch: "TaskBatch", arrange: "Callable[[TaskBatch], Arranged]", device: torch.device
    ) -> "Arranged":
        """Episodes of a batch on the host, on their device and announced."""
        return self(arrange(batch).to(device))


class TorchRecExchange(Exchange):
    """TorchRec's own: an AlltoAll each way for every kind of sharding."""

    def __init__(self, tables: ShardedEmbeddingCollection, names: list[str]) -> None:
        super().__init__()
        self._tables = tables
        self._names = names

    def __call__(self, episodes: "Arranged") -> "Arranged":
        """See Exchange."""
        # Lengths of one id each and stride 1: every table's ids are one jagged sample.
        ids = KeyedJaggedTensor(
            keys=self._names,
            values=episodes.unique_ids_U,
            lengths=episodes.unique_lengths_B,
            stride=1,
        )
        return episodes.fetched_by(
            _TorchRecFetch(self._tables, self._names, ids, self.saw_gradient)
        )


class _TorchRecFetch(RowFetch):
    def __init__(
        self,
        tables: ShardedEmbeddingCollection,
        names: list[str],
        ids: KeyedJaggedTensor,
        saw_gradient: Callable[[Tensor], None],
    ) -> None:
        self._tables = tables
        self._names = names
        self._context = tables.create_context()
        self._travelling = tables.input_dist(self._context, ids)
        self._saw_gradient = saw_gradient
        self._sent = False
        self._fetched: Any = None  # by table, once they are on their way

    def send(self) -> None:
        """See RowFetch."""
        self._travelling = self._travelling.wait()
        self._sent = True

    def look_up(self) -> None:
        """See RowFetch."""
        if not self._sent:
            self.send()
        ids = self._travelling.wait()
        self._fetched = self._tables.compute_and_output_dist(self._context, ids)

    def rows_UD(self, gradient_unit: float) -> Tensor:
        """See RowFetch."""
        if self._fetched is None:
            self.look_up()
        fetched, self._fetched = self._fetched, None
        rows_UD = torch.cat([fetched[name].values() for name in self._names])
        if rows_UD.requires_grad:
            rows_UD.register_hook(self._saw_gradient)
        return rows_UD
