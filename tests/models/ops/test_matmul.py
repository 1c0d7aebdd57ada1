"""Products in pieces against one product of all rows."""

import pytest
import torch
import torch.nn.functional as F

from gmeta_models.ops import matmul


@pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 1024, 1500, 2047])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_in_pieces_is_the_product(
    num_rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "LEAST_WORK", 0)
    torch.manual_seed(0)
    rows_NI, weight_OI = torch.randn(num_rows, 7), torch.randn(5, 7)
    bias_O = torch.randn(5) if has_bias else None
    expected = F.linear(rows_NI, weight_OI, bias_O)
    torch.testing.assert_close(matmul.linear(rows_NI, weight_OI, bias_O), expected)
    turned = matmul.linear(rows_NI, weight_OI.mT.contiguous().mT, bias_O)
    torch.testing.assert_close(turned, expected)


def test_pieces_have_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "LEAST_WORK", 0)
    sizes: set[int] = set()

    def noted(rows_NI: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        sizes.add(len(rows_NI))
        return F.linear(rows_NI, weight, bias)

    monkeypatch.setattr(matmul, "onednn_linear", noted)
    weight_OI = torch.ones(1, 1)
    for num_rows in range(1024, 2048):
        assert len(matmul.linear(torch.ones(num_rows, 1), weight_OI)) == num_rows
    assert sizes == set(range(1024, 2048, 64))


def test_what_onednn_does_not_take_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "LEAST_WORK", 0)
    monkeypatch.setattr(matmul, "onednn_linear", None)  # calling it would fail
    rows, weight = torch.ones(40, 2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    assert matmul.linear(rows, weight).tolist() == [[2.0] * 3] * 40
