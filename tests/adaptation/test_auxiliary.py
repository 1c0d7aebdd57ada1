"""An auxiliary loss that a model makes: of query rows alone, alike in both inner loops."""

import math
import random

import pytest
import torch
from torch import Tensor, nn

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.runs.build import build_learner
from gmeta_models import InputSizes, ModelConfig, RowInputs
from gmeta_models.decision_model import DecisionModel
from gmeta_models.inputs import RowFeatures
from tests.losses.test_objectives import CONFIGS, MODELS, NAMES, Labelled
from tests.support import reference
from tests.support.refusals import catch_message

HERE = __name__
SIZES = [(3, 2), (1, 4), (4, 0), (0, 2)]


def spread_N(model: nn.Module, rows: RowFeatures) -> Tensor:
    """A loss that reads embeddings and what dense layers make."""
    dense = rows.dense_NK.sigmoid().sum(dim=1) if rows.dense_NK.shape[1] else 0.0
    # The history's pooled vector, the last here, may be anything.
    seen_NFD = rows.features_NFD if rows.history is None else rows.features_NFD[:, :-1]
    return 0.1 * seen_NFD.square().sum(dim=(1, 2)) + dense


@pytest.fixture
def _with_auxiliary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecisionModel, "has_auxiliary", True)
    monkeypatch.setattr(DecisionModel, "auxiliary_N", spread_N)


def found(
    model: str, name: str, embeddings: bool, is_general: bool = False, seed: int = 0
) -> tuple[list[Tensor], str, list[reference.Task], dict[str, Tensor], object]:
    rng, features = random.Random(seed), reference.some_features(2, 1, 2, history=model == "din")
    tasks = [reference.random_task(features, *size, rng) for size in SIZES]
    features, tasks = Labelled(NAMES, 0.5, True)(features, tasks, rng)
    batch = reference.batch_of(tasks, features)
    torch.manual_seed(seed)
    config = AlgorithmConfig(
        name=name, inner_steps=2, adapt_embeddings=embeddings, support_prior=0.5,
        adapt_layers=("decision.*",) if model == "din" and name != "anil" else ("*",),
    )  # fmt: skip
    learner = build_learner(
        features, MODELS[model], config, "bce", labels=CONFIGS["entire space"]
    ).double()  # fmt: skip
    route = learner.route
    if is_general:
        learner.use_general_loop()
    sizes = {table.name: table.num_rows for table in features.tables}
    tables = {
        table: torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
        for table, rows in sizes.items()
    }
    ids = batch.unique_ids_U.split(batch.unique_lengths_B.tolist())
    rows_UD = torch.cat([table[mine] for table, mine in zip(tables.values(), ids, strict=True)])
    loss = learner(rows_UD, learner.collate(batch), weight=1.0)
    wanted = [*tables.values(), *learner.parameters()]
    grads = torch.autograd.grad(loss, wanted, materialize_grads=True)
    return [loss, *grads], route, tasks, tables, (learner.model, features)


@pytest.mark.usefixtures("_with_auxiliary", "kernel")
@pytest.mark.parametrize("model", ["melu", "dlrm", "cbml", "din"])
@pytest.mark.parametrize("name", ["maml", "fomaml", "anil"])
@pytest.mark.parametrize("embeddings", [False, True])
def test_the_fused_loop_adds_what_the_general_one_does(
    model: str, name: str, embeddings: bool
) -> None:
    fused, route, *_ = found(model, name, embeddings)
    general, *_ = found(model, name, embeddings, is_general=True)
    assert route == "fused"
    for mine, slow in zip(fused, general, strict=True):
        torch.testing.assert_close(mine, slow, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["maml", "ridge", "none"])
def test_it_is_the_mean_over_a_tasks_query_rows_by_their_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "ridge":  # of one label alone
        monkeypatch.setattr("tests.adaptation.test_auxiliary.NAMES", ("click",))
        monkeypatch.setitem(CONFIGS, "entire space", CONFIGS["alike"])
    without, *_ = found("melu", name, False)
    monkeypatch.setattr(DecisionModel, "has_auxiliary", True)
    monkeypatch.setattr(DecisionModel, "auxiliary_N", spread_N)
    with_it, _, tasks, tables, (model, features) = found("melu", name, False)
    expected = torch.zeros((), dtype=torch.float64)
    for task in tasks:
        # Plain training has no sides.
        rows = range(0 if name == "none" else task.num_support, len(task.label))
        if not rows:
            continue
        inputs = reference.rows_inputs(task, features, tables, rows)
        pooled = model.through_dense(inputs.pooled(model.pooling, model.history))
        labels = [task.label[row] for row in rows]
        known = [
            any(not math.isnan(one) for one in (label if isinstance(label, list) else [label]))
            for label in labels
        ]
        weights = torch.tensor([task.weight[row] for row in rows]) * torch.tensor(known)
        total = (spread_N(model, pooled) * weights).sum()
        expected = expected + (total if name == "none" else total / len(rows))
    torch.testing.assert_close(with_it[0] - without[0], expected, rtol=1e-10, atol=1e-10)


class Pair(nn.Module):
    """A model of somebody's own, which returns both."""

    def __init__(self, config: ModelConfig, sizes: InputSizes) -> None:
        super().__init__()
        self.side = nn.Linear(config.embedding_dim, 1)
        self.head = nn.Linear(config.embedding_dim, 1)

    def forward(self, inputs: RowInputs) -> tuple[Tensor, Tensor]:
        seen_ND = inputs.features_NFD("mean").sum(dim=1)
        return self.head(seen_ND)[:, 0], self.auxiliary(seen_ND)

    def auxiliary(self, seen_ND: Tensor) -> Tensor:
        return self.side(seen_ND)[:, 0].square()


class OfAll(Pair):
    def auxiliary(self, seen_ND: Tensor) -> Tensor:
        return seen_ND.square().mean(dim=0).sum().expand(len(seen_ND))


class OneNumber(Pair):
    def auxiliary(self, seen_ND: Tensor) -> Tensor:
        return seen_ND.square().mean()


def test_a_model_of_ones_own_returns_it_and_predicts_as_without() -> None:
    features = reference.some_features(2, 1, 0)
    tasks = [reference.random_task(features, 3, 2, random.Random(0))]
    batch = reference.batch_of(tasks, features)
    torch.manual_seed(0)
    config = ModelConfig(name=f"{HERE}:Pair", embedding_dim=4)
    learner = build_learner(features, config, AlgorithmConfig(name="maml"), "bce").double()
    rows_UD = torch.randn(len(batch.unique_ids_U), 4, dtype=torch.float64)
    losses = [learner(rows_UD, learner.collate(batch), weight=1.0).item()]
    after_N = learner.predict(rows_UD, learner.collate_to_predict(batch)).after_N
    made = learner.model.auxiliary
    learner.model.auxiliary = lambda seen_ND: 0.0 * made(seen_ND)
    losses.append(learner(rows_UD, learner.collate(batch), weight=1.0).item())
    same_N = learner.predict(rows_UD, learner.collate_to_predict(batch)).after_N
    torch.testing.assert_close(after_N, same_N)
    assert losses[0] > losses[1]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("OneNumber", "makes the auxiliary loss [] of 3 rows; a tensor of [3] is needed. Correct "
         "the second of what its forward returns"),
        ("OfAll", ": the output of a row changes with other rows, as BatchNorm makes it, so that a "
         "task would learn from others. Normalise each row alone, with LayerNorm or GroupNorm"),
    ],
)  # fmt: skip
def test_what_is_no_loss_of_each_row_is_refused(kind: str, told: str) -> None:
    features, config = reference.some_features(2, 1, 0), ModelConfig(name=f"{HERE}:{kind}")
    message = catch_message(
        ValueError, build_learner, features, config, AlgorithmConfig(name="maml"), "bce"
    )
    assert message == f"model.name = '{HERE}:{kind}'{' ' * (told[0] != ':')}{told}"
