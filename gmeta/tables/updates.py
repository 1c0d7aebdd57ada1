"""Lookup and fused update of embedding tables on the CPU, on the storage that fbgemm owns.

fbgemm's CPU backward spends 600 to 1,600 ns a row, which makes a whole step more than twice as long
(benchmarks/torchrec_step.py). Only the arithmetic is replaced: weights, optimizer state, learning
rate and state dict stay fbgemm's, so checkpoints are the same either way.

Shape suffixes: N rows given out (ids may repeat), U distinct rows, R rows of all tables, F
features, D embedding width.
"""

from collections.abc import Callable
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

# Group, distinct rows [U] and their gradients [U, D].
Update = Callable[["FastGroup", Tensor, Tensor], None]


@final
class _Rows:
    """The rows of all tables of a group, or the optimizer's of them, where fbgemm keeps them.

    numpy moves each row as one piece of bytes, in a quarter of the time of torch's index_copy_,
    which goes column by column: a fifth of a step on 26 tables of 32 columns.
    """

    def __init__(self, values_RD: Tensor) -> None:
        self.values_RD = values_RD
        self._row = np.dtype((np.void, values_RD.shape[1] * values_RD.element_size()))
        self._whole_R = self._whole(values_RD)

    def read(self, row_U: Tensor) -> Tensor:
        """Return copies of these rows: [U, D]."""
        values_UD = self.values_RD.new_empty(row_U.numel(), self.values_RD.shape[1])
        self.copy(row_U, values_UD)
        return values_UD

    def copy(self, row_U: Tensor, values_UD: Tensor) -> None:
        """Copy these rows into `values_UD`."""
        # Only with "clip" numpy fills `out` without a buffer; no row is beyond the tables.
        self._whole_R.take(row_U.numpy(), out=self._whole(values_UD), mode="clip")

    def write(self, row_U: Tensor, values_UD: Tensor) -> None:
        """Replace these rows, none of which stands twice."""
        self._whole_R.put(row_U.numpy(), self._whole(values_UD))
        torch.autograd.graph.increment_version(self.values_RD)  # torch sees no write of numpy's

    def _whole(self, values_UD: Tensor) -> npt.NDArray[Any]:
        return values_UD.numpy().view(self._row)[:, 0]


def _sgd(group: "FastGroup", row_U: Tensor, grad_UD: Tensor) -> None:
    group.rows.write(row_U, group.rows.read(row_U).sub_(grad_UD, alpha=group.rate))


def _adagrad(group: "FastGroup", row_U: Tensor, grad_UD: Tensor) -> None:
    _step(group, row_U, grad_UD, group.squares.read(row_U).addcmul_(grad_UD, grad_UD))


def _rowwise_adagrad(group: "FastGroup", row_U: Tensor, grad_UD: Tensor) -> None:
    mean_square_U1 = grad_UD.square().mean(dim=1, keepdim=True)
    _step(group, row_U, grad_UD, group.squares.read(row_U).add_(mean_square_U1))


def _step(group: "FastGroup", row_U: Tensor, grad_UD: Tensor, squares: Tensor) -> None:
    """Store the new sums of squares, and take Adagrad's step with them."""
    group.squares.write(row_U, squares)
    root = squares.sqrt_().add_(group.epsilon)
    group.rows.write(row_U, group.rows.read(row_U).addcdiv_(grad_UD, root, value=-group.rate))


UPDATES: dict[EmbOptimType, Update] = {
    EmbOptimType.EXACT_SGD: _sgd,
    EmbOptimType.EXACT_ADAGRAD: _adagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _rowwise_adagrad,
}


class FastGroup:
    """Reads rows of a table group on the CPU, and takes an optimizer step on them.

    Raises:
        KeyError: the group has an optimizer that is not in UPDATES.
    """

    def __init__(self, group: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self.group = group
        self.width: int = group.max_D
        self.weights: Tensor = group.weights_host  # of all tables, flat
        self.rows = _Rows(self.weights.detach().view(-1, self.width))
        num_rows = len(self.rows.values_RD)
        if group.optimizer != EmbOptimType.EXACT_SGD:
            # Adagrad's sums of squares: a row of them, or one, for each row of the tables.
            columns = 1 if group.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD else self.width
            self.squares = _Rows(group.momentum1_host.detach().view(num_rows, columns))
        # What becomes of the gradients [N, D] of rows [N]; clipping holds them back.
        self.take: Callable[[Tensor, Tensor], None] = self.update
        self._update_rows = UPDATES[group.optimizer]
        # The last place of each row in an update: written before it is read.
        self._last_R = np.empty(num_rows, np.int32)

    @property
    def rate(self) -> float:
        """Return the learning rate of this step."""
        rate: float = self.group.get_learning_rate()
        return rate

    @property
    def epsilon(self) -> float:
        """Return what Adagrad's kinds add to the root of the sum of squares."""
        epsilon: float = self.group.optimizer_args.eps
        return epsilon

    def look_up(self, row_N: Tensor, rows_ND: Tensor) -> None:
        """Copy rows, by their numbers among those of all tables, into `rows_ND`."""
        self.rows.copy(row_N, rows_ND)

    @torch.no_grad()
    def update(self, row_N: Tensor, grad_ND: Tensor) -> None:
        """Take one optimizer step on these rows; a row that stands several times moves once, by the
        sum of its gradients.
        """
        # In a tenth of the time of `summed_by_row`, which sorts: again a fifth of a step.
        rows, place_N = row_N.numpy(), np.arange(row_N.numel(), dtype=np.int32)
        self._last_R[rows] = place_N
        last_N = self._last_R.take(rows)
        again_A = np.flatnonzero(last_N != place_N)
        if again_A.size:
            into_A, again = torch.from_numpy(last_N.take(again_A)), torch.from_numpy(again_A)
            grad_ND = grad_ND.index_add(0, into_A, grad_ND.index_select(0, again))
            once_U = torch.from_numpy(np.flatnonzero(last_N == place_N))
            row_N, grad_ND = row_N.index_select(0, once_U), grad_ND.index_select(0, once_U)
        if row_N.numel():
            self._update_rows(self, row_N, grad_ND)


def summed_by_row(row_N: Tensor, grad_ND: Tensor) -> Tensor:
    """Return the sum of the gradients of each distinct row, and 0 behind them: [N, D].

    On any device, and without waiting for it to say how many distinct rows there are.
    """
    sorted_N, order_N = row_N.sort()
    is_other_N = torch.zeros_like(sorted_N)
    is_other_N[1:] = sorted_N[1:] != sorted_N[:-1]
    place_N = is_other_N.cumsum(0)
    return torch.zeros_like(grad_ND).index_add_(0, place_N, grad_ND.index_select(0, order_N))


def row_numbers_N(first_row_F: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
    """Return where each of a group's jagged ids stands among all rows of its tables, given each
    feature's first row.
    """
    num_features = first_row_F.numel()
    samples = (offsets.numel() - 1) // num_features
    ids_F = offsets[::samples].diff() if samples else offsets.new_zeros(num_features)
    firsts_N = torch.repeat_interleave(first_row_F, ids_F, output_size=indices.numel())
    return indices + firsts_N
