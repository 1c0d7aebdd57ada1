"""Which embedding rows the outer gradient reaches, and which are arranged to need none."""

import random

import pytest
import torch

from gmeta.adaptation.layout.padded_layout import PaddedTasks
from gmeta.adaptation.layout.sides import Sides
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.data.episodes import collate_support_query
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from metaio.read.batch import TaskBatch
from tests.support import reference

FEATURES = reference.some_features(2, 2, 1, history=True)
SIZES = [(4, 2), (0, 3), (3, 0), (1, 1), (5, 2)]
ALGORITHMS = ("none", "maml", "fomaml", "anil", "reptile", "metasgd")


def some_batch() -> TaskBatch:
    rng = random.Random(3)
    tasks = [reference.random_task(FEATURES, *size, rng) for size in SIZES]
    return reference.batch_of(tasks, FEATURES)


def ids_of_query_rows(batch: TaskBatch) -> torch.Tensor:
    """Tell which of the batch's unique ids a query row uses: bool [U]."""
    firsts, ends = batch.row_offsets_T1[:-1].tolist(), batch.row_offsets_T1[1:].tolist()
    values_NM, first_value = batch.multi_lengths_NM.tolist(), 0
    is_used_U = torch.zeros(batch.unique_ids_U.numel(), dtype=torch.bool)
    for task, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        for row in range(first, end):
            values = slice(first_value, first_value + sum(values_NM[row]))
            first_value = values.stop
            if row >= first + batch.support_lengths_T[task].item():
                is_used_U[batch.positions_NF[row].long()] = True
                is_used_U[batch.multi_positions_V[values].long()] = True
    return is_used_U


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("model", ["melu", "dlrm", "cbml", "din"])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("adapt_embeddings", [False, True])
def test_rows_of_the_support_side_get_no_gradient_in_first_order_without_gates(
    name: str, model: str, adapt_embeddings: bool, general: bool
) -> None:
    torch.manual_seed(0)
    layers = ("top.*",) if model == "dlrm" else ("decision.*",)
    algorithm = AlgorithmConfig(
        name=name,
        inner_steps=2,
        inner_lr=0.3,
        adapt_layers=AlgorithmConfig.adapt_layers if name == "anil" else layers,
        adapt_embeddings=adapt_embeddings,
    )
    history = FEATURES.multi[0].name if model == "din" else ""
    config = ModelConfig(
        name=model, embedding_dim=4, hidden=(6, 5), options={"bottom": (3,), "history": history}
    )
    learner = build_learner(FEATURES, config, algorithm, "bce").double()
    if general:
        learner.use_general_loop()
    batch = some_batch()
    episodes = learner.collate(batch)
    they_learn = name != "fomaml" or model == "cbml"
    if isinstance(episodes.rows, PaddedTasks):
        # No sort for a derivative that nobody takes, be it of the outer loop or of inner steps.
        is_constant = episodes.rows.features[0].bags.backward is None
        assert is_constant != (they_learn or adapt_embeddings)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    learner(rows_UD, episodes, 1.0).backward()
    assert rows_UD.grad is not None
    reached_U = (rows_UD.grad != 0).any(dim=1)
    only_support_U = ~ids_of_query_rows(batch)
    assert only_support_U.any()
    assert (reached_U & only_support_U).any() == they_learn


@pytest.mark.parametrize("model", ["dlrm", "cbml", "din"])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("adapt_embeddings", [False, True])
def test_predicting_prepares_no_derivative_but_that_of_rows_that_adapt(
    name: str, model: str, adapt_embeddings: bool
) -> None:
    torch.manual_seed(0)
    history = FEATURES.multi[0].name if model == "din" else ""
    config = ModelConfig(
        name=model, embedding_dim=4, hidden=(6, 5), options={"bottom": (3,), "history": history}
    )
    algorithm = AlgorithmConfig(name=name, inner_steps=2, adapt_embeddings=adapt_embeddings)
    learner = build_learner(FEATURES, config, algorithm, "bce").double()
    batch = some_batch()
    episodes = learner.collate_to_predict(batch)
    assert isinstance(episodes.rows, Sides)
    support, query = episodes.rows
    rows_adapt = learner._config.adapt_embeddings
    assert (support.single_rows.backward is not None) == rows_adapt
    assert (support.bag_rows.backward is not None) == rows_adapt
    assert query.single_rows.backward is query.bag_rows.backward is None
    assert episodes.copies is None or episodes.copies.backward is None
    assert (episodes.copies is not None) == rows_adapt
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    found = learner.predict(rows_UD, episodes)
    wanted = learner.predict(rows_UD, collate_support_query(batch, rows_adapt))
    assert torch.equal(found.after_N, wanted.after_N)
    assert torch.equal(found.before_N, wanted.before_N)
