"""Lookup and fused update of embedding tables in plain torch, on any device.

Shape suffixes: N rows, U unique ids, R rows of tables, D embedding width"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor

from gmeta.distributed.tables.plain_tables import PlainTables
from gmeta.distributed.tables.rows_to_send import Ints, RepeatFinder, RowsToSend

# fbgemm's CPU backward takes 600 to 1,600 ns a row, which makes a step more than twice as long
# (benchmarks/torchrec_step.py), and its CUDA kernels need a build for the CUDA at hand. Arguments:
# group, distinct rows [U] and their gradients [U, D].
Update = Callable[["FastGroup", Tensor, Tensor], None]


class RowStore(ABC):
    """Rows of a tensor, copied and replaced by their numbers."""

    def __init__(self, values_RD: Tensor) -> None:
        self.values_RD = values_RD
        self.width = values_RD.shape[1]

    def copy_rows(self, row_U: Tensor) -> Tensor:
        """Return copies of these rows."""
        values_UD = self.values_RD.new_empty(row_U.numel(), self.width)
        self.copy(row_U, values_UD)
        return values_UD

    @abstractmethod
    def copy(self, row_U: Tensor, values_UD: Tensor) -> None:
        """Copy these rows into `values_UD`."""

    # No row may repeat among those to write.
    @abstractmethod
    def write(self, row_U: Tensor, values_UD: Tensor) -> None:
        """Replace these rows, none of which stands twice."""


@final
class _DeviceRowStore(RowStore):
    def copy(self, row_U: Tensor, values_UD: Tensor) -> None:
        torch.index_select(self.values_RD, 0, row_U, out=values_UD)

    def write(self, row_U: Tensor, values_UD: Tensor) -> None:
        self.values_RD.index_copy_(0, row_U, values_UD)


@final
class _HostRowStore(RowStore):
    # numpy moves each row as one piece of bytes, in a quarter of the time of torch's index_copy_,
    # which goes column by column: a fifth of a step on 26 tables of 32 columns.
    def __init__(self, values_RD: Tensor) -> None:
        super().__init__(values_RD)
        self._row = np.dtype((np.void, values_RD.shape[1] * values_RD.element_size()))
        self._records_R = self._as_records(values_RD)

    def copy(self, row_U: Tensor, values_UD: Tensor) -> None:
        # Only with "clip" numpy fills `out` without a buffer; no row is beyond the tables.
        self._records_R.take(row_U.numpy(), out=self._as_records(values_UD), mode="clip")

    def write(self, row_U: Tensor, values_UD: Tensor) -> None:
        self._records_R.put(row_U.numpy(), self._as_records(values_UD))
        torch.autograd.graph.increment_version(self.values_RD)  # torch sees no write of numpy's

    def _as_records(self, values_UD: Tensor) -> npt.NDArray[Any]:
        return values_UD.numpy().view(self._row)[:, 0]


def row_store(values_RD: Tensor) -> RowStore:
    """Return the store of these rows that is fast where they are."""
    kind = _HostRowStore if values_RD.device.type == "cpu" else _DeviceRowStore
    return kind(values_RD)


def _sgd(group: "FastGroup", row_U: Tensor, grad_UD: Tensor) -> None:
    moved_UD = group.decayed_rows(row_U).sub_(grad_UD, alpha=group.tables.learning_rate)
    group.rows.write(row_U, moved_UD)


def _adagrad(group: "FastGroup", row_U: Tensor, grad_UD: Tensor) -> None:
    squares_UD = group.state["sum"].copy_rows(row_U).addcmul_(grad_UD, grad_UD)
    _adagrad_step(group, row_U, grad_UD, squares_UD)


def _rowwise_adagrad(group: "FastGroup", row_U: Tensor, grad_UD: Tensor) -> None:
    squares_U1 = group.state["sum"].copy_rows(row_U).add_(_mean_square_U1(grad_UD))
    _adagrad_step(group, row_U, grad_UD, squares_U1)


def _adagrad_step(group: "FastGroup", row_U: Tensor, grad_UD: Tensor, squares: Tensor) -> None:
    group.state["sum"].write(row_U, squares)
    # In place from here on: the sums are stored already.
    root = squares.sqrt_().add_(group.tables.epsilon)
    rate = group.tables.learning_rate
    moved_UD = group.decayed_rows(row_U).addcdiv_(grad_UD, root, value=-rate)
    group.rows.write(row_U, moved_UD)


def _adam(group: "FastGroup", row_U: Tensor, grad_UD: Tensor) -> None:
    _, beta2 = group.tables.betas
    squares_UD = group.state["exp_avg_sq"].copy_rows(row_U).mul_(beta2)
    _adam_step(group, row_U, grad_UD, squares_UD.addcmul_(grad_UD, grad_UD, value=1 - beta2))


def _partial_rowwise_adam(group: "FastGroup", row_U: Tensor, grad_UD: Tensor) -> None:
    _, beta2 = group.tables.betas
    squares_U1 = group.state["exp_avg_sq"].copy_rows(row_U).mul_(beta2)
    _adam_step(group, row_U, grad_UD, squares_U1.add_(_mean_square_U1(grad_UD), alpha=1 - beta2))


def _adam_step(group: "FastGroup", row_U: Tensor, grad_UD: Tensor, squares: Tensor) -> None:
    # These rows alone move, as in fbgemm and torch's SparseAdam (arXiv 1412.6980, algorithm 1).
    tables, (beta1, beta2) = group.tables, group.tables.betas
    # The step of the run, not of the row, as fbgemm counts.
    step = tables.steps_done + 1
    group.state["exp_avg_sq"].write(row_U, squares)
    mean_UD = group.state["exp_avg"].copy_rows(row_U).lerp_(grad_UD, 1 - beta1)
    group.state["exp_avg"].write(row_U, mean_UD)
    root = squares.div_(1 - beta2**step).sqrt_().add_(tables.epsilon)
    rate = tables.learning_rate / (1 - beta1**step)
    group.rows.write(row_U, group.decayed_rows(row_U).addcdiv_(mean_UD, root, value=-rate))


def _mean_square_U1(grad_UD: Tensor) -> Tensor:
    # In one pass, where squares would be written and read again.
    norm_U1: Tensor = torch.linalg.vector_norm(grad_UD, dim=1, keepdim=True)
    return norm_U1.square_().div_(grad_UD.shape[1])


UPDATES: dict[EmbOptimType, Update] = {
    EmbOptimType.EXACT_SGD: _sgd,
    EmbOptimType.EXACT_ADAGRAD: _adagrad,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _rowwise_adagrad,
    EmbOptimType.ADAM: _adam,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _partial_rowwise_adam,
}


class FastGroup:
    """Reads rows of a group of tables, and takes an optimizer step on them."""

    def __init__(self, tables: PlainTables) -> None:
        self.tables = tables
        self.width = tables.width
        values_RD, state = self._values_and_state(tables)
        self.rows = row_store(values_RD)
        self.state = {name: row_store(values) for name, values in state.items()}
        self.stores = [self.rows, *self.state.values()]
        # Called with the gradients [N, D] of sent rows; clipping holds them back instead.
        self.take: Callable[[RowsToSend, Tensor], None] = self.update
        # Called with the distinct rows [U] of each update.
        self.on_update: Callable[[Tensor], object] = lambda row_U: None
        self._update_rows = UPDATES[tables.optimizer]
        # Called behind each update with its distinct rows [U], and with their numbers among those
        # of all tables; see RowAdmission.
        self.after_update: Callable[[Tensor, Tensor], object] | None = None
        self.repeats = RepeatFinder(len(self.rows.values_RD))

    def _values_and_state(self, tables: PlainTables) -> tuple[Tensor, dict[str, Tensor]]:
        return tables.values_RD, tables.state

    def prepare_rows(self, row_N: Ints) -> RowsToSend:
        """Return these rows as `update` takes them, see RepeatFinder."""
        return self.repeats.prepare_rows(row_N)

    def look_up(self, row_N: Tensor, rows_ND: Tensor) -> None:
        """Copy rows, by their numbers among those of all tables, into `rows_ND`."""
        self.rows.copy(row_N, rows_ND)

    def decayed_rows(self, row_U: Tensor) -> Tensor:
        """Return a copy of rows behind the decay of one step."""
        # Decoupled (arXiv 1711.05101), of a step's rows alone: each rank decays those that it has.
        rows_UD, tables = self.rows.copy_rows(row_U), self.tables
        if not tables.weight_decay:
            return rows_UD
        return rows_UD.mul_(max(0.0, 1.0 - tables.learning_rate * tables.weight_decay))

    def copy_all(self, row_U: Tensor) -> Tensor:
        """Return a copy of rows, each with its optimizer's state behind it."""
        return torch.cat([store.copy_rows(row_U) for store in self.stores], dim=1)

    def write_all(self, row_U: Tensor, values: Tensor) -> None:
        """Replace rows and their state by what is like a `copy_all`."""
        parts = values.split([store.width for store in self.stores], dim=1)
        for name, store, part in zip(("", *self.state), self.stores, parts, strict=True):
            store.write(row_U, clamp_squares(name, part).contiguous())

    @torch.no_grad()
    def update(self, to_update: RowsToSend, grad_ND: Tensor) -> None:
        """Take one optimizer step on these rows; repeated ones move by their gradients' sum."""
        if to_update.row_N.numel():
            row_U, grad_UD = to_update.sum_gradients(grad_ND)
            self.on_update(row_U)
            self._update_rows(self, row_U, grad_UD)
            if self.after_update is not None:
                self.after_update(row_U, to_update.distinct_numbers)


def clamp_squares(state: str, values: Tensor) -> Tensor:
    """Return an optimizer's state of this name after differences were added up: sums of squares
    may then lie below 0, by rounding."""
    return values.clamp(min=0) if state in ("sum", "exp_avg_sq") else values


def sum_by_row(row_N: Tensor, grad_ND: Tensor) -> Tensor:
    """Return the sum of the gradients of each distinct row, and 0 behind them: [N, D]."""
    # By a running count, not by `unique`: a device would have to tell the host its size.
    sorted_N, order_N = row_N.sort()
    is_other_N = torch.zeros_like(sorted_N)
    is_other_N[1:] = sorted_N[1:] != sorted_N[:-1]
    place_N = is_other_N.cumsum(0)
    return torch.zeros_like(grad_ND).index_add_(0, place_N, grad_ND.index_select(0, order_N))


def row_numbers_N(first_rows: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
    """Return the row of each of a group's jagged ids among all rows of its tables."""
    num_features = first_rows.numel()
    samples = (offsets.numel() - 1) // num_features
    num_ids = offsets[::samples].diff() if samples else offsets.new_zeros(num_features)
    firsts_N = torch.repeat_interleave(first_rows, num_ids, output_size=indices.numel())
    return indices + firsts_N
