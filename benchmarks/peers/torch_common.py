"""What the torch peers share, so that only their inner loops differ: model, tables, outer step.

Shape suffixes: T tasks, N rows, F single-id or pooled features, V values, U unique ids, D embedding
width, X all inputs side by side"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from peers.interface import Parameters, Peer
from peers.workload import ADAGRAD_EPS, HIDDEN, WIDTH, Batch, Rates, Workload


@dataclass(frozen=True)
class TorchBatch:
    """A batch as tensors. `lookup` is what the peer's tables prepared for themselves."""

    batch: Batch
    support_slices: tuple[slice, ...]
    query_slices: tuple[slice, ...]
    label_N: Tensor
    lookup: "Mapping[str, tuple[Tensor, Tensor]] | UniqueRows"


@dataclass(frozen=True)
class UniqueRows:
    """The distinct rows that a batch reads of the one table of all fields, and who reads which."""

    unique_ids_U: Tensor
    positions_NF: Tensor


class Head(nn.Module):
    """MeLU's decision layers, those that adapt: E - 64 - 64 - 1 with ReLU."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, HIDDEN)
        self.linear_out = nn.Linear(HIDDEN, 1)

    def forward(self, rows_NX: Tensor) -> Tensor:
        """Scores [N] of the rows."""
        hidden = torch.relu(self.fc2(torch.relu(self.fc1(rows_NX))))
        return self.linear_out(hidden).squeeze(-1)


class Tables(ABC):
    """How embeddings are stored, read and trained."""

    @abstractmethod
    def prepare(self, batch: Batch) -> "Mapping[str, tuple[Tensor, Tensor]] | UniqueRows":
        """Ids in the layout that `read` wants."""

    @abstractmethod
    def read(self, prepared: TorchBatch) -> Tensor:
        """Embeddings of all rows [N, X], differentiable."""

    @abstractmethod
    def update(self) -> None:
        """Train on the gradients of the last backward, and drop them."""

    @abstractmethod
    def gradients(self) -> Parameters:
        """Gradients of the last backward as dense tables."""


@final
class DenseTables(Tables):
    """A torch.nn.EmbeddingBag a field, with a gradient of the size of the table."""

    def __init__(
        self, data: Workload, init: Mapping[str, NDArray[np.float32]], rates: Rates
    ) -> None:
        self.bags = {
            field.name: nn.EmbeddingBag.from_pretrained(
                torch.from_numpy(init[f"emb.{field.name}"]), freeze=False, mode="mean"
            )
            for field in data.fields
        }
        weights = [bag.weight for bag in self.bags.values()]
        self.optimizer = torch.optim.Adagrad(weights, lr=rates.tables, eps=ADAGRAD_EPS, fused=True)

    def prepare(self, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {
            # EmbeddingBag wants where each bag begins, without the end of the last.
            name: (torch.from_numpy(ids.ids_V), torch.from_numpy(ids.offsets_N1[:-1]))
            for name, ids in batch.ids.items()
        }

    def read(self, prepared: TorchBatch) -> Tensor:
        return torch.cat([bag(*prepared.lookup[name]) for name, bag in self.bags.items()], dim=1)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> Parameters:
        # Copied: the next backward adds into the same memory.
        return {f"emb.{name}": bag.weight.grad.numpy().copy() for name, bag in self.bags.items()}


@final
class GatheredTables(Tables):
    """One table for all (single-id) fields, of which a step touches only the batch's rows."""

    def __init__(
        self, data: Workload, init: Mapping[str, NDArray[np.float32]], rates: Rates
    ) -> None:
        self.fields = data.fields
        # Field f has the rows first_rows[f] to first_rows[f + 1] of the one table.
        self.first_rows = np.cumsum([0] + [field.num_rows for field in data.fields])
        self.weight = torch.empty(int(self.first_rows[-1]), WIDTH)
        for field, first in zip(self.fields, self.first_rows, strict=False):
            self.weight[first : first + field.num_rows] = torch.from_numpy(
                init[f"emb.{field.name}"]
            )
        self.squares = torch.zeros_like(self.weight)
        self.rate = rates.tables
        self.unique_ids_U = torch.empty(0, dtype=torch.int64)
        self.rows_UD = torch.empty(0, WIDTH)

    def prepare(self, batch: Batch) -> UniqueRows:
        columns = zip(self.fields, self.first_rows, strict=False)
        ids_NF = np.stack([batch.ids[field.name].ids_V + first for field, first in columns], axis=1)
        unique_U, positions = np.unique(ids_NF, return_inverse=True)
        return UniqueRows(
            torch.from_numpy(unique_U), torch.from_numpy(positions.reshape(ids_NF.shape))
        )

    def read(self, prepared: TorchBatch) -> Tensor:
        lookup = prepared.lookup
        self.unique_ids_U = lookup.unique_ids_U
        self.rows_UD = self.weight.index_select(0, lookup.unique_ids_U).requires_grad_()
        rows = self.rows_UD.index_select(0, lookup.positions_NF.reshape(-1))
        return rows.view(lookup.positions_NF.shape[0], -1)

    def update(self) -> None:
        grad_UD = self.rows_UD.grad
        squares_UD = self.squares.index_select(0, self.unique_ids_U).addcmul_(grad_UD, grad_UD)
        # The ids are distinct, so that no row is written twice.
        self.squares.index_copy_(0, self.unique_ids_U, squares_UD)
        step_UD = grad_UD / squares_UD.sqrt_().add_(ADAGRAD_EPS)
        self.weight.index_add_(0, self.unique_ids_U, step_UD, alpha=-self.rate)

    def gradients(self) -> Parameters:
        dense = (
            torch.zeros_like(self.weight)
            .index_copy_(0, self.unique_ids_U, self.rows_UD.grad)
            .numpy()
        )
        columns = zip(self.fields, self.first_rows, strict=False)
        return {
            f"emb.{field.name}": dense[first : first + field.num_rows] for field, first in columns
        }


class TorchPeer(Peer):
    """A peer that owns nothing but `query_loss`: its way to adapt the head to each task."""

    # Whether it reads and trains only the distinct rows of the step where tables are large.
    gathers_rows = False

    def build(self, data: Workload, init: Mapping[str, NDArray[np.float32]], rates: Rates) -> None:
        tables = GatheredTables if self.gathers_rows and data.large_tables else DenseTables
        self.tables: Tables = tables(data, init, rates)
        self.head = Head(WIDTH * len(data.fields))
        # `init` holds the tables too, of which the head knows nothing.
        head_names = self.head.state_dict()
        self.head.load_state_dict(
            {name: torch.from_numpy(init[name].copy()) for name in head_names}
        )
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=rates.outer, fused=True)
        self.inner_rate = rates.inner

    def prepare(self, batch: Batch) -> TorchBatch:
        middle_T = batch.row_offsets_T1[:-1] + batch.support_lengths_T
        return TorchBatch(
            batch=batch,
            support_slices=tuple(map(slice, batch.row_offsets_T1[:-1].tolist(), middle_T.tolist())),
            query_slices=tuple(map(slice, middle_T.tolist(), batch.row_offsets_T1[1:].tolist())),
            label_N=torch.from_numpy(batch.label_N),
            lookup=self.tables.prepare(batch),
        )

    def step(self, prepared: TorchBatch) -> float:
        loss = self.query_loss(prepared)
        loss.backward()
        self.tables.update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def gradients(self, prepared: TorchBatch) -> Parameters:
        self.query_loss(prepared).backward()
        head = {name: weight.grad.numpy().copy() for name, weight in self.head.named_parameters()}
        return head | self.tables.gradients()

    @abstractmethod
    def query_loss(self, prepared: TorchBatch) -> Tensor:
        """Adapt the head to each task's support rows; the mean over tasks of the query loss."""


def episodes(
    prepared: TorchBatch, rows_NX: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Each task's support rows and labels, query rows and labels."""
    for support, query in zip(prepared.support_slices, prepared.query_slices, strict=True):
        yield rows_NX[support], prepared.label_N[support], rows_NX[query], prepared.label_N[query]
