"""The written-out slopes of the row losses, and their derivatives, against autograd's."""

import pytest
import torch

from gmeta.adaptation.losses import row_losses_N, row_slopes_N


@pytest.mark.parametrize("kind", ["bce", "mse", "huber"])
def test_slopes_and_curvatures_are_the_derivatives_of_the_loss(kind: str) -> None:
    output_N = torch.linspace(-30.0, 30.0, 400, dtype=torch.float64, requires_grad=True)
    label_N = (torch.arange(400) % 2).float()
    loss = row_losses_N(kind, output_N, label_N).sum()
    (slope_N,) = torch.autograd.grad(loss, output_N, create_graph=True)
    (curvature_N,) = torch.autograd.grad(slope_N.sum(), output_N)
    seen_N = output_N.detach()
    torch.testing.assert_close(
        row_slopes_N(kind, seen_N, label_N), slope_N.detach(), rtol=0, atol=1e-12
    )
    written_N = row_slopes_N(kind, output_N, label_N)
    (of_written_N,) = torch.autograd.grad(written_N.sum(), output_N)
    torch.testing.assert_close(of_written_N, curvature_N, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["bce", "mse", "huber"])
def test_derivatives_leave_what_they_are_given_as_it_is(kind: str) -> None:
    output_N, label_N = torch.tensor([0.5, -2.0]), torch.tensor([1.0, 0.0])
    row_slopes_N(kind, output_N, label_N)
    assert output_N.tolist() == [0.5, -2.0]
    assert label_N.tolist() == [1.0, 0.0]
