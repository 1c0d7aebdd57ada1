"""Which embedding rows the outer gradient reaches: what the learner says against what it does."""

import random

import pytest
import torch

from gmeta.adaptation.blocks import TaskBlocks
from gmeta.adaptation.config import AlgorithmConfig
from gmeta.adaptation.side import Sides
from gmeta.batches.episodes import ids_of_query_rows, support_and_query
from gmeta.build import build_learner
from metaio.batch import TaskBatch, empty_batch
from models import ModelConfig
from tests import reference

FEATURES = reference.some_features(2, 2, 1, history=True)
SIZES = [(4, 2), (0, 3), (3, 0), (1, 1), (5, 2)]
ALGORITHMS = ("none", "maml", "fomaml", "anil", "reptile", "metasgd")


def some_batch() -> TaskBatch:
    rng = random.Random(3)
    tasks = [reference.random_task(FEATURES, *size, rng) for size in SIZES]
    return reference.batch_of(tasks, FEATURES)


def test_the_ids_of_query_rows_are_those_that_a_loop_over_them_finds() -> None:
    batch = some_batch()
    firsts, ends = batch.row_offsets_T1[:-1].tolist(), batch.row_offsets_T1[1:].tolist()
    values_NM, first_value = batch.multi_lengths_NM.tolist(), 0
    used: set[int] = set()
    for task, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        for row in range(first, end):
            values = range(first_value, first_value + sum(values_NM[row]))
            first_value = values.stop
            if row >= first + batch.support_lengths_T[task].item():
                used |= set(batch.positions_NF[row].tolist())
                used |= {int(batch.multi_positions_V[value]) for value in values}
    assert ids_of_query_rows(batch).nonzero().squeeze(1).tolist() == sorted(used)
    assert len(used) < batch.unique_ids_U.numel()


def test_a_batch_without_tasks_has_no_query_rows() -> None:
    nothing = empty_batch(
        len(FEATURES.tables), len(FEATURES.single), len(FEATURES.multi), len(FEATURES.dense)
    )
    assert ids_of_query_rows(nothing).numel() == 0


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("model", ["melu", "dlrm", "cbml", "din"])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("adapt_embeddings", [False, True])
def test_rows_of_the_support_side_get_no_gradient_where_the_learner_says_so(
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
    config = ModelConfig(name=model, embedding_dim=4, hidden=(6, 5), bottom=(3,), history=history)
    learner = build_learner(FEATURES, config, algorithm, "bce").double()
    if general:
        learner.use_general_loop()
    batch = some_batch()
    episodes = learner.arrange(batch)
    if isinstance(episodes.rows, TaskBlocks):
        # No sort for a derivative that nobody takes, be it of the outer loop or of inner steps.
        is_constant = episodes.rows.support.bags.backward is None
        assert is_constant != (learner.support_rows_learn or adapt_embeddings)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    learner(rows_UD, episodes, 1.0).backward()
    assert rows_UD.grad is not None
    reached_U = (rows_UD.grad != 0).any(dim=1)
    only_support_U = ~ids_of_query_rows(batch)
    assert (reached_U & only_support_U).any() == learner.support_rows_learn
    assert learner.support_rows_learn != (name == "fomaml" and model != "cbml")


@pytest.mark.parametrize("model", ["dlrm", "cbml", "din"])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("adapt_embeddings", [False, True])
def test_predicting_prepares_no_derivative_but_that_of_rows_that_adapt(
    name: str, model: str, adapt_embeddings: bool
) -> None:
    torch.manual_seed(0)
    history = FEATURES.multi[0].name if model == "din" else ""
    config = ModelConfig(name=model, embedding_dim=4, hidden=(6, 5), bottom=(3,), history=history)
    algorithm = AlgorithmConfig(name=name, inner_steps=2, adapt_embeddings=adapt_embeddings)
    learner = build_learner(FEATURES, config, algorithm, "bce").double()
    batch = some_batch()
    episodes = learner.arrange_to_predict(batch)
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
    wanted = learner.predict(rows_UD, support_and_query(batch, rows_adapt))
    assert torch.equal(found.after_N, wanted.after_N)
    assert torch.equal(found.before_N, wanted.before_N)
