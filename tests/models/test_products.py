"""Products in pieces: the numbers of plain ones, to any derivative; few sizes, whatever comes."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from models import products
from models.linear import RowLinear

needs_onednn = pytest.mark.skipif(
    not products.onednn_is_exact(), reason="oneDNN computes in bfloat16 on this processor"
)


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> object:
    before = torch.get_float32_matmul_precision()
    products.go_in_pieces()
    yield
    torch.set_float32_matmul_precision(before)


def is_close(found: Tensor, exact: Tensor) -> bool:
    return bool((found.double() - exact).abs().max() <= 5e-6 * exact.abs().max())


@pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 65, 127, 1_000, 1_024, 2_111])
@pytest.mark.parametrize(("inner", "width"), [(832, 256), (7, 1), (200, 330)])
def test_products_are_those_of_double_precision(num_rows: int, inner: int, width: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, matrix, bias = some(num_rows, inner), some(inner, width), some(width)
    grad, into, summed = some(num_rows, width), some(num_rows, width), some(width, inner)
    if num_rows:
        exact = rows.double() @ matrix.double()
        assert is_close(products.times(rows, matrix), exact)
        assert is_close(products.times(rows, matrix, bias), exact + bias.double())
        out = torch.full((num_rows, width), torch.nan)
        assert products.times(rows, matrix.T.contiguous().T, out=out) is out
        assert is_close(out, exact)
        before = into.double()
        products.add_times(into, rows, matrix, beta=1)
        assert is_close(into, before + exact)
        products.add_times(into, rows, matrix, beta=0)
        assert is_close(into, exact)
    exact = grad.double().T @ rows.double()
    torch.testing.assert_close(products.over_rows(grad, rows).double(), exact, rtol=1e-4, atol=1e-3)
    before = summed.double()
    assert is_close(products.over_rows(grad, rows, summed), before + exact)
    if products.onednn_is_exact():
        assert torch.get_float32_matmul_precision() == products.PIECES


@pytest.mark.parametrize("num_rows", [0, 1, 63, 300, 1_485])
def test_products_of_each_row_are_those_of_double_precision(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    left, right = (torch.randn(num_rows, 27, 32, generator=generator) for _ in range(2))
    for factors in ((left, right.mT), (left.mT, right)):
        exact = torch.bmm(*(factor.double() for factor in factors))
        found = products.each_times(*factors)
        assert found.shape == exact.shape
        assert not num_rows or is_close(found, exact)


@needs_onednn
def test_most_rows_go_in_pieces_of_few_sizes() -> None:
    rows = torch.zeros(5_000, 100)
    pieces = {count: products.first_piece(rows[:count], 100) for count in range(5_001)}
    assert all(not piece for count, piece in pieces.items() if count < 400), "not worth it"
    assert all(count >= piece > 0.9 * count for count, piece in pieces.items() if count >= 640)
    assert len(set(pieces.values())) < 60


@needs_onednn
def test_a_product_that_fails_leaves_torchs_precision_as_it_was() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        products.times(torch.zeros(5_000, 100), torch.zeros(99, 100))
    assert torch.get_float32_matmul_precision() == products.PIECES


@needs_onednn
def test_other_numbers_are_left_to_torch() -> None:
    rows = torch.zeros(5_000, 100)
    assert products.first_piece(rows, 100)
    assert not products.first_piece(rows.double(), 100)
    assert not products.first_piece(rows.bfloat16(), 100)


def test_where_onednn_is_not_exact_it_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_is_exact", lambda: False)
    products.go_in_pieces()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not products.first_piece(torch.zeros(5_000, 100), 100)


def test_outside_of_training_torchs_precision_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds for all threads of a process that serves, and for its GPU."""
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", pytest.fail)
    RowLinear(200, 330)(torch.randn(1_000, 200)).sum().backward()


@pytest.mark.parametrize("shape", [(300, 40), (60, 5, 40)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_layer_in_pieces_has_the_derivatives_of_torchs(
    shape: tuple[int, ...], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "LEAST_WORK", 1)
    torch.manual_seed(0)
    ours = RowLinear(40, 30, bias=has_bias)
    theirs = torch.nn.Linear(40, 30, bias=has_bias).double()
    theirs.load_state_dict({name: value.double() for name, value in ours.state_dict().items()})
    rows = torch.randn(shape)
    for derivatives in zip(derivatives_of(ours, rows), derivatives_of(theirs, rows), strict=True):
        found, exact = derivatives
        assert is_close(found, exact), (found, exact)


def derivatives_of(layer: torch.nn.Linear, values: Tensor) -> list[Tensor]:
    """Of a function of the outputs, and of one of its own gradients."""
    rows = values.to(layer.weight.dtype).requires_grad_()
    wanted = [rows, *layer.parameters()]
    output = layer(rows)
    first = torch.autograd.grad(output.square().sum(), wanted, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), wanted)
    return [output, *first, *second]


def test_a_layer_works_inside_torch_func(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_WORK", 1)
    layer, rows = RowLinear(8, 8), torch.randn(3, 100, 8)
    found = torch.func.vmap(layer)(rows)
    torch.testing.assert_close(found, torch.stack([layer(each) for each in rows]))


RAGGED_STEPS = """
import sys
import torch
from gmeta.adaptation.config import AlgorithmConfig
from gmeta.learner import MetaLearner
from models import InputSizes, ModelConfig, build_model
from models.products import go_in_pieces
sys.path.insert(0, "benchmarks")
from _synthetic import ragged_sizes, random_batch, single_id_features

torch.set_num_threads(1)
go_in_pieces()
features = single_id_features(10, 1_000)
config = ModelConfig(name="melu", embedding_dim=16, hidden=(128, 64))
algorithm = AlgorithmConfig(name="maml", adapt_embeddings=False)
learner = MetaLearner(build_model(config, InputSizes(10, 0, 0)), algorithm, "bce")
for call in range(60):
    print("step", flush=True)
    sizes = [ragged_sizes(64, 10, 2 * call + side) for side in (0, 1)]
    batch = random_batch(features, *sizes, call)
    episodes = learner.arrange(batch)
    rows = torch.randn(batch.unique_ids_U.numel(), 16).requires_grad_()
    learner(rows, episodes, 1 / episodes.num_terms).backward()
"""


@needs_onednn
def test_steps_of_ragged_tasks_soon_need_no_new_code_of_onednn() -> None:
    """As oneDNN's own log has it: with every product in oneDNN each step would need some 40."""
    # What its primitives are created for anew, in this process.
    variables = {**os.environ, "ONEDNN_VERBOSE": "profile_create", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RAGGED_STEPS],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    steps = done.stdout.split("step\n")[1:]
    new = [step.count("create:cache_miss") for step in steps]
    assert len(new) == 60
    assert sum(new) > 0, "oneDNN was not taken at all"
    assert sum(new[30:]) <= 30, new
