"""A fast lookup and fused update for embedding tables on the CPU, on the storage that fbgemm owns.

fbgemm's CPU backward spends 600 to 1,600 ns a row where summing the gradients of equal rows and one
vectorised update take 50 to 90. Only the arithmetic is replaced: weights, optimizer state, learning
rate and state dict stay fbgemm's, so checkpoints are the same either way.

Shape suffixes: N fetched rows (equal ids may repeat), U distinct rows, A places of rows that stand
again later, R rows of all tables, F features, D embedding width.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
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

# Share of the rows of an update below which those that stand again are updated as often.
FEW_AGAIN = 0.1

# Group, rows [U], their values and the sums of their gradients [U, D].
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
    _write_rows(momentum, row_U, squares)
    root = squares.sqrt_().add_(group.optimizer_args.eps)
    rate = group.get_learning_rate()
    _write(group, row_U, torch.addcdiv(rows_UD, grad_UD, root, value=-rate))


def _write(group: SplitTableBatchedEmbeddingBagsCodegen, row_U: Tensor, rows_UD: Tensor) -> None:
    """New values of the rows."""
    _write_rows(group.weights_host.detach().view(-1, rows_UD.shape[1]), row_U, rows_UD)


def _write_rows(table_RD: Tensor, row_U: Tensor, rows_UD: Tensor) -> None:
    """table[row] = rows: numpy moves each as one piece of bytes in half the time of index_copy_,
    which goes over the table column by column (index_add_: six times as long).
    """
    _whole_rows(table_RD)[row_U.numpy()] = _whole_rows(rows_UD)
    torch.autograd.graph.increment_version(table_RD)  # torch sees no write of numpy's


def _whole_rows(rows_RD: Tensor) -> npt.NDArray[np.void]:
    row_bytes = rows_RD.shape[1] * rows_RD.element_size()
    return rows_RD.numpy().view(np.dtype((np.void, row_bytes)))[:, 0]


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
            row_U, grad_UD = ctx.group.summed(row_N, grad_ND)
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
        self._last_R: npt.NDArray[np.int32] | None = None  # see summed; for training alone

    def __call__(self, indices: Tensor, offsets: Tensor | None, *_: Any, **__: Any) -> Tensor:
        """Rows [N, D] of jagged ids: feature by feature, sample by sample, as TorchRec lays out;
        or of row numbers in any order, without offsets.
        """
        row_N = row_numbers_N(self._first_row_F, indices, offsets)
        rows_ND: Tensor = _Lookup.apply(self._group.weights_host, self, row_N)
        return rows_ND

    def summed(self, row_N: Tensor, grad_ND: Tensor) -> tuple[Tensor, Tensor]:
        """See summed."""
        if self._last_R is None:
            self._last_R = np.empty(self._group.weights_host.numel() // self.width, np.int32)
        return summed(row_N, grad_ND, self._last_R)

    def update(self, row_U: Tensor, rows_UD: Tensor | None, grad_UD: Tensor) -> None:
        """One optimizer step on rows, from their values if these are known and the summed gradients
        of each. One that stands more than once does so with the same gradient.
        """
        if rows_UD is None:
            rows_UD = self._group.weights_host.detach().view(-1, self.width).index_select(0, row_U)
        self._update(self._group, row_U, rows_UD, grad_UD)


def summed(row_N: Tensor, grad_ND: Tensor, last_R: npt.NDArray[np.int32]) -> tuple[Tensor, Tensor]:
    """Rows, and the gradient of each summed over all places where it stands: distinct ones, or a
    few more than once, each time with the sum. `last_R` is memory of one entry a row of the
    tables: whatever it holds, the last place of a row is written before it is read.
    """
    rows_N = row_N.numpy()
    if (rows_N[1:] > rows_N[:-1]).all():
        return row_N, grad_ND  # as one rank gets the ids of a batch of one block
    places_N = np.arange(rows_N.size, dtype=np.int32)
    last_R[rows_N] = places_N
    last_N = last_R[rows_N]
    again_A = np.flatnonzero(last_N != places_N)
    if not again_A.size:
        return row_N, grad_ND
    last_A = torch.from_numpy(last_N[again_A])
    others_A = torch.from_numpy(again_A)
    grad_ND = grad_ND.index_add(0, last_A, grad_ND.index_select(0, others_A))
    if again_A.size < FEW_AGAIN * rows_N.size:
        # Updating these twice, to the same values, costs less than moving all the others.
        return row_N, grad_ND.index_copy_(0, others_A, grad_ND.index_select(0, last_A))
    lasts_U = torch.from_numpy(np.flatnonzero(last_N == places_N))
    return row_N.index_select(0, lasts_U), grad_ND.index_select(0, lasts_U)


def summed_by_row(row_N: Tensor, grad_ND: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows [U], and the sum of the gradients of each [U, D]; on any device."""
    row_U, inverse_N = torch.unique(row_N, return_inverse=True)
    grad_UD = grad_ND.new_zeros(row_U.numel(), grad_ND.shape[1])
    return row_U, grad_UD.index_add_(0, inverse_N, grad_ND)


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
