"""One optimizer step on given rows: the sum of the gradients over all places where a row stands,
whoever brings them, on the rows as they are by then. All in float64, on the host's rows and on a
device's."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor

from gmeta.distributed.tables import updates
from gmeta.distributed.tables.plain_tables import PlainTables
from gmeta.distributed.tables.updates import FastGroup, sum_by_row

NUM_ROWS, WIDTH, STEPS = 90, 3, 4
RATE, EPSILON = 0.5, 1e-8
OPTIMIZERS = tuple(updates.UPDATES)
HOST = torch.device("cpu")
DOUBLE = SimpleNamespace(as_dtype=lambda: torch.float64)  # as fbgemm's SparseType; it knows no such


@pytest.fixture(params=["host", "device"], autouse=True)
def _(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as numpy moves them on the host, and as torch does on a device."""
    if request.param == "device":
        monkeypatch.setattr(updates, "_HostRowStore", updates._DeviceRowStore)


def some_tables(optimizer: EmbOptimType) -> PlainTables:
    """Two tables with random weights."""
    specs = [(30, WIDTH, None, None), (NUM_ROWS - 30, WIDTH, None, None)]
    tables = PlainTables(
        specs,
        optimizer,
        HOST,
        DOUBLE,  # type: ignore[arg-type]
        learning_rate=RATE,
        eps=EPSILON,
    )
    generator = torch.Generator().manual_seed(7)
    for part in tables.split_embedding_weights():
        part.copy_(torch.rand(part.shape, generator=generator, dtype=torch.float64))
    return tables


def random_gradients(row_N: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(row_N.numel(), WIDTH, generator=generator, dtype=torch.float64)


def stepped(
    optimizer: EmbOptimType, step: int, row: Tensor, grad: Tensor, state: dict[str, Tensor]
) -> Tensor:
    """One row after a step: its state changes; from the optimizers' formulas."""
    if optimizer == EmbOptimType.EXACT_SGD:
        return row - RATE * grad
    by_row = {EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.PARTIAL_ROWWISE_ADAM}
    squares = grad.square().mean() if optimizer in by_row else grad.square()
    if "sum" in state:
        state["sum"] += squares
        return row - RATE * grad / (state["sum"].sqrt() + EPSILON)
    state["exp_avg"] += 0.1 * (grad - state["exp_avg"])
    state["exp_avg_sq"] += 0.001 * (squares - state["exp_avg_sq"])
    mean = state["exp_avg"] / (1 - 0.9**step)
    return row - RATE * mean / ((state["exp_avg_sq"] / (1 - 0.999**step)).sqrt() + EPSILON)


def rows_of_ranks(ranks: int, repeated: int) -> Tensor:
    """Of every rank's rows some are asked for by all, as frequent ids are."""
    rows = [
        torch.cat([torch.arange(repeated), repeated + rank + ranks * torch.arange(8)])
        for rank in range(ranks)
    ]
    return torch.cat([rows[0].flip(0), *rows[1:]])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("repeated", [0, 1, 3, 40])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_rows_take_steps_with_the_sum_of_their_gradients(
    optimizer: EmbOptimType, ranks: int, repeated: int
) -> None:
    tables = some_tables(optimizer)
    group, row_N = FastGroup(tables), rows_of_ranks(ranks, repeated)
    weights = tables.values_RD.clone()
    state = {name: values.clone() for name, values in tables.state.items()}
    for step in range(STEPS):
        tables.set_optimizer_step(step)
        # Other rows in every step: Adam leaves those alone that a step does not name.
        rows, grad_ND = (row_N + step) % NUM_ROWS, random_gradients(row_N, step)
        before = grad_ND.clone()
        for row in sorted(set(rows.tolist())):
            mine = {name: values[row] for name, values in state.items()}
            grad = grad_ND[rows == row].sum(dim=0)
            weights[row] = stepped(optimizer, step + 1, weights[row], grad, mine)
        group.update(group.prepare_rows(rows.numpy()), grad_ND)
        assert torch.equal(grad_ND, before)
    torch.testing.assert_close(tables.values_RD, weights, rtol=1e-12, atol=1e-12)
    for name, values in state.items():
        torch.testing.assert_close(tables.state[name], values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "torchs"),
    [
        (EmbOptimType.EXACT_SGD, torch.optim.SGD),
        (EmbOptimType.EXACT_ADAGRAD, torch.optim.Adagrad),
        (EmbOptimType.ADAM, torch.optim.Adam),
    ],
)
def test_steps_on_all_rows_are_those_of_torchs_optimizer(
    optimizer: EmbOptimType, torchs: type[torch.optim.Optimizer]
) -> None:
    tables = some_tables(optimizer)
    group, row_N = FastGroup(tables), torch.randperm(NUM_ROWS)
    dense = tables.values_RD.clone().requires_grad_()
    epsilon = {} if optimizer == EmbOptimType.EXACT_SGD else {"eps": EPSILON}
    expected = torchs([dense], lr=RATE, **epsilon)  # type: ignore[call-arg]
    for step in range(STEPS):
        tables.set_optimizer_step(step)
        grad_ND = random_gradients(row_N, step)
        group.update(group.prepare_rows(row_N.numpy()), grad_ND)
        dense.grad = torch.empty_like(grad_ND).index_copy_(0, row_N, grad_ND)
        expected.step()
    torch.testing.assert_close(tables.values_RD, dense.detach(), rtol=1e-12, atol=1e-12)


def test_rows_are_looked_up_where_they_are_asked_for() -> None:
    tables = some_tables(EmbOptimType.EXACT_ADAGRAD)
    row_N = torch.tensor([88, 3, 3, 0, 89])
    # In a part of a message that holds others' rows, too.
    message_MD = torch.zeros(7, WIDTH, dtype=torch.float64)
    FastGroup(tables).look_up(row_N, message_MD[1:6])
    assert torch.equal(message_MD[1:6], tables.values_RD[row_N])
    assert message_MD[[0, 6]].count_nonzero() == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_without_rows_changes_nothing(optimizer: EmbOptimType) -> None:
    tables = some_tables(optimizer)
    before = tables.values_RD.clone()
    group, nobody = FastGroup(tables), torch.zeros(0, dtype=torch.int64)
    group.update(group.prepare_rows(nobody.numpy()), random_gradients(nobody))
    assert torch.equal(tables.values_RD, before)
    assert not any(values.any() for values in tables.state.values())


def test_summed_by_row_sums_the_gradients_of_equal_rows() -> None:
    grad_ND = sum_by_row(torch.tensor([4, 9, 4]), torch.tensor([[1.0], [2.0], [4.0]]))
    assert grad_ND.tolist() == [[5.0], [2.0], [0.0]]


def test_summed_by_row_of_no_rows_is_none() -> None:
    assert sum_by_row(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2)).shape == (0, 2)


def test_two_updates_of_one_step_both_move_the_rows() -> None:
    tables = some_tables(EmbOptimType.EXACT_SGD)
    group, row_N = FastGroup(tables), torch.tensor([1, 3])
    before = tables.values_RD.clone()
    # As in a step of several batches with clipping.
    for _ in range(2):
        given = group.prepare_rows(row_N.numpy())
        group.update(given, torch.ones(2, WIDTH, dtype=torch.float64))
    moved = before - tables.values_RD
    expected = torch.zeros_like(moved).index_fill_(0, row_N, 2 * RATE)
    torch.testing.assert_close(moved, expected)


def test_several_threads_may_ask_at_a_time_which_rows_stand_again() -> None:
    group = FastGroup(some_tables(EmbOptimType.EXACT_SGD))
    generator = torch.Generator().manual_seed(3)
    # So many that numpy lets other threads run meanwhile.
    asked = [torch.randint(NUM_ROWS, (20_000,), generator=generator) for _ in range(8)]
    expected = [group.prepare_rows(row_N.numpy()) for row_N in asked]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda row_N: group.prepare_rows(row_N.numpy()), asked * 20)
        for one, given in zip(expected * 20, found, strict=True):
            assert one.merge is not None
            assert given.merge is not None
            for mine, other in zip(one.merge, given.merge, strict=True):
                assert torch.equal(mine, other)


def test_the_state_of_a_table_has_torchs_names_and_one_number_a_row_where_it_says_so() -> None:
    shapes = {
        optimizer: [
            {name: tuple(values.shape) for name, values in of_table.items()}
            for of_table in some_tables(optimizer).get_optimizer_state()
        ]
        for optimizer in OPTIMIZERS
    }
    first, second = (30, WIDTH), (60, WIDTH)
    assert shapes == {
        EmbOptimType.EXACT_SGD: [],
        EmbOptimType.EXACT_ADAGRAD: [{"sum": first}, {"sum": second}],
        EmbOptimType.EXACT_ROWWISE_ADAGRAD: [{"sum": (30,)}, {"sum": (60,)}],
        EmbOptimType.ADAM: [
            {"exp_avg": first, "exp_avg_sq": first},
            {"exp_avg": second, "exp_avg_sq": second},
        ],
        EmbOptimType.PARTIAL_ROWWISE_ADAM: [
            {"exp_avg": first, "exp_avg_sq": (30,)},
            {"exp_avg": second, "exp_avg_sq": (60,)},
        ],
    }


def test_tables_of_several_widths_are_no_group() -> None:
    with pytest.raises(ValueError, match="have widths"):
        PlainTables([(2, 4, None, None), (2, 8, None, None)], EmbOptimType.EXACT_SGD, HOST)
