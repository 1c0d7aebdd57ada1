"""The kernel of an adapted MLP against its definition, in value and in gradient."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gmeta.adaptation.adaptation_plan import Path
from gmeta.adaptation.fused.mlp import AdaptedMlp
from gmeta.adaptation.layout.padded_layout import PaddedRows, Rectangle
from gmeta.adaptation.rates import WeightRates
from tests.adaptation.fused.plain_mlp import PlainMlp

WIDTHS = (4, 5, 3, 1)
Sizes = Sequence[tuple[int, int]]  # tasks and rows of each rectangle


def padded_rows(sizes: Sizes) -> PaddedRows:
    firsts = [sum(tasks * rows for tasks, rows in sizes[:at]) for at in range(len(sizes))]
    per_task = torch.tensor([rows for tasks, rows in sizes for _ in range(tasks)])
    task_N = torch.arange(len(per_task)).repeat_interleave(per_task)
    zero_N = torch.zeros(len(task_N), dtype=torch.float64)
    rectangles = [Rectangle(first, *size) for first, size in zip(firsts, sizes, strict=True)]
    return PaddedRows(tuple(rectangles), zero_N, zero_N, task_N)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=3
    ),
    paths=st.lists(
        st.lists(st.sampled_from(["low_rank", "materialised"]), min_size=3, max_size=3),
        min_size=3,
        max_size=3,
    ),
    adapts=st.lists(st.booleans(), min_size=3, max_size=3),
    gated=st.lists(st.booleans(), min_size=3, max_size=3),
    steps=st.integers(0, 3),
    lowest=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_the_kernel_gives_the_passes_and_derivatives_of_the_definition(
    sizes: list[tuple[int, int, int]], paths: list[list[Path]], adapts: list[bool],
    gated: list[bool], steps: int, lowest: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    support = padded_rows([(tasks, rows) for tasks, rows, _ in sizes])
    query = padded_rows([(tasks, rows) for tasks, _, rows in sizes])
    layers = list(zip(WIDTHS[1:], WIDTHS[:-1], strict=True))
    weights, biases = [leaf(*shape) for shape in layers], [leaf(out) for out, _ in layers]
    tasks = sum(tasks for tasks, _, _ in sizes)
    gates = [leaf(tasks, out) if has else None for has, (out, _) in zip(gated, layers, strict=True)]
    inputs = [leaf(support.num_rows, WIDTHS[0]) for _ in range(steps)]
    lasts = [leaf(support.num_rows, 1) for _ in range(steps)]
    asked, rates = leaf(query.num_rows, WIDTHS[0]), [0.3, leaf(WIDTHS[2]), leaf()]
    held = tuple(
        tuple(path[: len(sizes)]) if moves else ()
        for path, moves in zip(paths, adapts, strict=True)
    )
    leaves = [*weights, *biases, *filter(torch.is_tensor, [*gates, *rates]), *inputs, *lasts, asked]

    def result(kernel: type[AdaptedMlp]) -> list[Tensor]:
        mlp = kernel(tuple(weights), tuple(biases), tuple(gates), held, support, (1.0, 0.5, 3.0))
        seen: list[Tensor] = []
        for rows, last in zip(inputs, lasts, strict=True):
            *activations, _ = mlp.forward(rows, support)
            grads = mlp.gradients(last, activations[1:], min(lowest, mlp.lowest_moving))
            seen += [*activations[1:], *grads[:-1]]
            mlp = mlp.after_step(activations, grads, rates)
        seen += mlp.forward(asked, query)[1:]
        total = sum((each.square().sum() for each in seen), torch.zeros(()).double())
        return [
            *seen,
            *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True),
        ]

    torch.testing.assert_close(result(AdaptedMlp), result(PlainMlp), rtol=1e-9, atol=1e-9)


def test_the_kernel_refuses_a_rate_for_each_weight() -> None:
    rows, ones = padded_rows([(1, 2)]), torch.ones(2, 1)
    mlp = AdaptedMlp((torch.ones(1, 1),), (torch.ones(1),), (None,), (("low_rank",),), rows, (1.0,))
    with pytest.raises(TypeError):
        mlp.after_step([ones], [ones], [WeightRates(torch.ones(1, 1), None)])


def test_a_tensor_that_changes_before_backward_is_noticed() -> None:
    rows, weight = padded_rows([(1, 2)]), torch.ones(1, 1, requires_grad=True)
    mlp = AdaptedMlp((weight,), (torch.ones(1),), (None,), ((),), rows, (1.0,))
    output = mlp.forward(torch.ones(2, 1), rows)[-1].sum()
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()
