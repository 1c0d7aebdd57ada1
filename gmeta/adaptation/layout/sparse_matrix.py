"""Weighted sums of chosen rows: a sparse matrix in compressed rows, and its transpose for backward.

Shape suffixes: C jagged lists, V values, D embedding width, P task-row pairs"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

# Padding entries are spread over this many rows, or over bags of this size: additions to one row
# wait for each other, and a bag is summed one entry after the other.
ENTRIES_OF_PADDING = 64


class SparseRows(NamedTuple):
    """A sparse [C, P] matrix: row c holds weight_V at columns index_V, from offset c to c + 1."""

    index_V: Tensor  # int32
    offsets_C1: Tensor  # int32
    weight_V: Tensor | None  # None: all 1
    padding: int = 0  # bags of padding entries behind the C; nobody sees their sums

    def times(self, rows_PD: Tensor) -> Tensor:
        """Return the product with a dense matrix: [C, D]."""
        num_bags = self.offsets_C1.numel() - 1 - self.padding
        if not self.index_V.numel():
            return rows_PD.new_zeros(num_bags, rows_PD.shape[1])
        weight_V = None if self.weight_V is None else self.weight_V.to(rows_PD.dtype)
        sums_CD: Tensor = torch.embedding_bag(
            # Detached: for torch's own backward, which is never called, it would keep a third more.
            rows_PD.detach().contiguous(),
            self.index_V,
            self.offsets_C1,
            mode=0,  # sum
            per_sample_weights=weight_V,
            include_last_offset=True,
        )[0]
        return sums_CD[:num_bags] if self.padding else sums_CD

    def pad_to(self, num_entries: int) -> "SparseRows":
        """Return the matrix with at least this many entries: shapes then hang on no batch."""
        missing = num_entries - self.index_V.numel()
        padding = -(-num_entries // ENTRIES_OF_PADDING)
        ends = torch.arange(1, padding + 1) * missing // max(padding, 1)
        more = (self.offsets_C1[-1] + ends).to(self.offsets_C1.dtype)
        weight_V = self.weight_V
        return SparseRows(
            pad(self.index_V, (0, missing)),
            torch.cat([self.offsets_C1, more]),
            None if weight_V is None else pad(weight_V, (0, missing)),
            padding,
        )

    def transpose(self, num_columns: int) -> "SparseRows":
        """Return the [P, C] matrix, made on the host."""
        lengths_C = self.offsets_C1.diff().numpy()
        bag_V = np.repeat(np.arange(lengths_C.size, dtype=np.int32), lengths_C)
        # torch's sort goes by radix: 100,000 ids take 3 ms with it, and 8 with numpy's.
        order_V = self.index_V.argsort(stable=True)
        lengths_P = torch.bincount(self.index_V, minlength=num_columns)
        weight_V = None if self.weight_V is None else self.weight_V[order_V]
        return SparseRows(
            torch.from_numpy(bag_V)[order_V], _offsets_of_lengths(lengths_P), weight_V
        )


class GatherMatrix(NamedTuple):
    """A matrix that copies rows, on a GPU: no offsets, and no search for where a bag ends."""

    index_C: Tensor  # int32

    def times(self, rows_PD: Tensor) -> Tensor:
        """Return the product with a dense matrix: [C, D]."""
        # With contiguous numbers CUDA copies each row by a block of threads of its own: 43 us on an
        # H200 for 66,560 rows of 128 bytes; with every other number of `places` it takes 12.
        places = self.index_C.new_empty(self.index_C.numel(), 2, dtype=torch.int64)
        place_C = places[:, 0].copy_(self.index_C)
        return rows_PD.detach().gather(0, place_C.unsqueeze(1).expand(-1, rows_PD.shape[1]))


class ScatterMatrix(NamedTuple):
    """The transpose of a sparse matrix for a GPU."""

    # A GPU adds in parallel what sums over bags would add one after the other for popular ids, so
    # nothing is sorted here: rows are added to as they come.
    index_V: Tensor  # int32: the row that each adds to; from P on, one that pads
    bag_V: Tensor | None  # int32: the bag that adds; None: each bag once, in their order
    weight_V: Tensor | None  # None: all 1
    num_rows: int  # P

    @classmethod
    def of(
        cls, matrix: SparseRows, lengths_C: Tensor, num_rows: int, multi_row: bool = False
    ) -> "ScatterMatrix":
        """Return the transpose of a [C, P] matrix with bags of these lengths, made on the host."""
        is_there_C = lengths_C.numpy() > 0
        # `multi_row` keeps the general form even if every bag has one row: one shape for all.
        at_most_one = np.count_nonzero(is_there_C) == matrix.index_V.numel()
        if at_most_one and not multi_row and matrix.weight_V is None:
            index_C = _padding_rows(lengths_C.numel(), num_rows)
            index_C.numpy()[is_there_C] = matrix.index_V.numpy()
            return cls(index_C, None, None, num_rows)
        bag_V = np.repeat(np.arange(lengths_C.numel(), dtype=np.int32), lengths_C.numpy())
        return cls(matrix.index_V, torch.from_numpy(bag_V), matrix.weight_V, num_rows)

    def times(self, values_CD: Tensor) -> Tensor:
        """Return the product with a dense matrix: [P, D]."""
        values_VD = values_CD.detach()
        if self.bag_V is not None:
            values_VD = values_VD.index_select(0, self.bag_V)
        if self.weight_V is not None:
            values_VD = values_VD * self.weight_V.to(values_VD.dtype).unsqueeze(1)
        sums_PD = values_VD.new_zeros(self.num_rows + ENTRIES_OF_PADDING, values_VD.shape[1])
        return sums_PD.index_add_(0, self.index_V, values_VD)[: self.num_rows]

    def pad_to(self, num_entries: int) -> "ScatterMatrix":
        """Return the matrix with at least this many entries, or one for each bag."""
        if self.bag_V is None:
            return self
        missing = num_entries - self.index_V.numel()
        weight_V = self.weight_V
        return ScatterMatrix(
            torch.cat([self.index_V, _padding_rows(missing, self.num_rows)]),
            pad(self.bag_V, (0, missing)),
            None if weight_V is None else pad(weight_V, (0, missing)),
            self.num_rows,
        )


Matrix = SparseRows | GatherMatrix | ScatterMatrix


@dataclass(frozen=True)
class Bags:
    """Sums of bags of rows that are cheap to differentiate, any number of times."""

    # torch's backward of a gather clears a gradient of all rows and adds to it row by row, at 70 ns
    # a row (280 with int32 positions). Summing the bags of the transpose takes a fifth of that, for
    # one sort on the host; where nothing is differentiated there is no transpose.
    forward: SparseRows | GatherMatrix
    backward: Matrix | None  # None: the sums are constants

    @classmethod
    def of(
        cls,
        index_V: Tensor,
        lengths_C: Tensor,
        weight_V: Tensor | None,
        num_rows: int,
        constant: bool = False,
        num_entries: int = 0,
        device: str = "cpu",
        multi_row: bool = False,
    ) -> "Bags":
        """Return bags of these lengths over a block of at most `num_rows` rows, for a kind of
        device; padded to `num_entries`, if given, so that shapes depend on no batch."""
        forward = SparseRows(index_V.to(torch.int32), _offsets_of_lengths(lengths_C), weight_V)
        backward: SparseRows | ScatterMatrix | None = None
        if not constant:
            is_cpu = device == "cpu"
            backward = (
                forward.transpose(num_rows)
                if is_cpu
                else ScatterMatrix.of(forward, lengths_C, num_rows, multi_row)
            )
        if num_entries:
            forward = forward.pad_to(num_entries)
            backward = None if backward is None else backward.pad_to(num_entries)
        return cls(forward, backward)

    @classmethod
    def single(
        cls, index_V: Tensor, num_rows: int, constant: bool = False, device: str = "cpu"
    ) -> "Bags":
        """Return a plain gather of rows."""
        index_V = index_V.to(torch.int32)
        if device != "cpu":
            # One tensor for both: a batch takes it along once.
            backward = None if constant else ScatterMatrix(index_V, None, None, num_rows)
            return cls(GatherMatrix(index_V), backward)
        forward = SparseRows(index_V, torch.arange(len(index_V) + 1, dtype=torch.int32), None)
        return cls(forward, None if constant else forward.transpose(num_rows))

    def pool(self, rows_PD: Tensor) -> Tensor:
        """Return the bags' sums [C, D]. Raises ValueError: constants, and rows have gradients."""
        if self.backward is not None:
            pooled_CD: Tensor = _Pool.apply(rows_PD, self.forward, self.backward)
            return pooled_CD
        if torch.is_grad_enabled() and rows_PD.requires_grad:
            raise ValueError(
                "these bags were arranged as constants, but their rows are differentiated: "
                "arrange them without `constant`"
            )
        return self.forward.times(rows_PD)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, matrix: Matrix, transposed: Matrix) -> Tensor:
        ctx.matrices, ctx.num_rows = (transposed, matrix), len(rows_PD)
        return matrix.times(rows_PD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # Linear: its derivative is the transpose, whose derivative is this again.
        if not torch.is_grad_enabled():
            found_PD = ctx.matrices[0].times(grads[0])
        else:
            found_PD = _Pool.apply(grads[0], *ctx.matrices)
        # The transpose may have more rows than were pooled, which are padding.
        return found_PD if len(found_PD) == ctx.num_rows else found_PD[: ctx.num_rows], None, None


def _padding_rows(count: int, num_rows: int) -> Tensor:
    # Behind the true rows, in turns: see ENTRIES_OF_PADDING.
    rows = torch.arange(num_rows, num_rows + ENTRIES_OF_PADDING, dtype=torch.int32)
    return rows.repeat(-(-count // ENTRIES_OF_PADDING))[:count]


def _offsets_of_lengths(lengths: Tensor) -> Tensor:
    offsets = torch.empty(lengths.numel() + 1, dtype=torch.int32, device=lengths.device)
    offsets[0] = 0
    torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1:])
    return offsets
