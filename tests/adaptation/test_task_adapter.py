"""MAML of a module of one's own, all tasks at once, against torch.func task by task; float64."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

from gmeta.adaptation.task_adapter import TaskAdapter
from gmeta.errors import ConfigError, UserError
from tests.support.refusals import catch_message

SUPPORT, QUERY = [3, 0, 5, 1], [2, 4, 1, 3]
STEPS, RATE = 3, 0.2


class Own(nn.Module):
    """What a user may have: two inputs, an embedding, a norm, a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(7, 4)
        self.first = nn.Linear(6, 5)
        self.again = nn.Linear(5, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 1)

    def forward(self, item_N: Tensor, dense_NK: Tensor) -> Tensor:
        hidden = self.first(torch.cat([self.items(item_N), dense_NK], dim=1)).tanh()
        output: Tensor = self.head(self.norm(self.again(self.again(hidden)).tanh()))
        return output.squeeze(1)


def row_losses(output_N: Tensor, label_N: Tensor) -> Tensor:
    return functional.mse_loss(output_N, label_N, reduction="none")


def random_rows(lengths: list[int]) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Inputs, labels and lengths of random rows."""
    num_rows = sum(lengths)
    dense = torch.randn(num_rows, 2, dtype=torch.float64)
    label = torch.randn(num_rows, dtype=torch.float64)
    return (torch.randint(7, (num_rows,)), dense), label, torch.tensor(lengths)


def loop_weights(
    module: nn.Module, names: list[str], second_order: bool, inputs: list[Tensor], label: Tensor
) -> dict[str, Tensor]:
    """The parameters of one task after its steps, by torch.func."""
    weights = dict(module.named_parameters())

    def support_loss(adapting: dict[str, Tensor]) -> Tensor:
        output = functional_call(module, {**weights, **adapting}, tuple(inputs))
        return row_losses(output, label).mean()

    for _ in range(STEPS if len(label) else 0):
        adapting = {name: weights[name] for name in names}
        found = grad(support_loss)(adapting)
        for name, gradient in found.items():
            moved = gradient if second_order else gradient.detach()
            weights[name] = weights[name] - RATE * moved
    return weights


@pytest.mark.parametrize("second_order", [True, False])
@pytest.mark.parametrize("patterns", [("*",), ("head", "first")])
def test_it_equals_torch_func(second_order: bool, patterns: tuple[str, ...]) -> None:
    torch.manual_seed(3)
    module = Own().double()
    (inputs, label, lengths), (query, query_label, query_lengths) = map(
        random_rows, (SUPPORT, QUERY)
    )
    adapter = TaskAdapter(
        module, row_losses, inner_steps=STEPS, inner_lr=RATE, layers=patterns,
        second_order=second_order,
    )  # fmt: skip
    adapted = adapter.adapt(inputs, label, lengths)
    losses = row_losses(adapted(query, query_lengths), query_label).split(QUERY)
    linears = [name for name, one in module.named_modules() if isinstance(one, nn.Linear)]
    layers = linears if patterns == ("*",) else patterns
    names = [n for n, _ in module.named_parameters() if n.rpartition(".")[0] in layers]
    parameters = dict(module.named_parameters())
    split = [part.split(SUPPORT) for part in (*inputs, label)]
    query_split = [part.split(QUERY) for part in (*query, query_label)]
    for task, loss in enumerate(losses):
        *own, own_label = (part[task] for part in split)
        expected = loop_weights(module, names, second_order, own, own_label)
        for name, weight in adapted.fast_weights(task).items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-12)
        *asked, asked_label = (part[task] for part in query_split)
        wanted = row_losses(functional_call(module, expected, tuple(asked)), asked_label)
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
        grads = [
            torch.autograd.grad(one.mean(), list(parameters.values()), retain_graph=True)
            for one in (loss, wanted)
        ]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    mean = torch.stack([loss.mean() for loss in losses]).mean()
    torch.testing.assert_close(adapted.mean_loss(query, query_label, query_lengths), mean)


def test_a_prediction_needs_no_gradients() -> None:
    module = Own().double()
    (inputs, label, lengths), (query, _, query_lengths) = map(random_rows, (SUPPORT, QUERY))
    with torch.no_grad():
        adapted = TaskAdapter(module, row_losses).adapt(inputs, label, lengths)
        predicted = adapted(query, query_lengths)
    assert not predicted.requires_grad
    assert not torch.equal(predicted, module(*query))
    assert torch.equal(predicted.split(QUERY)[1], module(*query).split(QUERY)[1])  # no support


def mean_loss(output_N: Tensor, label_N: Tensor) -> Tensor:
    return row_losses(output_N, label_N).mean()


def test_a_wrong_argument_is_told() -> None:
    (inputs, label, lengths), module = random_rows(SUPPORT), Own().double()
    assert catch_message(
        UserError, TaskAdapter(module, mean_loss).adapt, inputs, label, lengths
    ) == (
        "row_losses gives a tensor of shape []: the loss of each of 9 rows is needed. Leave out "
        "its mean: reduction='none'"
    )
    assert catch_message(ValueError, TaskAdapter, module, row_losses, layers=["tail"]) == (
        "algorithm.adapt_layers: 'tail' matches no layer; this model has first, again, head. "
        'Name some of them, "*" for all, or none at all: []'
    )
    fewer = torch.tensor([3, 5])
    assert catch_message(
        ConfigError, TaskAdapter(module, row_losses).adapt, inputs, label, fewer
    ) == (
        "layer 'first' works on 9 rows, the tasks have 8: only layers applied row by row can "
        "adapt. Leave it out of algorithm.adapt_layers"
    )
