"""The written-out slopes of the row losses, and their derivatives, against autograd's."""

import pytest
import torch

from gmeta.losses.row_losses import LossFunction, row_grads_N, row_losses_N

LOSSES = [
    LossFunction("bce"), LossFunction("bce", comes_late=True),
    LossFunction("mse"), LossFunction("mae"), LossFunction("huber"),
    LossFunction("huber", 0.3), LossFunction("huber", 4.0),
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_slopes_and_curvatures_are_the_derivatives_of_the_loss(loss: LossFunction) -> None:
    output_N = torch.linspace(-30.0, 30.0, 400, dtype=torch.float64, requires_grad=True)
    label_N = (torch.arange(400) % 2).float()
    total = row_losses_N(loss, output_N, label_N).sum()
    (slope_N,) = torch.autograd.grad(total, output_N, create_graph=True)
    (curvature_N,) = torch.autograd.grad(slope_N.sum(), output_N)
    seen_N = output_N.detach()
    torch.testing.assert_close(
        row_grads_N(loss, seen_N, label_N), slope_N.detach(), rtol=0, atol=1e-12
    )
    written_N = row_grads_N(loss, output_N, label_N)
    (of_written_N,) = torch.autograd.grad(written_N.sum(), output_N)
    torch.testing.assert_close(of_written_N, curvature_N, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_derivatives_leave_what_they_are_given_as_it_is(loss: LossFunction) -> None:
    output_N, label_N = torch.tensor([0.5, -2.0]), torch.tensor([1.0, 0.0])
    row_grads_N(loss, output_N, label_N)
    assert output_N.tolist() == [0.5, -2.0]
    assert label_N.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("loss", "errors", "expected"),
    [
        (LossFunction("mse"), [-2.0, 0.0, 0.5], [4.0, 0.0, 0.25]),
        (LossFunction("mae"), [-2.0, 0.0, 0.5], [2.0, 0.0, 0.5]),
        (LossFunction("huber"), [-2.0, 0.0, 0.5], [1.5, 0.0, 0.125]),
        (LossFunction("huber", 0.5), [-2.0, 0.25, 0.5], [0.875, 0.03125, 0.125]),
    ],
)
def test_losses_of_ratings_are_those_of_their_definitions(
    loss: LossFunction, errors: list[float], expected: list[float]
) -> None:
    label_N = torch.full((3,), 3.0)
    found_N = row_losses_N(loss, label_N + torch.tensor(errors), label_N)
    assert found_N.tolist() == expected


def test_fake_negatives_teach_the_share_of_ones_wherever_that_lies() -> None:
    late = LossFunction("bce", comes_late=True)
    share_N = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    output_N, zero_N = share_N.logit(), torch.zeros_like(share_N)
    # Each row once as of label 0, and a share of them once more as of label 1.
    slope_N = row_grads_N(late, output_N, zero_N)
    slope_N = slope_N + share_N * row_grads_N(late, output_N, zero_N + 1.0)
    torch.testing.assert_close(slope_N, zero_N, rtol=0, atol=1e-12)
    plain = LossFunction("bce")
    wrong_N = row_grads_N(plain, output_N, zero_N)
    wrong_N = wrong_N + share_N * row_grads_N(plain, output_N, zero_N + 1.0)
    assert (wrong_N.abs() > 1e-5).all()
