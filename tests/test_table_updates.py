"""Gradients of equal rows are summed, in whatever order the rows are asked for."""

import pytest
import torch

from gmeta.table_updates import MAX_FALLS, summed_by_row


@pytest.mark.parametrize(
    "runs", [1, 2, 5, 2 * MAX_FALLS], ids=lambda runs: f"{runs} ascending runs"
)
def test_gradients_of_equal_rows_are_summed(runs: int) -> None:
    generator = torch.Generator().manual_seed(runs)
    row_N = torch.cat(
        [torch.randperm(50, generator=generator)[:20].sort().values for _ in range(runs)]
    )
    grad_ND = torch.randn(row_N.numel(), 3, generator=generator, dtype=torch.float64)
    row_U, grad_UD = summed_by_row(row_N, grad_ND.clone())
    expected = torch.zeros(50, 3, dtype=torch.float64)
    for row, grad in zip(row_N.tolist(), grad_ND, strict=True):
        expected[row] += grad
    assert sorted(row_U.tolist()) == sorted(set(row_N.tolist()))
    torch.testing.assert_close(grad_UD, expected[row_U])


def test_rows_asked_for_once_in_any_order_keep_their_gradients() -> None:
    row_N = torch.randperm(1_000, generator=torch.Generator().manual_seed(0))
    grad_ND = torch.arange(3_000.0).view(1_000, 3)
    row_U, grad_UD = summed_by_row(row_N, grad_ND)
    assert torch.equal(grad_UD[row_U.argsort()], grad_ND[row_N.argsort()])
