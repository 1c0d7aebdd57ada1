"""Products of many rows with a matrix, in float32 on the CPU.

MKL's sgemm runs at half speed on AMD processors, and torch reaches oneDNN, which does not, by its
matmul precision "medium". But oneDNN generates code for every size that it has not seen: 0.5 ms for
a plain product and 3 ms for a batched one, where the product itself takes less, and batches of
ragged tasks bring new sizes with every step. So most of the rows go through oneDNN in a piece of
one of few sizes, the rest through MKL (`ragged` in benchmarks/maml_step.py). Results depend on the
sizes and the number of threads alone: on one thread, or with `run.deterministic`, a run that goes
on from a checkpoint finds the same bits.

Small products and those inside each task go through MKL altogether: even of sizes that recur oneDNN
was at most 8 % faster with a whole step of 640 to 7,680 rows, and up to 1.6x slower with small
ones. Of products of tiny matrices, one pair a row, it takes a half to a third of MKL's time.

What torch's precision is says which way products go, and training alone sets it: PIECES, which by
itself is MKL's, for pieces; "highest", as torch is by itself, for none.

Shape suffixes: N rows, I and O widths.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

PIECES = "high"
# float32 rounding gives about 5e-7 over 256 terms, bfloat16 about 5e-3.
RELATIVE_ERROR = 5e-6
# Multiply-adds below which MKL is done before oneDNN has begun.
LEAST_WORK = 4_000_000
# The same where each row has matrices of its own, for each of which MKL begins anew.
LEAST_WORK_OF_EACH = 1_000_000
LEAST_PIECE = 64
# The piece's rows have so many leading binary digits: 16 to 31 sizes from 1,024 rows to 2,047.
DIGITS = 5


@cache
def onednn_is_exact() -> bool:
    """Whether "medium" loses no accuracy here: on processors with AMX it means bfloat16. One
    product tells.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    with _in_onednn():
        error = ((left @ right).double() - exact).abs().max() / exact.abs().max()
    return bool(error < RELATIVE_ERROR)


def go_in_pieces() -> None:
    """From now on products of many rows do, where that loses no accuracy."""
    torch.set_float32_matmul_precision(PIECES if onednn_is_exact() else "highest")


def first_piece(rows_NI: Tensor, width: int) -> int:
    """How many rows oneDNN takes of a product of that much work a row and column; 0: none."""
    return _first_piece(rows_NI, rows_NI.shape[1] * width, LEAST_WORK)


def times(
    rows_NI: Tensor, matrix_IO: Tensor, bias_O: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """rows matrix + bias: [N, O]. Not differentiable."""
    first = first_piece(rows_NI, matrix_IO.shape[1])
    if not first:
        return _product(rows_NI, matrix_IO, bias_O, out)
    if out is None:
        out = rows_NI.new_empty(rows_NI.shape[0], matrix_IO.shape[1])
    with _in_onednn():
        _product(rows_NI[:first], matrix_IO, bias_O, out[:first])
    if first < rows_NI.shape[0]:
        _product(rows_NI[first:], matrix_IO, bias_O, out[first:])
    return out


def add_times(into_NO: Tensor, rows_NI: Tensor, matrix_IO: Tensor, beta: float) -> None:
    """into = beta into + rows matrix. Not differentiable."""
    first = first_piece(rows_NI, matrix_IO.shape[1])
    if not first:
        into_NO.addmm_(rows_NI, matrix_IO, beta=beta)
        return
    with _in_onednn():
        into_NO[:first].addmm_(rows_NI[:first], matrix_IO, beta=beta)
    if first < rows_NI.shape[0]:
        into_NO[first:].addmm_(rows_NI[first:], matrix_IO, beta=beta)


def each_times(left_NIJ: Tensor, right_NJO: Tensor) -> Tensor:
    """left_n right_n of every row, each with matrices of its own: [N, I, O]. Not differentiable."""
    num_rows, inner, width = *left_NIJ.shape[:2], right_NJO.shape[2]
    first = _first_piece(left_NIJ, inner * left_NIJ.shape[2] * width, LEAST_WORK_OF_EACH)
    if not first:
        return torch.bmm(left_NIJ, right_NJO)
    out_NIO = left_NIJ.new_empty(num_rows, inner, width)
    with _in_onednn():
        torch.bmm(left_NIJ[:first], right_NJO[:first], out=out_NIO[:first])
    if first < num_rows:
        torch.bmm(left_NIJ[first:], right_NJO[first:], out=out_NIO[first:])
    return out_NIO


def over_rows(left_NO: Tensor, right_NI: Tensor, into: Tensor | None = None) -> Tensor:
    """left^T right, added to `into` if that is there: [O, I]. Not differentiable."""
    first = first_piece(left_NO, right_NI.shape[1])
    if not first:
        return _sum(left_NO, right_NI, into)
    with _in_onednn():
        into = _sum(left_NO[:first], right_NI[:first], into)
    if first < left_NO.shape[0]:
        _sum(left_NO[first:], right_NI[first:], into)
    return into


def _first_piece(rows: Tensor, work_of_row: int, least_work: int) -> int:
    num_rows = rows.shape[0]
    if (
        num_rows * work_of_row < least_work
        or num_rows < LEAST_PIECE
        or rows.dtype != torch.float32
        or rows.device.type != "cpu"
        or torch.get_float32_matmul_precision() != PIECES
    ):
        return 0
    return num_rows - num_rows % max(LEAST_PIECE, 1 << num_rows.bit_length() - DIGITS)


@contextmanager
def _in_onednn() -> Iterator[None]:
    """Products inside are oneDNN's; a failure leaves torch's precision as it was, too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _product(
    rows_NI: Tensor, matrix_IO: Tensor, bias_O: Tensor | None, out: Tensor | None
) -> Tensor:
    if bias_O is None:
        return torch.mm(rows_NI, matrix_IO, out=out)
    return torch.addmm(bias_O, rows_NI, matrix_IO, out=out)


def _sum(left_NO: Tensor, right_NI: Tensor, into: Tensor | None) -> Tensor:
    if into is None:
        return torch.mm(left_NO.mT, right_NI)
    return into.addmm_(left_NO.mT, right_NI)
