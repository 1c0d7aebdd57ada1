"""One optimizer step on given rows: the sum of the gradients over all places where a row stands,
whoever brings them, on the rows as they are by then.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn

from gmeta.tables.updates import FastGroup, summed_by_row

NUM_ROWS, WIDTH = 90, 3
RATE, EPSILON = 0.5, 1e-8
OPTIMIZERS = (
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
)


def some_group(optimizer: EmbOptimType) -> Any:
    """What FastGroup reads of fbgemm's group, in float64."""
    generator = torch.Generator().manual_seed(7)
    columns = 1 if optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD else WIDTH
    random = torch.rand(NUM_ROWS * (WIDTH + columns), generator=generator, dtype=torch.float64)
    return SimpleNamespace(
        optimizer=optimizer,
        max_D=WIDTH,
        weights_host=nn.Parameter(random[: NUM_ROWS * WIDTH].clone()),
        momentum1_host=random[NUM_ROWS * WIDTH :].clone(),
        optimizer_args=SimpleNamespace(eps=EPSILON),
        get_learning_rate=lambda: RATE,
    )


def random_gradients(row_N: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(row_N.numel(), WIDTH, generator=generator, dtype=torch.float64)


def expected_after(group: Any, row_N: Tensor, grad_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and momentum of all rows, row by row from the optimizers' formulas."""
    weights = group.weights_host.detach().clone().view(NUM_ROWS, WIDTH)
    momentum = group.momentum1_host.clone().view(NUM_ROWS, -1)
    for row in sorted(set(row_N.tolist())):
        grad = grad_ND[row_N == row].sum(dim=0)
        step = grad
        if group.optimizer != EmbOptimType.EXACT_SGD:
            squares = grad.square()
            momentum[row] += squares if momentum.shape[1] == WIDTH else squares.mean()
            step = grad / (momentum[row].sqrt() + EPSILON)
        weights[row] -= RATE * step
    return weights, momentum


def rows_of_ranks(ranks: int, repeated: int) -> list[Tensor]:
    """Of every rank's rows some are asked for by all, as frequent ids are."""
    return [
        torch.cat([torch.arange(repeated), repeated + rank + ranks * torch.arange(8)])
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("repeated", [0, 1, 3, 40])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_rows_take_one_step_with_the_sum_of_their_gradients(
    optimizer: EmbOptimType, ranks: int, repeated: int
) -> None:
    stored = some_group(optimizer)
    rows = rows_of_ranks(ranks, repeated)
    row_N = torch.cat([rows[0].flip(0), *rows[1:]])
    grad_ND = random_gradients(row_N)
    before = grad_ND.clone()
    weights, momentum = expected_after(stored, row_N, grad_ND)
    FastGroup(stored).update(row_N, grad_ND)
    torch.testing.assert_close(stored.weights_host.detach().view(NUM_ROWS, WIDTH), weights)
    torch.testing.assert_close(stored.momentum1_host.view(NUM_ROWS, -1), momentum)
    assert torch.equal(grad_ND, before)


def test_rows_are_looked_up_where_they_are_asked_for() -> None:
    stored = some_group(EmbOptimType.EXACT_ADAGRAD)
    row_N = torch.tensor([88, 3, 3, 0, 89])
    # In a part of a message that holds others' rows, too.
    message_MD = torch.zeros(7, WIDTH, dtype=torch.float64)
    FastGroup(stored).look_up(row_N, message_MD[1:6])
    weights = stored.weights_host.detach().view(NUM_ROWS, WIDTH)
    assert torch.equal(message_MD[1:6], weights[row_N])
    assert message_MD[[0, 6]].count_nonzero() == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_without_rows_changes_nothing(optimizer: EmbOptimType) -> None:
    stored = some_group(optimizer)
    before = stored.weights_host.detach().clone(), stored.momentum1_host.clone()
    nobody = torch.zeros(0, dtype=torch.int64)
    FastGroup(stored).update(nobody, random_gradients(nobody))
    assert torch.equal(stored.weights_host.detach(), before[0])
    assert torch.equal(stored.momentum1_host, before[1])


def test_summed_by_row_sums_the_gradients_of_equal_rows() -> None:
    grad_ND = summed_by_row(torch.tensor([4, 9, 4]), torch.tensor([[1.0], [2.0], [4.0]]))
    assert grad_ND.tolist() == [[5.0], [2.0], [0.0]]


def test_summed_by_row_of_no_rows_is_none() -> None:
    assert summed_by_row(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2)).shape == (0, 2)


def test_two_updates_of_one_step_both_move_the_rows() -> None:
    stored = some_group(EmbOptimType.EXACT_SGD)
    group, row_N = FastGroup(stored), torch.tensor([1, 3])
    before = stored.weights_host.detach().clone().view(NUM_ROWS, WIDTH)
    # As in a step of several batches with clipping.
    for _ in range(2):
        group.update(row_N, torch.ones(2, WIDTH, dtype=torch.float64))
    moved = before - stored.weights_host.detach().view(NUM_ROWS, WIDTH)
    expected = torch.zeros_like(moved).index_fill_(0, row_N, 2 * RATE)
    torch.testing.assert_close(moved, expected)
