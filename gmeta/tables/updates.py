"""A fast lookup and fused update for embedding tables on the CPU, on the storage that fbgemm owns.

fbgemm's CPU backward spends 600 to 1,600 ns a row where summing the gradients of equal rows and one
vectorised update take 50 to 90. Only the arithmetic is replaced: weights, optimizer state, learning
rate and state dict stay fbgemm's, so checkpoints are the same either way.

Shape suffixes: N rows given out (ids may repeat), U distinct rows, A places of rows that stand
again later, C distinct rows of these, R rows of all tables, F features, D embedding width.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmeta.numerics import use_huge_pages
from gmeta.tables.repeated_rows import RepeatedRows

# Share of the rows of an update below which those that stand again are updated once more.
FEW_AGAIN = 0.1
# Rows that take their step together. What Adagrad reads, makes and writes back of so many stays in
# the processor's caches: 60,000 rows of 32 take 2 to 30 % less time than at once, by the minute.
ROWS_AT_ONCE = 16_384

# Group, rows [U], their values and the sums of their gradients [U, D], the unit of these. Adagrad's
# overwrites the values.
Update = Callable[["FastGroup", Tensor, Tensor, Tensor, float], None]


class GivenRows(NamedTuple):
    """What a rank was given from a group, and the gradients that came back for it."""

    row_N: Tensor
    rows_ND: Tensor
    grad_ND: Callable[[], Tensor]  # waits for it where it comes from another rank
    ascend: bool  # the row numbers do, so none stands twice
    version: int  # of the tables that the rows were read from
    memory: object  # others' that the tensors lie in, while it lives; None: may be overwritten


class OwnRows(NamedTuple):
    """What a rank asks of a group that it holds itself."""

    row_N: Tensor
    num_learning: int  # the first so many are differentiable
    ascend: bool  # see GivenRows; of these
    saw_gradient: Callable[[Tensor], None]  # is given that of all


@final
class _Rows:
    """The rows of all tables of a group, or the optimizer's of them, where fbgemm keeps them."""

    def __init__(self, values: Tensor, width: int) -> None:
        self.values_RD = values.detach().view(-1, width)
        self._whole_R = _whole_rows(self.values_RD)

    def read(self, row_U: Tensor) -> Tensor:
        """Copies of these rows: [U, D]."""
        values_UD = self.values_RD.new_empty(row_U.numel(), self.values_RD.shape[1])
        self.copy(row_U, values_UD)
        return values_UD

    def copy(self, row_U: Tensor, values_UD: Tensor) -> None:
        """Copy these rows there: on one thread a tenth to a fifth faster than index_select, which
        takes half of the time on two.
        """
        if torch.get_num_threads() > 1:
            torch.index_select(self.values_RD, 0, row_U, out=values_UD)
        else:
            # Only so numpy fills `out` without a buffer; no row is beyond the tables.
            self._whole_R.take(row_U.numpy(), out=_whole_rows(values_UD), mode="clip")

    def write(self, row_U: Tensor, values_UD: Tensor) -> None:
        """New values of these rows: numpy moves each as one piece of bytes, in three eighths of the
        time of index_copy_, which goes over the table column by column (index_add_: six times).
        """
        if self.values_RD.shape[1] == 1:
            self._whole_R[row_U.numpy()] = _whole_rows(values_UD)
        else:  # of more than a number a row, a quarter faster than an assignment
            self._whole_R.put(row_U.numpy(), _whole_rows(values_UD))
        torch.autograd.graph.increment_version(self.values_RD)  # torch sees no write of numpy's


def _whole_rows(rows_RD: Tensor) -> npt.NDArray[Any]:
    values_RD = rows_RD.numpy()
    if rows_RD.shape[1] > 1:
        values_RD = values_RD.view(_bytes(rows_RD.shape[1] * rows_RD.element_size()))
    return values_RD[:, 0]


@cache
def _bytes(number: int) -> np.dtype[np.void]:
    """So many as one value; numpy takes longer to make the type than to use it."""
    return np.dtype((np.void, number))


def _sgd(group: "FastGroup", row_U: Tensor, rows_UD: Tensor, grad_UD: Tensor, unit: float) -> None:
    group.rows.write(row_U, rows_UD.sub(grad_UD, alpha=group.rate * unit))


def _adagrad(
    group: "FastGroup", row_U: Tensor, rows_UD: Tensor, grad_UD: Tensor, unit: float
) -> None:
    squares_UD = group.momentum.read(row_U)
    if unit != 1.0:
        grad_UD = grad_UD * unit
    # One pass over all of them, where an operation for every term took a third longer.
    torch._fused_adagrad_(
        [rows_UD],
        [grad_UD],
        [squares_UD],
        [torch.ones(())],  # the step, which only a decay asks for
        lr=group.rate,
        lr_decay=0.0,
        weight_decay=0.0,
        eps=group.epsilon,
        maximize=False,
    )
    group.momentum.write(row_U, squares_UD)
    group.rows.write(row_U, rows_UD)


def _rowwise_adagrad(
    group: "FastGroup", row_U: Tensor, rows_UD: Tensor, grad_UD: Tensor, unit: float
) -> None:
    squares_U1 = group.momentum.read(row_U)
    squares_U1.add_(_squared_lengths_U1(grad_UD), alpha=unit * unit / grad_UD.shape[1])
    group.momentum.write(row_U, squares_U1)
    root_U1 = squares_U1.sqrt_().add_(group.epsilon)
    group.rows.write(row_U, torch.addcdiv(rows_UD, grad_UD, root_U1, value=-group.rate * unit))


def _squared_lengths_U1(rows_UD: Tensor) -> Tensor:
    """Each row's sum of squares: numpy does without the squares in memory, in half the time."""
    rows = rows_UD.numpy()
    return torch.from_numpy(np.einsum("ud,ud->u", rows, rows)).unsqueeze(1)


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
        use_huge_pages(self.weights)
        self.rows = _Rows(self.weights, self.width)
        self.has_momentum: bool = group.optimizer != EmbOptimType.EXACT_SGD
        if self.has_momentum:
            use_huge_pages(group.momentum1_host)
            # Adagrad's sums of squares: a row of them, or one, for each row of the tables.
            by_row = group.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD
            self.momentum = _Rows(group.momentum1_host, 1 if by_row else self.width)
        # What becomes of the gradients of given rows, in units of the second argument.
        self.take: Callable[[Sequence[GivenRows], float], None] = self.update
        self._update_rows = UPDATES[group.optimizer]
        self._repeated = RepeatedRows(len(self.rows.values_RD))

    @property
    def rate(self) -> float:
        """Of this step."""
        rate: float = self.group.get_learning_rate()
        return rate

    @property
    def epsilon(self) -> float:
        """Of Adagrad's kinds."""
        epsilon: float = self.group.optimizer_args.eps
        return epsilon

    def rows_ND(self, own: OwnRows) -> Tensor:
        """Rows for this rank itself."""
        rows_ND: Tensor = _Lookup.apply(self.weights, self, own)
        return rows_ND

    def look_up(self, row_N: Tensor, rows_ND: Tensor) -> None:
        """Copy rows, by their numbers among those of all tables, to where they are asked for."""
        self.rows.copy(row_N, rows_ND)

    @torch.no_grad()
    def update(self, given: Sequence[GivenRows], unit: float) -> None:
        """One optimizer step on all these rows, with `unit` times the sum of the gradients of each
        over all places where it stands. Parts are updated in order: whose gradients come last
        should stand last.
        """
        given = [part for part in given if part.row_N.numel()]
        ascend = all(part.ascend for part in given)
        if ascend and len(given) < 2:
            for part in given:
                self._step(part.row_N, self._values(part), part.grad_ND(), unit)
            return
        places = self._repeated.places([part.row_N.numpy() for part in given], ascend)
        again_A, last_A = (torch.from_numpy(place_A) for place_A in places)
        if again_A.numel() < FEW_AGAIN * sum(part.row_N.numel() for part in given):
            self._update_where_they_lie(given, unit, again_A, last_A)
            return
        row_N = _joined([part.row_N for part in given])
        once_N = torch.ones(row_N.numel(), dtype=torch.bool).index_fill_(0, again_A, False)
        once_U = once_N.nonzero().squeeze(1)
        grad_ND = _joined([part.grad_ND() for part in given])
        sums_ND = grad_ND.index_add(0, last_A, grad_ND.index_select(0, again_A))
        rows_ND = _joined([self._values(part) for part in given])
        row_U, rows_UD, sums_UD = (x.index_select(0, once_U) for x in (row_N, rows_ND, sums_ND))
        self._step(row_U, rows_UD, sums_UD, unit)

    def _update_where_they_lie(
        self, given: Sequence[GivenRows], unit: float, again_A: Tensor, last_A: Tensor
    ) -> None:
        """Rows and gradients are not moved. The few that stand again first take a wrong step, and
        then, from where they were, the right one.
        """
        values = [self._values(part) for part in given]
        if again_A.numel():
            # Of two ascending parts each place is the last of one other, and they ascend, too.
            last_C, index_A = last_A, torch.arange(last_A.numel())
            if len(given) > 2 or not all(part.ascend for part in given):
                last_C, index_A = torch.unique(last_A, return_inverse=True)
            sizes = [part.row_N.numel() for part in given]
            last, again = _places_in_parts(last_C, sizes), _places_in_parts(again_A, sizes)
            row_C = _gathered([part.row_N for part in given], last)
            rows_CD = _gathered(values, last)
            momentum_CD = self.momentum.read(row_C) if self.has_momentum else None
        for part, rows_ND in zip(given, values, strict=True):
            self._step(part.row_N, rows_ND, part.grad_ND(), unit)
        if again_A.numel():
            grads = [part.grad_ND() for part in given]
            sums_CD = _gathered(grads, last).index_add_(0, index_A, _gathered(grads, again))
            if momentum_CD is not None:
                self.momentum.write(row_C, momentum_CD)
            self._step(row_C, rows_CD, sums_CD, unit)

    def _step(self, row_U: Tensor, rows_UD: Tensor, grad_UD: Tensor, unit: float) -> None:
        """See Update; no row stands twice."""
        for first in range(0, row_U.numel(), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            self._update_rows(self, row_U[some], rows_UD[some], grad_UD[some], unit)

    def _values(self, part: GivenRows) -> Tensor:
        """The rows as they are, for an update that may overwrite them."""
        # Reading them from a large table waits for memory: not twice where nobody wrote since.
        if part.version != self.rows.values_RD._version:
            rows_ND = torch.empty_like(part.rows_ND)
            self.look_up(part.row_N, rows_ND)
            return rows_ND
        is_kept = self.group.optimizer != EmbOptimType.EXACT_ADAGRAD or part.memory is None
        return part.rows_ND if is_kept else part.rows_ND.clone()


class _Lookup(torch.autograd.Function):
    """Rows of a group; backward gives their gradients to it, and none to the weights."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, group: FastGroup, own: OwnRows) -> Tensor:
        rows_ND = group.rows.read(own.row_N)
        ctx.group, ctx.own, ctx.version = group, own, weights._version
        ctx.save_for_backward(rows_ND)
        return rows_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        own, (rows_ND,), grad_ND = ctx.own, ctx.saved_tensors, grads[0].contiguous()
        own.saw_gradient(grad_ND)
        row_N = own.row_N
        if own.num_learning < row_N.numel():
            row_N, rows_ND, grad_ND = (x[: own.num_learning] for x in (row_N, rows_ND, grad_ND))
        given = GivenRows(row_N, rows_ND, lambda: grad_ND, own.ascend, ctx.version, None)
        ctx.group.take([given], 1.0)
        return None, None, None


def _places_in_parts(place_A: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Ascending places of parts of these sizes, one behind the other, as places of each part."""
    starts = [0, *accumulate(sizes)][:-1]
    cuts = np.searchsorted(place_A.numpy(), starts[1:]).tolist()
    in_parts = zip(place_A.tensor_split(cuts), starts, strict=True)
    return [places - start for places, start in in_parts]


def _gathered(parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """What stands in these places of each part: [A, D]."""
    found = zip(parts, places, strict=True)
    return torch.cat([part.index_select(0, place_A) for part, place_A in found])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def summed_by_row(row_N: Tensor, grad_ND: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows [U], and the sum of the gradients of each [U, D]; on any device."""
    row_U, inverse_N = torch.unique(row_N, return_inverse=True)
    grad_UD = grad_ND.new_zeros(row_U.numel(), grad_ND.shape[1])
    return row_U, grad_UD.index_add_(0, inverse_N, grad_ND)


def row_numbers_N(first_row_F: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
    """Where each of a group's jagged ids stands among all rows of its tables, given each feature's
    first row.
    """
    num_features = first_row_F.numel()
    samples = (offsets.numel() - 1) // num_features
    ids_F = offsets[::samples].diff() if samples else offsets.new_zeros(num_features)
    return indices + torch.repeat_interleave(first_row_F, ids_F)
