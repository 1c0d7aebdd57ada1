"""MAML on a module of one's own, against a loop over tasks in plain PyTorch."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from gmeta.adaptation.task_adapter import TaskAdapter

ROW_LOSSES = partial(F.binary_cross_entropy_with_logits, reduction="none")
SUPPORT, QUERY = torch.tensor([3, 0, 5, 1]), torch.tensor([2, 4, 1, 3])


class Scorer(nn.Module):
    """Anybody's module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.head = nn.Linear(6, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.body(rows)).squeeze(-1)


def make_rows(lengths_T: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    num_rows = int(lengths_T.sum())
    return torch.randn(num_rows, 4), (torch.rand(num_rows) < 0.5).double()


def loop_over_tasks(
    model: Scorer, names: tuple[str, ...], steps: int, second_order: bool
) -> Tensor:
    """The mean query loss, each task adapted by itself."""
    (xs, ys), (xq, yq) = make_rows(SUPPORT, 1), make_rows(QUERY, 2)
    total = torch.zeros(())
    for support_x, support_y, query_x, query_y in zip(
        *(rows.split(n.tolist()) for rows, n in ((xs, SUPPORT), (ys, SUPPORT))),
        *(rows.split(n.tolist()) for rows, n in ((xq, QUERY), (yq, QUERY))),
        strict=True,
    ):
        own = dict(model.named_parameters())
        for _ in range(steps if len(support_x) else 0):
            loss = ROW_LOSSES(functional_call(model, own, (support_x,)), support_y).mean()
            moved = {name: own[name] for name in own if name.startswith(names)}
            grads = torch.autograd.grad(loss, list(moved.values()), create_graph=second_order)
            own |= {n: w - 0.3 * g for (n, w), g in zip(moved.items(), grads, strict=True)}
        total = total + ROW_LOSSES(functional_call(model, own, (query_x,)), query_y).mean()
    return total / len(SUPPORT)


@pytest.mark.parametrize("second_order", [True, False])
@pytest.mark.parametrize(("layers", "names"), [(("*",), ("body", "head")), (("head",), ("head",))])
@pytest.mark.parametrize("steps", [1, 3])
def test_loss_and_gradients_are_those_of_a_loop_over_tasks(
    layers: tuple[str, ...], names: tuple[str, ...], steps: int, second_order: bool
) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model = Scorer()
        adapter = TaskAdapter(
            model, ROW_LOSSES, inner_lr=0.3, inner_steps=steps, layers=layers,
            second_order=second_order,
        )  # fmt: skip
        adapted = adapter.adapt(*make_rows(SUPPORT, 1), SUPPORT)
        found = adapted.mean_loss(*make_rows(QUERY, 2), QUERY)
        wanted = loop_over_tasks(model, names, steps, second_order)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        parameters = list(model.parameters())
        for ours, theirs in zip(
            torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    finally:
        torch.set_default_dtype(torch.float32)
