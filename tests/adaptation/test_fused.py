"""The fused loop against the general one: where it serves, and that both give the same step."""

import random
from dataclasses import replace
from operator import itemgetter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gmeta.adaptation.blocks import (
    MOST_RECTANGLES,
    PADDING_SHARE,
    StackedBlocks,
    TaskBlocks,
    group_tasks,
)
from gmeta.adaptation.config import AlgorithmConfig, InnerPath
from gmeta.adaptation.costs import PathCosts
from gmeta.adaptation.paths import cheaper_path
from gmeta.adaptation.side import Sides, TaskGroups
from gmeta.batches.episodes import Episodes, support_and_query
from gmeta.build import build_learner
from gmeta.learner import MetaLearner
from models import ModelConfig
from tests import reference

MELU = ModelConfig(name="melu", embedding_dim=4, hidden=(6, 5))
FEATURES = reference.some_features(2, 2, 0, history=True)
DECISION = {"melu": "decision", "dlrm": "top", "din": "decision", "cbml": "decision"}


def learner_of(
    algorithm: AlgorithmConfig, model: ModelConfig = MELU, loss: str = "bce"
) -> MetaLearner:
    torch.manual_seed(0)
    return build_learner(FEATURES, model, algorithm, loss).double()


def batch_of(sizes: list[tuple[int, int]]) -> reference.TaskBatch:
    rng = random.Random(0)
    return reference.batch_of(
        [reference.random_task(FEATURES, *size, rng) for size in sizes], FEATURES
    )


def arranged_together(learner: MetaLearner, batch: reference.TaskBatch) -> Episodes:
    """Both sides of all tasks at once, to train on."""
    return support_and_query(batch, rows_per_task=learner._config.adapt_embeddings)


def assert_same_step(
    learner: MetaLearner, rows_UD: Tensor, mine: Episodes, other: Episodes
) -> None:
    """Equal losses and gradients of the rows and all parameters."""
    wanted = [rows_UD, *learner.parameters()]
    losses = [learner(rows_UD, episodes, 1.0) for episodes in (mine, other)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-10)
    grads = [
        torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        for loss in losses
    ]
    # A rate that no support row reaches: unused in the one, zero in the other.
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["maml", "fomaml", "anil", "metasgd"]),
    model=st.sampled_from(["melu", "dlrm", "din", "cbml"]),
    steps=st.integers(1, 3),
    embeddings=st.booleans(),
    layers=st.sampled_from([("*",), ("0",), ("2", "4"), ("4",)]),
    rates=st.sampled_from(["layer", "output"]),
    path=st.sampled_from(["low_rank", "materialised", "auto"]),
    loss=st.sampled_from(["bce", "mse", "huber"]),
    sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=9).filter(
        lambda sizes: any(support and query for support, query in sizes)
    ),
)
def test_the_fused_step_equals_the_general_one(
    name: str,
    model: str,
    steps: int,
    embeddings: bool,
    layers: tuple[str, ...],
    rates: str,
    path: InnerPath,
    loss: str,
    sizes: list[tuple[int, int]],
) -> None:
    embeddings = embeddings and name != "anil"
    algorithm = AlgorithmConfig(
        name=name,
        inner_steps=steps,
        adapt_embeddings=embeddings,
        adapt_layers=("*",)
        if name == "anil"
        else tuple(f"{DECISION[model]}.{layer}" for layer in layers),
        learned_rates=rates,
        inner_path="low_rank" if embeddings else path,
        support_prior=0.5,
    )
    learner = learner_of(algorithm, replace(MELU, name=model, history="m0"), loss)
    batch = batch_of(sizes)
    fused, general = learner.arrange(batch), arranged_together(learner, batch)
    assert isinstance(fused.rows, TaskBlocks | StackedBlocks)
    assert isinstance(general.rows, Sides)
    assert fused.num_terms == general.num_terms
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    assert_same_step(learner, rows_UD, fused, general)


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        (AlgorithmConfig(name="reptile"), MELU),
        (AlgorithmConfig(name="maml", inner_path="materialised"), MELU),
        (AlgorithmConfig(name="maml", layer_paths=("decision.0=materialised",)), MELU),
        (AlgorithmConfig(name="metasgd", learned_rates="weight"), MELU),
        (AlgorithmConfig(name="maml"), replace(MELU, name="din", history="m0")),
    ],
)
def test_what_the_fused_loop_cannot_do_goes_to_the_general_one(
    algorithm: AlgorithmConfig, model: ModelConfig
) -> None:
    assert isinstance(learner_of(algorithm, model).arrange(batch_of([(3, 2)])).rows, TaskGroups)


@pytest.mark.parametrize("name", ["maml", "fomaml"])
def test_a_step_may_have_no_history_at_all(name: str) -> None:
    """As where all users of a small step are new."""
    din = replace(MELU, name="din", history="m0")
    algorithm = AlgorithmConfig(name=name, adapt_embeddings=False, adapt_layers=("decision.*",))
    learner = learner_of(algorithm, din)
    task = reference.random_task(FEATURES, 3, 2, random.Random(0))
    empty = replace(task, multi=[[[], *others] for _, *others in task.multi])
    batch = reference.batch_of([empty], FEATURES)
    fused, general = learner.arrange(batch), arranged_together(learner, batch)
    assert isinstance(fused.rows, TaskBlocks | StackedBlocks)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    assert_same_step(learner, rows_UD, fused, general)


def test_many_support_rows_go_to_the_general_loop_where_its_materialised_path_is_cheaper() -> None:
    learner = learner_of(AlgorithmConfig(name="maml"))
    assert isinstance(learner.arrange(batch_of([(1, 1)])).rows, TaskBlocks)
    assert isinstance(learner.arrange(batch_of([(30, 30)])).rows, TaskGroups)


@pytest.mark.parametrize(
    ("tasks", "rows", "steps", "width", "fixed", "path", "held"),
    [
        (32, 10, 1, (256, 64), True, "auto", "fixed"),
        (32, 400, 1, (256, 64), True, "auto", "materialised"),
        (32, 10, 1, (64, 64), False, "auto", "low_rank"),
        (32, 90, 3, (64, 1), False, "auto", "materialised"),
        (32, 90, 3, (64, 1), False, "low_rank", "low_rank"),
        (1, 1, 1, (256, 64), True, "materialised", "materialised"),
    ],
)
def test_a_change_is_held_in_the_faster_way_unless_the_config_says_how(
    tasks: int,
    rows: int,
    steps: int,
    width: tuple[int, int],
    fixed: bool,
    path: InnerPath,
    held: str,
) -> None:
    assert cheaper_path(tasks, PathCosts(rows, rows, steps), *width, fixed, path) == held


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    algorithm=st.sampled_from(
        [
            AlgorithmConfig(name="reptile"),
            AlgorithmConfig(name="maml", inner_path="materialised", inner_steps=2),
            AlgorithmConfig(name="metasgd", learned_rates="weight"),
            AlgorithmConfig(name="fomaml", inner_path="materialised"),
        ]
    ),
    model=st.sampled_from(["melu", "cbml", "din"]),
    sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=9),
)
def test_groups_of_similar_tasks_give_the_step_of_all_tasks_together(
    algorithm: AlgorithmConfig, model: str, sizes: list[tuple[int, int]]
) -> None:
    learner = learner_of(algorithm, replace(MELU, name=model, history="m0"))
    batch = batch_of(sizes)
    grouped, together = learner.arrange(batch), arranged_together(learner, batch)
    assert isinstance(grouped.rows, TaskGroups)
    assert isinstance(together.rows, Sides)
    together = replace(together, num_terms=grouped.num_terms)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    assert_same_step(learner, rows_UD, grouped, together)


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(name="maml", inner_path="low_rank"),
        AlgorithmConfig(name="maml", adapt_embeddings=False, inner_steps=2),
        AlgorithmConfig(name="fomaml", adapt_embeddings=False),
        AlgorithmConfig(name="metasgd", adapt_embeddings=False, inner_path="materialised"),
    ],
)
def test_autocast_computes_the_fused_step_in_bfloat16(algorithm: AlgorithmConfig) -> None:
    learner = learner_of(algorithm).float()
    batch = batch_of([(3, 2), (2, 4)])
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, requires_grad=True)
    exact = learner(rows_UD, learner.arrange(batch), 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = learner(rows_UD, learner.arrange(batch), 1.0)
    rough.backward()
    assert 0 < abs(rough.item() - exact.item()) < 0.02 * abs(exact.item())
    assert all(parameter.grad is not None for parameter in learner.parameters())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), min_size=1, max_size=60))
def test_groups_hold_every_task_once_and_pad_little_unless_they_are_many(
    sizes: list[tuple[int, int]],
) -> None:
    support_T, query_T = np.array(sizes).T
    groups = group_tasks(support_T, query_T)
    assert sorted(task for group in groups for task in group) == list(range(len(sizes)))
    padded = sum(len(g) * (support_T[g].max() + query_T[g].max()) for g in groups)
    allowed = (1 + PADDING_SHARE) * (support_T.sum() + query_T.sum())
    assert len(groups) == MOST_RECTANGLES or padded <= allowed


def test_a_group_more_saves_at_least_the_rows_that_were_asked_for() -> None:
    support_T, query_T = np.array([2, 2, 12, 12]), np.array([4, 4, 4, 4])
    of = lambda least: len(group_tasks(support_T, query_T, least_gain=least))  # noqa: E731
    assert [of(1), of(20), of(21)] == [2, 2, 1]  # two tasks of ten rows of padding each


def test_the_first_cut_is_the_best_of_all_by_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gmeta.adaptation.blocks.MOST_RECTANGLES", 2)
    monkeypatch.setattr("gmeta.adaptation.blocks.PADDING_SHARE", 0.0)
    rng = random.Random(3)
    for _ in range(200):
        widest = rng.choice([(1, 30), (30, 1), (9, 9)])  # one side may be alike in all tasks
        sizes = [tuple(rng.randrange(width) + 1 for width in widest) for _ in range(12)]
        cuts = [
            padded_rows(ordered[:cut]) + padded_rows(ordered[cut:])
            for side in (0, 1)
            for ordered in [sorted(sizes, key=itemgetter(side))]
            for cut in range(1, len(sizes))
        ]
        groups = group_tasks(*np.array(sizes).T)
        found = sum(padded_rows([sizes[task] for task in group]) for group in groups)
        assert found <= min(padded_rows(sizes), *cuts)


def padded_rows(sizes: list[tuple[int, ...]]) -> int:
    return len(sizes) * sum(max(rows) for rows in zip(*sizes, strict=True))
