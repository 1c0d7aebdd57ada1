"""The change of a layer inside each task, held in each of its ways, against autograd of the plain
sum over steps: float64.

Shape suffixes: T tasks, L rows of a task, S its support rows, I input width, O output width.
"""

import pytest
import torch
from torch import Tensor

from gmeta.adaptation.changes import Change, StepGrads, new_change
from gmeta.adaptation.paths import Path

TASKS, ROWS, SUPPORT, WIDTH_IN = 3, 4, 2, 5
ONE = torch.ones(1, 1, 1, dtype=torch.float64)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def draw_steps(number: int, width_out: int, fixed: bool) -> list[tuple[Tensor, Tensor]]:
    """Activations [T, S, I] and scaled gradients [T, S, O] of each step; `fixed`: the same
    activations in all of them."""
    first = drawn(TASKS, SUPPORT, WIDTH_IN)
    return [
        (first if fixed else drawn(TASKS, SUPPORT, WIDTH_IN), drawn(TASKS, SUPPORT, width_out))
        for _ in range(number)
    ]


def slow_subtract(
    out_TLO: Tensor, rows_TLI: Tensor, steps: list[tuple[Tensor, Tensor]], common_T11: Tensor = ONE
) -> Tensor:
    """Task by task, step by step: out - x (A^T G) - c times the sum of G over the support rows."""
    common = common_T11.flatten().expand(TASKS)
    found = []
    for task in range(TASKS):
        out = out_TLO[task]
        for activations, scaled in steps:
            out = out - rows_TLI[task] @ (activations[task].T @ scaled[task])
            out = out - common[task] * scaled[task].sum(0)
        found.append(out)
    return torch.stack(found)


def slow_turned(below_TSI: Tensor, grads_TSO: Tensor, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Task by task, step by step: below - g (A^T G)^T."""
    found = []
    for task in range(TASKS):
        below = below_TSI[task]
        for activations, scaled in steps:
            below = below - grads_TSO[task] @ (activations[task].T @ scaled[task]).T
        found.append(below)
    return torch.stack(found)


def changed(
    path: Path, steps: list[tuple[Tensor, Tensor]], common_T11: Tensor | None = None
) -> Change:
    change = new_change(path, ONE)
    if common_T11 is not None:
        change = new_change(path, common_T11.detach(), wants_common=True)
    for activations, scaled in steps:
        change.add(activations.detach(), scaled.detach())
    return change


def empty_grads(path: Path, steps: list[tuple[Tensor, Tensor]]) -> list[StepGrads]:
    """Not zeros: what is written first must not read what stood there."""
    made = [
        StepGrads(*(torch.full_like(part, float("nan")).detach() for part in step))
        for step in steps
    ]
    return [made[0]] * len(made) if path == "fixed" else made


def undone(change: Change, grads: list[StepGrads]) -> None:
    for step in reversed(grads):
        change.undo(step, fresh=True)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("width_out", [4, 1])
@pytest.mark.parametrize("path", ["low_rank", "materialised"])
def test_both_uses_and_all_derivatives_are_those_of_the_plain_sum(
    path: Path, width_out: int, number: int
) -> None:
    torch.manual_seed(number)
    steps = draw_steps(number, width_out, fixed=False)
    rows, out = drawn(TASKS, ROWS, WIDTH_IN), drawn(TASKS, ROWS, width_out)
    grads, below = drawn(TASKS, SUPPORT, width_out), drawn(TASKS, SUPPORT, WIDTH_IN)
    slow_out, slow_below = slow_subtract(out, rows, steps), slow_turned(below, grads, steps)

    change = changed(path, steps)
    fast_out, fast_below = out.detach().clone(), below.detach().clone()
    kept_out = change.subtract(fast_out, rows.detach())
    kept_below = change.turned(fast_below, grads.detach())
    torch.testing.assert_close(fast_out, slow_out.detach())
    torch.testing.assert_close(fast_below, slow_below.detach())

    of_out, of_below = torch.randn_like(slow_out), torch.randn_like(slow_below)
    wanted = torch.autograd.grad(
        (slow_out * of_out).sum() + (slow_below * of_below).sum(),
        [rows, grads, *(part for step in steps for part in step)],
    )
    rows_grad, grads_grad = torch.zeros_like(rows), torch.zeros_like(grads)
    made = empty_grads(path, steps)
    change.subtract_backward(kept_out, of_out, rows.detach(), rows_grad, made, fresh=True)
    change.turned_backward(kept_below, of_below, grads.detach(), grads_grad, made)
    undone(change, made)
    found = [rows_grad, grads_grad, *(part for step in made for part in step)]
    for value, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("width_out", [4, 1])
def test_one_pair_of_factors_stands_for_all_steps_on_the_same_activations(
    width_out: int, number: int
) -> None:
    torch.manual_seed(number)
    steps = draw_steps(number, width_out, fixed=True)
    rows, out = drawn(TASKS, ROWS, WIDTH_IN), drawn(TASKS, ROWS, width_out)
    slow_out = slow_subtract(out, rows, steps)
    change, fast_out = changed("fixed", steps), out.detach().clone()
    kept = change.subtract(fast_out, rows.detach())
    torch.testing.assert_close(fast_out, slow_out.detach())

    of_out = torch.randn_like(slow_out)
    activations, scaled = steps[0]
    wanted = torch.autograd.grad((slow_out * of_out).sum(), [rows, activations, scaled])
    rows_grad, made = torch.zeros_like(rows), empty_grads("fixed", steps)
    change.subtract_backward(kept, of_out, rows.detach(), rows_grad, made, fresh=True)
    for value, expected in zip((rows_grad, *made[0]), wanted, strict=True):
        torch.testing.assert_close(value, expected)


def test_the_support_rows_keep_their_product_from_step_to_step() -> None:
    torch.manual_seed(0)
    steps, out = draw_steps(3, 4, fixed=True), drawn(TASKS, SUPPORT, 4)
    own = steps[0][0].detach()
    change = new_change("fixed", ONE)
    for taken, (_, scaled) in enumerate(steps, 1):
        change.add(own, scaled.detach())
        found = out.detach().clone()
        change.subtract(found, own)
        torch.testing.assert_close(found, slow_subtract(out, own, steps[:taken]).detach())
        # Rows of another side in between must not be taken for them.
        other = drawn(TASKS, SUPPORT, WIDTH_IN).detach()
        found = out.detach().clone()
        change.subtract(found, other)
        torch.testing.assert_close(found, slow_subtract(out, other, steps[:taken]).detach())


@pytest.mark.parametrize("path", ["low_rank", "materialised", "fixed"])
def test_a_second_pass_over_other_rows_adds_to_the_gradients_of_the_first(path: Path) -> None:
    torch.manual_seed(0)
    steps = draw_steps(2, 4, fixed=path == "fixed")
    common = drawn(TASKS, 1, 1)
    passes = [(drawn(TASKS, ROWS, WIDTH_IN), torch.randn(TASKS, ROWS, 4).double()) for _ in "ab"]
    zeros = torch.zeros(TASKS, ROWS, 4, dtype=torch.float64)
    total = sum(
        (slow_subtract(zeros, rows, steps, common) * of_out).sum() for rows, of_out in passes
    )
    activations, scaled = steps[0]
    assert isinstance(total, Tensor)
    wanted = torch.autograd.grad(total, [activations, scaled, common])

    change, made = changed(path, steps, common), empty_grads(path, steps)
    for fresh, (rows, of_out) in zip((True, False), passes, strict=True):
        kept = change.subtract(zeros.clone(), rows.detach())
        # None: nobody asks for the gradient of these rows.
        change.subtract_backward(kept, of_out, rows.detach(), None, made, fresh)
    undone(change, made)
    found = (*made[0], change.common_grad_T.view(-1, 1, 1))
    for value, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(value, expected)


def test_without_steps_to_learn_from_only_the_rows_get_a_gradient() -> None:
    torch.manual_seed(0)
    steps = draw_steps(2, 4, fixed=False)
    rows, of_out = drawn(TASKS, ROWS, WIDTH_IN), torch.randn(TASKS, ROWS, 4).double()
    zeros = torch.zeros(TASKS, ROWS, 4, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((slow_subtract(zeros, rows, steps) * of_out).sum(), [rows])
    for path in ("low_rank", "materialised"):
        change = changed(path, steps)  # type: ignore[arg-type]
        kept, rows_grad = change.subtract(zeros.clone(), rows.detach()), torch.zeros_like(rows)
        change.subtract_backward(kept, of_out, rows.detach(), rows_grad, [], fresh=True)
        torch.testing.assert_close(rows_grad, wanted)
