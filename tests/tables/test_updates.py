"""One optimizer step on given rows: the sum of the gradients over all places where a row stands,
whoever brings them, on the rows as they are by then.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn

from gmeta.tables import updates
from gmeta.tables.repeated_rows import ascend
from gmeta.tables.updates import FastGroup, GivenRows, summed_by_row

NUM_ROWS, WIDTH = 90, 3
RATE, EPSILON, UNIT = 0.5, 1e-8, 0.25
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


def given_rows(
    group: FastGroup, rows_of_ranks: list[Tensor], memory: object = "of other ranks"
) -> list[GivenRows]:
    """Rows as they are now, with random gradients."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for row_N in rows_of_ranks:
        rows_ND, grad_ND = torch.randn(
            2, row_N.numel(), WIDTH, generator=generator, dtype=torch.float64
        )
        group.look_up(row_N, rows_ND)
        parts.append(
            GivenRows(
                row_N,
                rows_ND,
                partial(Tensor.detach, grad_ND),
                ascend(row_N.numpy()),
                group.weights._version,
                memory,
            )
        )
    return parts


def expected_after(group: Any, parts: list[GivenRows]) -> tuple[Tensor, Tensor]:
    """Weights and momentum of all rows, row by row from the optimizers' formulas."""
    weights = group.weights_host.detach().clone().view(NUM_ROWS, WIDTH)
    momentum = group.momentum1_host.clone().view(NUM_ROWS, -1)
    for row in sorted({row for part in parts for row in part.row_N.tolist()}):
        grad = UNIT * sum(part.grad_ND()[part.row_N == row].sum(dim=0) for part in parts)
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
@pytest.mark.parametrize("rows_at_once", [7, updates.ROWS_AT_ONCE])
def test_rows_take_one_step_with_the_sum_of_their_gradients(
    optimizer: EmbOptimType,
    ranks: int,
    repeated: int,
    rows_at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(updates, "ROWS_AT_ONCE", rows_at_once)
    stored = some_group(optimizer)
    group = FastGroup(stored)
    rows = rows_of_ranks(ranks, repeated)
    nobody = torch.zeros(0, dtype=torch.int64)  # a rank that asks for nothing
    parts = given_rows(group, [rows[0].flip(0), nobody, *rows[1:]])
    before = [(part.rows_ND.clone(), part.grad_ND().clone()) for part in parts]
    weights, momentum = expected_after(stored, parts)
    group.update(parts, UNIT)
    torch.testing.assert_close(stored.weights_host.detach().view(NUM_ROWS, WIDTH), weights)
    torch.testing.assert_close(stored.momentum1_host.view(NUM_ROWS, -1), momentum)
    # They may lie in memory of other ranks.
    for part, (rows_ND, grad_ND) in zip(parts, before, strict=True):
        assert torch.equal(part.rows_ND, rows_ND)
        assert torch.equal(part.grad_ND(), grad_ND)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_looked_up_as_they_are_on_any_number_of_threads(threads: int) -> None:
    stored = some_group(EmbOptimType.EXACT_ADAGRAD)
    row_N = torch.tensor([88, 3, 3, 0, 89])
    # In a part of a message that holds others' rows, too.
    message_MD = torch.zeros(7, WIDTH, dtype=torch.float64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        FastGroup(stored).look_up(row_N, message_MD[1:6])
    finally:
        torch.set_num_threads(before)
    weights = stored.weights_host.detach().view(NUM_ROWS, WIDTH)
    assert torch.equal(message_MD[1:6], weights[row_N])
    assert message_MD[[0, 6]].count_nonzero() == 0


@pytest.mark.parametrize("repeated", [0, 2, 20])
def test_rows_of_one_rank_may_stand_twice(repeated: int) -> None:
    stored = some_group(EmbOptimType.EXACT_ADAGRAD)
    group = FastGroup(stored)
    row_N = torch.cat([torch.arange(60).flip(0), torch.arange(repeated), torch.arange(repeated)])
    parts = given_rows(group, [row_N], memory=None)
    weights, momentum = expected_after(stored, parts)
    group.update(parts, UNIT)
    torch.testing.assert_close(stored.weights_host.detach().view(NUM_ROWS, WIDTH), weights)
    torch.testing.assert_close(stored.momentum1_host.view(NUM_ROWS, WIDTH), momentum)


def test_summed_by_row_sums_the_gradients_of_equal_rows() -> None:
    row_U, grad_UD = summed_by_row(torch.tensor([4, 9, 4]), torch.tensor([[1.0], [2.0], [4.0]]))
    assert row_U.tolist() == [4, 9]
    assert grad_UD.tolist() == [[5.0], [2.0]]


def test_rows_that_changed_since_they_were_looked_up_are_read_again() -> None:
    stored = some_group(EmbOptimType.EXACT_SGD)
    group, row_N = FastGroup(stored), torch.tensor([1, 3])
    before = stored.weights_host.detach().clone().view(NUM_ROWS, WIDTH)
    # Both forwards come before either backward, as in a step of several batches with clipping.
    for part in [*given_rows(group, [row_N]), *given_rows(group, [row_N])]:
        ones = torch.ones_like(part.rows_ND)
        group.update([part._replace(grad_ND=partial(Tensor.detach, ones))], 1.0)
    moved = before - stored.weights_host.detach().view(NUM_ROWS, WIDTH)
    expected = torch.zeros_like(moved).index_fill_(0, row_N, 2 * RATE)
    torch.testing.assert_close(moved, expected)
