"""The meta-learning step against golden numbers of independent implementations, float64, 1e-10."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gmeta.adaptation.adaptation_plan import AdaptationPlan
from gmeta.adaptation.algorithms.algorithm import TableSizes
from gmeta.adaptation.algorithms.metasgd import META_SGD, LearnedRates
from gmeta.adaptation.algorithms.registry import ALGORITHMS
from gmeta.adaptation.rates import LayerRate
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.learner import MetaLearner
from tests.support import golden

# Inner rate, outer rate, and the outer rate of Meta-SGD's alphas.
RATES = {"bce": (0.1, 0.5, 0.05), "mse": (0.05, 0.02, 0.0002)}
CASES = ("A_bce", "A_mse", "B_bce")
KINDS = {
    "maml2": "maml", "fomaml": "fomaml", "melu2": "maml", "melu1": "fomaml", "reptile": "reptile",
    "metasgd": "elementwise metasgd",
}  # fmt: skip
ALGORITHMS_K = [
    *(f"{kind}_k{steps}" for kind in KINDS for steps in (1, 3) if kind != "melu1"),
    "melu1_k1",
]


class ElementRates(nn.Module):
    """Meta-SGD as published: a rate for each element of the tables too, all of them fetched."""

    def __init__(self, plan: AdaptationPlan, tables: TableSizes) -> None:
        super().__init__()
        of_layers = replace(plan, config=replace(plan.config, adapt_embeddings=False))
        self.layers = LearnedRates(of_layers, tables)
        self.rows_UD = nn.Parameter(torch.empty(0))

    def of_layer(self, name: str) -> LayerRate:
        return self.layers.of_layer(name)

    def of_rows(self, unique_lengths_B: Tensor, fetched_row_P: Tensor) -> Tensor:
        return self.rows_UD.index_select(0, fetched_row_P)


@pytest.fixture(autouse=True)
def elementwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "elementwise metasgd", replace(META_SGD, rates=ElementRates))


def algorithm_config(case: str, algorithm: str) -> AlgorithmConfig:
    kind, _, steps = algorithm.partition("_k")
    adapts_all = not kind.startswith("melu")
    return AlgorithmConfig(
        name=KINDS[kind],
        inner_steps=int(steps),
        inner_lr=RATES[case[2:]][0],
        options={"learned_rates": "weight"},
        adapt_layers=("*",) if adapts_all else golden.DECISION[case[0]],
        adapt_embeddings=adapts_all,
    )


def alphas(case: str, rates: ElementRates, numbers: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Our rate for each golden alpha of a layer; these and the rows' at their initial values."""
    key = f"{case}/metasgd_alpha_init"
    found: dict[str, Tensor] = {}
    for theirs, ours in golden.LAYERS[case[0]].items():
        layer = rates.layers.layers[ours.replace(".", "/")]
        found |= {f"{theirs}_w": layer.weight, f"{theirs}_b": layer.bias}
    for name, parameter in found.items():
        parameter.data.copy_(torch.from_numpy(numbers[f"{key}/{name}"]))
    tables = [torch.from_numpy(numbers[f"{key}/{table}"]) for table in golden.TABLES]
    rates.rows_UD.data = torch.cat(tables)
    return found


def split_rows(case: str, rows_UD: Tensor, numbers: dict[str, np.ndarray]) -> dict[str, Tensor]:
    sizes = [numbers[f"{case}/init/{table}"].shape[0] for table in golden.TABLES]
    return dict(zip(golden.TABLES, rows_UD.split(sizes), strict=True))


def grad_of(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@pytest.mark.shared_data
@pytest.mark.parametrize("algorithm", ALGORITHMS_K)
@pytest.mark.parametrize("case", CASES)
def test_gradients_losses_and_three_steps_equal_the_golden_ones(case: str, algorithm: str) -> None:
    numbers = golden.load()
    model, tables = golden.build(case, numbers)
    batch = golden.batch(case, numbers)
    learner = MetaLearner(model, algorithm_config(case, algorithm), loss=case[2:])
    named = dict([*golden.layer_parameters(case, model), *tables.items()])
    _, lr, alpha_lr = RATES[case[2:]]
    groups = [{"params": list(named.values()), "lr": lr}]
    layer_alphas: dict[str, Tensor] = {}
    if isinstance(learner.rates, ElementRates):
        layer_alphas = alphas(case, learner.rates, numbers)
        groups.append({"params": list(learner.rates.parameters()), "lr": alpha_lr})
    outer = torch.optim.SGD(groups)
    key = f"{case}/{algorithm}"

    def close(ours: Tensor, name: str) -> None:
        np.testing.assert_allclose(
            ours.detach().numpy(), numbers[f"{key}/{name}"], rtol=0, atol=1e-10, err_msg=name
        )

    def close_alphas(folder: str, grads: bool) -> None:
        if not isinstance(learner.rates, ElementRates):
            return
        rows_UD = learner.rates.rows_UD
        rows = split_rows(case, grad_of(rows_UD) if grads else rows_UD, numbers)
        for name, alpha in layer_alphas.items():
            close(grad_of(alpha) if grads else alpha, f"{folder}/{name}")
        for name, alpha in rows.items():
            close(alpha, f"{folder}/{name}")

    for step in range(3):
        outer.zero_grad()
        loss = learner(torch.cat(list(tables.values())), learner.collate(batch), weight=1 / 3)
        loss.backward()
        np.testing.assert_allclose(
            loss.item(), numbers[f"{key}/outer_losses"][step], rtol=0, atol=1e-10
        )
        if step == 0:
            for name, parameter in named.items():
                close(grad_of(parameter), f"grad/{name}")
            close_alphas("alpha_grad", grads=True)
        outer.step()
        if step in (0, 2):
            for name, parameter in named.items():
                close(parameter, f"params{step + 1}/{name}")
            close_alphas(f"alpha{step + 1}", grads=False)


@pytest.mark.shared_data
@pytest.mark.parametrize("algorithm", ["maml2_k1", "maml2_k3", "melu2_k3", "reptile_k3"])
@pytest.mark.parametrize("case", CASES)
def test_adapted_predictions_equal_the_golden_query_logits(case: str, algorithm: str) -> None:
    numbers = golden.load()
    model, tables = golden.build(case, numbers)
    learner = MetaLearner(model, algorithm_config(case, algorithm), loss=case[2:])
    episodes = learner.collate_to_predict(golden.batch(case, numbers))
    prediction = learner.predict(torch.cat(list(tables.values())).detach(), episodes)
    expected = np.concatenate(
        [numbers[f"{case}/{algorithm}/task{task}/query_logits"] for task in range(3)]
    )
    np.testing.assert_allclose(prediction.after_N.numpy(), expected, rtol=0, atol=1e-10)
