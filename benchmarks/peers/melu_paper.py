"""MeLU as its paper describes it (KDD'19, section 3, algorithm 1): one user after the other.

Written from the paper: multi-id fields enter as multi-hot vectors times an embedding matrix, and
each user's forward passes read the embeddings anew. Local updates keep their graph, so that the
gradient is exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import embedding, mse_loss

from peers.interface import Parameters, Peer
from peers.torch_common import Head
from peers.workload import ADAGRAD_EPS, WIDTH, Batch, Field, Jagged, Rates, Workload


@dataclass(frozen=True)
class Rows:
    """Rows of one user: ids [N] of a single-id field, multi-hot [N, table rows] of others."""

    inputs: Mapping[str, Tensor]
    label_N: Tensor


@final
class MeLU(Peer):
    """For each user: decision layers updated on the support rows, loss on the query rows."""

    def build(self, data: Workload, init: Mapping[str, NDArray[np.float32]], rates: Rates) -> None:
        self.fields = data.fields
        self.inner_rate = rates.inner
        self.tables = {
            field.name: torch.from_numpy(init[f"emb.{field.name}"]).requires_grad_()
            for field in data.fields
        }
        self.head = Head(WIDTH * len(data.fields))
        self.head.load_state_dict(
            {name: torch.from_numpy(init[name].copy()) for name in self.head.state_dict()}
        )
        self.adam = torch.optim.Adam(self.head.parameters(), lr=rates.outer, fused=True)
        self.adagrad = torch.optim.Adagrad(
            self.tables.values(), lr=rates.tables, eps=ADAGRAD_EPS, fused=True
        )

    def prepare(self, batch: Batch) -> list[tuple[Rows, Rows]]:
        users = []
        for start, end, support in zip(
            batch.row_offsets_T1[:-1],
            batch.row_offsets_T1[1:],
            batch.support_lengths_T,
            strict=True,
        ):
            users.append(
                (self._rows(batch, start, start + support), self._rows(batch, start + support, end))
            )
        return users

    def step(self, prepared: list[tuple[Rows, Rows]]) -> float:
        loss = self._query_loss(prepared)
        loss.backward()
        for optimizer in (self.adam, self.adagrad):
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    def gradients(self, prepared: list[tuple[Rows, Rows]]) -> Parameters:
        self._query_loss(prepared).backward()
        head = {name: weight.grad.numpy().copy() for name, weight in self.head.named_parameters()}
        return head | {
            f"emb.{name}": table.grad.numpy().copy() for name, table in self.tables.items()
        }

    def _query_loss(self, users: list[tuple[Rows, Rows]]) -> Tensor:
        theta = dict(self.head.named_parameters())
        losses = []
        for support, query in users:
            loss = mse_loss(self.head(self._embed(support)), support.label_N)
            grads = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
            updates = zip(theta.items(), grads, strict=True)
            theta_t = {name: weight - self.inner_rate * grad for (name, weight), grad in updates}
            losses.append(
                mse_loss(functional_call(self.head, theta_t, (self._embed(query),)), query.label_N)
            )
        return torch.stack(losses).mean()

    def _embed(self, rows: Rows) -> Tensor:
        parts = []
        for field in self.fields:
            values, table = rows.inputs[field.name], self.tables[field.name]
            if field.multi:
                parts.append(values @ table / values.sum(1, keepdim=True))
            else:
                parts.append(embedding(values, table))
        return torch.cat(parts, dim=1)

    def _rows(self, batch: Batch, start: int, end: int) -> Rows:
        inputs = {
            field.name: _inputs(field, batch.ids[field.name], start, end) for field in self.fields
        }
        return Rows(inputs, torch.from_numpy(batch.label_N[start:end]))


def _inputs(field: Field, ids: Jagged, start: int, end: int) -> Tensor:
    first, last = ids.offsets_N1[start], ids.offsets_N1[end]
    ids_V = torch.from_numpy(ids.ids_V[first:last])
    if not field.multi:
        return ids_V
    lengths_N = torch.from_numpy(np.diff(ids.offsets_N1[start : end + 1]))
    row_V = torch.repeat_interleave(torch.arange(end - start), lengths_N)
    # an id may repeat within a row: it counts twice in the mean, as everywhere else
    hot = torch.zeros(end - start, field.num_rows)
    return hot.index_put_((row_V, ids_V), torch.ones(len(ids_V)), accumulate=True)


def make() -> MeLU:
    """The peer."""
    return MeLU()
