"""torch.func.vmap: each task, padded to the longest, has its own copy of the decision layers."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from peers.torch_common import TorchBatch, TorchPeer
from peers.workload import Batch


@dataclass(frozen=True)
class Padded:
    """Each task's rows in the batch, padded with row 0 at weight 0; its weights sum to 1."""

    rows_TH: Tensor
    label_TH: Tensor
    weight_TH: Tensor


@final
class Vmap(TorchPeer):
    """vmap of grad inside vmap's query loss, differentiated once from outside."""

    gathers_rows = True

    def prepare(self, batch: Batch) -> tuple[TorchBatch, Padded, Padded]:
        middle_T = batch.row_offsets_T1[:-1] + batch.support_lengths_T
        support = pad(batch.label_N, batch.row_offsets_T1[:-1], middle_T)
        return (
            super().prepare(batch),
            support,
            pad(batch.label_N, middle_T, batch.row_offsets_T1[1:]),
        )

    def query_loss(self, prepared: tuple[TorchBatch, Padded, Padded]) -> Tensor:
        batch, support, query = prepared
        rows_NX = self.tables.read(batch)
        theta = dict(self.head.named_parameters())

        def loss(
            weights: dict[str, Tensor], rows_HX: Tensor, label_H: Tensor, weight_H: Tensor
        ) -> Tensor:
            scores_H = functional_call(self.head, weights, (rows_HX,))
            return (weight_H * (scores_H - label_H).square()).sum()

        def adapted_loss(*episode: Tensor) -> Tensor:
            grads = grad(loss)(theta, *episode[:3])
            theta_t = {
                name: weight - self.inner_rate * grads[name] for name, weight in theta.items()
            }
            return loss(theta_t, *episode[3:])

        arguments = []
        for side in (support, query):
            rows_THX = rows_NX.index_select(0, side.rows_TH.reshape(-1)).view(
                *side.rows_TH.shape, -1
            )
            arguments += [rows_THX, side.label_TH, side.weight_TH]
        return vmap(adapted_loss)(*arguments).mean()


def pad(label_N: np.ndarray, starts_T: np.ndarray, ends_T: np.ndarray) -> Padded:
    """Rows start to end of each task, side by side in a rectangle as wide as the longest."""
    lengths_T = ends_T - starts_T
    column_H = np.arange(lengths_T.max())
    # Weight 0 takes the padding out of loss and gradients, whatever its rows hold.
    real_TH = column_H < lengths_T[:, None]
    rows_TH = np.where(real_TH, starts_T[:, None] + column_H, 0)
    weight_TH = (real_TH / lengths_T[:, None]).astype(np.float32)
    return Padded(
        torch.from_numpy(rows_TH), torch.from_numpy(label_N[rows_TH]), torch.from_numpy(weight_TH)
    )


def make() -> Vmap:
    """The peer."""
    return Vmap()
