"""Clipping of a step's gradient by its global norm, over layers and tables together.

The norm counts the layers' averaged gradients once, and each row's gradient summed over all ranks
once, by the rank that holds it: the norm that one rank with dense gradients would find (Pascanu et
al., arXiv 1211.5063, algorithm 1), at any number of ranks.

Shape suffixes: N rows, R rows of tables, D embedding width"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

from gmeta.distributed.exchange.wire import WireExchange
from gmeta.distributed.ranks import add_over_ranks
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.distributed.tables.rows_to_send import RowsToSend
from gmeta.distributed.tables.table_groups import table_groups
from gmeta.distributed.tables.updates import FastGroup, row_numbers_N, sum_by_row

# As in torch.nn.utils.clip_grad_norm_, whose results these are.
NORM_EPSILON = 1e-6


class _HeldRows(NamedTuple):
    """Rows of a lookup, and the leaf that stands for them in the rest of the graph."""

    row_N: Tensor
    rows_ND: Tensor
    leaf_ND: Tensor


class _HoldingFastGroup:
    """A table group of our exchange whose rows' gradients are held until `release`."""

    def __init__(self, group: FastGroup) -> None:
        self._group = group
        self._held: list[tuple[RowsToSend, Tensor]] = []
        # In place of the update, fused into backward: it must wait for the whole step's norm.
        group.take = lambda given, grad_ND: self._held.append((given, grad_ND))

    def squared_norm(self) -> Tensor:
        """Return the squared norm of these rows' gradients, each summed over the ranks."""
        if not self._held:
            return torch.zeros((), device=self._group.rows.values_RD.device)
        row_N = torch.cat([to_update.number_N for to_update, _ in self._held])
        return _squared_norm(row_N, torch.cat([grad_ND for _, grad_ND in self._held]))

    def release(self, scale: Tensor) -> None:
        """Update the rows with `scale` times the gradients."""
        held, self._held = self._held, []
        for to_update, grad_ND in held:
            self._group.update(to_update, grad_ND * scale)


class _HoldingGroup:
    """A table group of TorchRec's exchange whose rows' gradients are held until `release`."""

    def __init__(self, group: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self._lookup = group.forward
        self._first_rows = group.hash_size_cumsum[:-1]
        self._held: list[_HeldRows] = []

    def __call__(self, indices: Tensor, offsets: Tensor, *rest: Any, **named: Any) -> Tensor:
        rows_ND: Tensor = self._lookup(indices, offsets, *rest, **named)
        if not torch.is_grad_enabled():
            return rows_ND
        # backward ends at the leaf: behind it fbgemm would update the rows at once.
        leaf_ND = rows_ND.detach().requires_grad_()
        row_N = row_numbers_N(self._first_rows, indices, offsets)
        self._held.append(_HeldRows(row_N, rows_ND, leaf_ND))
        return leaf_ND

    def squared_norm(self) -> Tensor:
        """Return the squared norm of the gradients at the leaves: a scalar."""
        waiting = [rows for rows in self._held if rows.leaf_ND.grad is not None]
        if not waiting:
            return torch.zeros((), device=self._first_rows.device)
        row_N = torch.cat([given.row_N for given in waiting])
        grads = [given.leaf_ND.grad for given in waiting if given.leaf_ND.grad is not None]
        return _squared_norm(row_N, torch.cat(grads))

    def release(self, scale: Tensor) -> None:
        """Let backward go on from the leaves, with `scale` times their gradients."""
        released, self._held = self._held, []
        for _, rows_ND, leaf_ND in released:
            if leaf_ND.grad is not None:
                rows_ND.backward(leaf_ND.grad * scale)


def _squared_norm(row_N: Tensor, grad_ND: Tensor) -> Tensor:
    # A row that several ranks asked for has one gradient: the sum of theirs.
    squared: Tensor = sum_by_row(row_N, grad_ND).square().sum()
    return squared


class GradientClipping:
    """Holds the tables' updates of a step back until `apply`; make it before the first step."""

    def __init__(
        self, sharded: DistributedLearner, layers: Iterable[nn.Parameter], max_norm: float
    ) -> None:
        self._layers = list(layers)
        self._max_norm = max_norm
        self._norms: tuple[Tensor, Tensor] | None = None  # of layers, and of all
        exchange = sharded.local.exchange
        self._groups: list[_HoldingFastGroup | _HoldingGroup] = []
        if isinstance(exchange, WireExchange):
            self._groups += map(_HoldingFastGroup, exchange.groups)
            return
        for group in table_groups(sharded):
            held = _HoldingGroup(group)
            # TorchRec has the module already, so its forward is replaced in place.
            group.forward = held
            self._groups.append(held)

    def apply(self) -> None:
        """Clip the gradient, update the tables. Collective: between backward and layers' step."""
        grads = [layer.grad for layer in self._layers if layer.grad is not None]
        # Averaged over ranks already, by hooks inside backward.
        of_layers = torch.nn.utils.get_total_norm(grads)
        # A rank may hold no table.
        squared = sum((group.squared_norm() for group in self._groups), torch.zeros_like(of_layers))
        # The layers' gradients are equal on all ranks by now, and count once.
        add_over_ranks(squared)
        norm = (squared + of_layers.square()).sqrt()
        self._norms = of_layers, norm
        # A tensor, never asked for its value: no wait for the device in a step.
        scale = (self._max_norm / (norm + NORM_EPSILON)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale)
        for group in self._groups:
            group.release(scale)

    def norms(self) -> dict[str, float]:
        """Return the norms of the last gradient before clipping: of layers, and of all. Waits."""
        if self._norms is None:
            return {}
        return dict(zip(("dense_grad_norm", "grad_norm"), map(float, self._norms), strict=True))
