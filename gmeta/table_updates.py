"""A fast lookup and fused update for embedding tables on the CPU, on the storage that fbgemm owns.

fbgemm's CPU backward spends 600 to 1,600 ns a row where summing the gradients of equal rows and one
vectorised update take 50 to 90. Only the arithmetic is replaced: weights, optimizer state, learning
rate and state dict stay fbgemm's, so checkpoints are the same either way.

Shape suffixes: N fetched rows (equal ids may repeat), U distinct rows, A rows that stand again, F
features, D embedding width.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection

from gmeta.numerics import use_huge_pages

# Above so many places where row numbers do not rise, sorting costs more than merging saves.
MAX_FALLS = 64

# Group, distinct rows [U], their values and the sums of their gradients [U, D].
Update = Callable[[SplitTableBatchedEmbeddingBagsCodegen, Tensor, Tensor, Tensor], None]


def use_fast_cpu_updates(sharded: DistributedModelParallel) -> int:
    """Replace the CPU arithmetic of every table group of this rank; returns how many there are.

    Raises:
        KeyError: a group has an optimizer that is not in UPDATES.
    """
    groups = list(table_groups(sharded))
    for group in groups:
        group.forward = _FastGroup(group)
        use_huge_pages(group.weights_host)
        if group.optimizer != EmbOptimType.EXACT_SGD:
            use_huge_pages(group.momentum1_host)
    return len(groups)


def _sgd(
    group: SplitTableBatchedEmbeddingBagsCodegen, row_U: Tensor, rows_UD: Tensor, grad_UD: Tensor
) -> None:
    _write(group, row_U, rows_UD.sub(grad_UD, alpha=group.get_learning_rate()))


def _adagrad(
    group: SplitTableBatchedEmbeddingBagsCodegen, row_U: Tensor, rows_UD: Tensor, grad_UD: Tensor
) -> None:
    momentum = group.momentum1_host.view(-1, grad_UD.shape[1])
    squares_UD = momentum.index_select(0, row_U).addcmul_(grad_UD, grad_UD)
    _adagrad_step(group, row_U, rows_UD, grad_UD, squares_UD, momentum)


def _rowwise_adagrad(
    group: SplitTableBatchedEmbeddingBagsCodegen, row_U: Tensor, rows_UD: Tensor, grad_UD: Tensor
) -> None:
    momentum = group.momentum1_host.view(-1, 1)
    squares_U1 = grad_UD.square().mean(dim=1, keepdim=True).add_(momentum.index_select(0, row_U))
    _adagrad_step(group, row_U, rows_UD, grad_UD, squares_U1, momentum)


def _adagrad_step(
    group: SplitTableBatchedEmbeddingBagsCodegen,
    row_U: Tensor,
    rows_UD: Tensor,
    grad_UD: Tensor,
    squares: Tensor,
    momentum: Tensor,
) -> None:
    """w -= lr * g / (sqrt(m) + eps), with the new m: one an element or one a row."""
    momentum.index_copy_(0, row_U, squares)
    root = squares.sqrt_().add_(group.optimizer_args.eps)
    rate = group.get_learning_rate()
    _write(group, row_U, torch.addcdiv(rows_UD, grad_UD, root, value=-rate))


def _write(group: SplitTableBatchedEmbeddingBagsCodegen, row_U: Tensor, rows_UD: Tensor) -> None:
    """New values of distinct rows: writing them takes a third of index_add_'s time."""
    group.weights_host.detach().view(-1, rows_UD.shape[1]).index_copy_(0, row_U, rows_UD)


UPDATES: dict[EmbOptimType, Update] = {
    EmbOptimType.EXACT_SGD: _sgd,
    EmbOptimType.EXACT_ADAGRAD: _adagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _rowwise_adagrad,
}


class _Lookup(torch.autograd.Function):
    """Rows of a group; backward updates them in place and gives no gradient to the weights."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, group: "_FastGroup", row_N: Tensor) -> Tensor:
        rows_ND = weights.view(-1, group.width).index_select(0, row_N)
        ctx.group, ctx.weights, ctx.version = group, weights, weights._version
        ctx.save_for_backward(row_N, rows_ND)
        return rows_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (grad_ND,) = grads
        row_N, rows_ND = ctx.saved_tensors
        if row_N.numel():
            row_U, grad_UD = summed_by_row(row_N, grad_ND)
            # Reading rows from a large table waits for memory: not twice where nobody wrote since.
            known = row_U is row_N and ctx.version == ctx.weights._version
            ctx.group.update(row_U, rows_ND if known else None, grad_UD)
        return None, None, None


class _FastGroup:
    """What calling a table group does: indices and offsets in, rows out, as fbgemm's forward."""

    def __init__(self, group: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self._group = group
        self._update = UPDATES[group.optimizer]
        self.width = group.max_D
        first_row = group.weights_offsets // self.width
        self._first_row_F = first_row[torch.tensor(group.feature_table_map)].to(torch.int64)

    def __call__(self, indices: Tensor, offsets: Tensor | None, *_: Any, **__: Any) -> Tensor:
        """Rows [N, D] of jagged ids: feature by feature, sample by sample, as TorchRec lays out;
        or of row numbers in any order, without offsets.
        """
        row_N = row_numbers_N(self._first_row_F, indices, offsets)
        rows_ND: Tensor = _Lookup.apply(self._group.weights_host, self, row_N)
        return rows_ND

    def update(self, row_U: Tensor, rows_UD: Tensor | None, grad_UD: Tensor) -> None:
        """One optimizer step on distinct rows, from their values if these are known and the summed
        gradients of each.
        """
        if rows_UD is None:
            rows_UD = self._group.weights_host.detach().view(-1, self.width).index_select(0, row_U)
        self._update(self._group, row_U, rows_UD, grad_UD)


def summed_by_row(row_N: Tensor, grad_ND: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows [U], and the sum of the gradients of each [U, D]."""
    falls = int((row_N[1:] <= row_N[:-1]).sum())
    if not falls:
        # Ascending, as one rank gets the ids of a batch of one block: every row once, in order.
        return row_N, grad_ND
    if falls < MAX_FALLS and not row_N.is_cuda:
        return _merged(row_N, grad_ND)
    row_U, inverse_N = torch.unique(row_N, return_inverse=True)
    if row_U.numel() == row_N.numel():
        # Every row once, as after deduplication on one rank: there is nothing to sum.
        return row_U, torch.empty_like(grad_ND).index_copy_(0, inverse_N, grad_ND)
    grad_UD = grad_ND.new_zeros(row_U.numel(), grad_ND.shape[1])
    return row_U, grad_UD.index_add_(0, inverse_N, grad_ND)


def _merged(row_N: Tensor, grad_ND: Tensor) -> tuple[Tensor, Tensor]:
    """`summed_by_row` of a few ascending runs, as several ranks ask for rows: most stand once."""
    # numpy's stable sort finds the runs and merges them.
    order_N = np.argsort(row_N.numpy(), kind="stable")
    sorted_N = row_N.numpy()[order_N]
    again_A = np.flatnonzero(sorted_N[1:] == sorted_N[:-1]) + 1
    if not again_A.size:
        return row_N, grad_ND
    starts_N = np.arange(order_N.size)
    starts_N[again_A] = 0
    first_A = order_N[np.maximum.accumulate(starts_N)[again_A]]
    again_A = order_N[again_A]
    stays_N = np.ones(order_N.size, bool)
    stays_N[again_A] = False
    place_A = np.cumsum(stays_N)[first_A] - 1
    stays_U = torch.from_numpy(np.flatnonzero(stays_N))
    grad_UD = grad_ND.index_select(0, stays_U)
    more_AD = grad_ND.index_select(0, torch.from_numpy(again_A))
    return row_N[stays_U], grad_UD.index_add_(0, torch.from_numpy(place_A), more_AD)


def row_numbers_N(first_row_F: Tensor, indices: Tensor, offsets: Tensor | None) -> Tensor:
    """Where each of a group's jagged ids stands among all rows of its tables, given each feature's
    first row. Without offsets the indices are such row numbers already.
    """
    if offsets is None:
        return indices
    num_features = first_row_F.numel()
    samples = (offsets.numel() - 1) // num_features
    ids_F = offsets[::samples].diff() if samples else offsets.new_zeros(num_features)
    return indices + torch.repeat_interleave(first_row_F, ids_F)


def set_adam_step(sharded: DistributedModelParallel, step: int) -> None:
    """Tell tables with Adam that `step` steps were done: its bias correction depends on it.

    By themselves they count lookups, also those of a validation, and start at 0 after a resume.
    """
    for group in table_groups(sharded):
        if group.optimizer in (EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM):
            group.iter.fill_(step)
            group.iter_cpu.fill_(step)


def table_groups(
    sharded: DistributedModelParallel,
) -> Iterator[SplitTableBatchedEmbeddingBagsCodegen]:
    """This rank's groups of tables that share one lookup kernel."""
    for module in sharded.modules():
        if isinstance(module, ShardedEmbeddingCollection):
            for lookup in module._lookups:
                for kernel in getattr(lookup, "module", lookup)._emb_modules:
                    yield kernel.emb_module
