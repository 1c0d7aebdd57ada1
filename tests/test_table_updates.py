"""Gradients of equal rows are summed, in whatever order the rows are asked for, and move the rows
as they are by then.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from gmeta.table_updates import _FastGroup, summed, summed_by_row

NUM_ROWS = 90


def expected_sums(row_N: torch.Tensor, grad_ND: torch.Tensor) -> torch.Tensor:
    sums_RD = torch.zeros(NUM_ROWS, grad_ND.shape[1], dtype=grad_ND.dtype)
    for row, grad in zip(row_N.tolist(), grad_ND, strict=True):
        sums_RD[row] += grad
    return sums_RD


@pytest.mark.parametrize("repeated", [0, 1, 3, 40])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_gradients_of_equal_rows_are_summed(ranks: int, repeated: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    # Of every rank's rows some are asked for by all, as frequent ids are.
    runs = [
        torch.cat([torch.arange(repeated), repeated + rank + ranks * torch.arange(8)])
        for rank in range(ranks)
    ]
    row_N = torch.cat(runs) if ranks > 1 else runs[0].flip(0)
    grad_ND = torch.randn(row_N.numel(), 3, generator=generator, dtype=torch.float64)
    before = grad_ND.clone()
    row_U, grad_UD = summed(row_N, grad_ND, np.full(NUM_ROWS, 7, np.int32))
    assert torch.equal(grad_ND, before)
    assert sorted(set(row_U.tolist())) == sorted(set(row_N.tolist()))
    # A row that stands more than once has the whole sum each time.
    torch.testing.assert_close(grad_UD, expected_sums(row_N, grad_ND)[row_U])
    distinct_U, sums_UD = summed_by_row(row_N, grad_ND)
    assert distinct_U.tolist() == sorted(set(row_N.tolist()))
    torch.testing.assert_close(sums_UD, expected_sums(row_N, grad_ND)[distinct_U])


def test_many_that_stand_again_are_not_updated_again() -> None:
    row_N = torch.tensor([4, 9, 4, 9, 4])
    row_U, grad_UD = summed(row_N, torch.ones(5, 2), np.zeros(NUM_ROWS, np.int32))
    assert row_U.tolist() == [9, 4]
    assert grad_UD.tolist() == [[2.0, 2.0], [3.0, 3.0]]


def test_rows_asked_for_once_keep_their_gradients_where_they_are() -> None:
    for row_N in (torch.arange(NUM_ROWS), torch.arange(NUM_ROWS).flip(0)):
        grad_ND = torch.arange(3.0 * NUM_ROWS).view(NUM_ROWS, 3)
        row_U, grad_UD = summed(row_N, grad_ND, np.zeros(NUM_ROWS, np.int32))
        assert row_U is row_N
        assert grad_UD is grad_ND


def test_rows_that_changed_since_they_were_looked_up_are_read_again() -> None:
    weights = torch.nn.Parameter(torch.zeros(8))
    group: Any = SimpleNamespace(
        optimizer=EmbOptimType.EXACT_SGD,
        max_D=2,
        weights_offsets=torch.tensor([0]),
        feature_table_map=[0],
        weights_host=weights,
        get_learning_rate=lambda: 0.5,
    )
    lookup, row_N = _FastGroup(group), torch.tensor([1, 3])
    # Both forwards come before either backward, as in a step of several batches with clipping.
    for rows_ND in [lookup(row_N, None), lookup(row_N, None)]:
        rows_ND.sum().backward()
    assert weights.view(4, 2)[:, 0].tolist() == [0.0, -1.0, 0.0, -1.0]
