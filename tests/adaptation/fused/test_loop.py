"""The fused loop against the general one: where it serves, and that both give the same step."""

import pathlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gmeta.adaptation.adaptation_plan import AdaptationPlan, Path, TaskSize
from gmeta.adaptation.algorithms.maml import QueryLoss
from gmeta.adaptation.algorithms.registry import ALGORITHMS
from gmeta.adaptation.fused.fused_loop import MovingLoop, StillLoop
from gmeta.adaptation.fused.mlp import AdaptedMlp
from gmeta.adaptation.layout.padded_layout import PaddedTasks
from gmeta.adaptation.layout.sides import Sides, TaskGroups
from gmeta.config.algorithm import AlgorithmConfig, InnerPath
from gmeta.config.train_config import load_config
from gmeta.data.episodes import Episodes, collate_support_query
from gmeta.learner import MetaLearner
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from gmeta_models.mlp import DropoutReLU
from metaio.recipes.synthetic import SyntheticConfig, features
from tests.adaptation.fused.plain_mlp import PlainMlp
from tests.support import reference

MELU = ModelConfig(name="melu", embedding_dim=4, hidden=(6, 5), options={"bottom": (3,)})
FEATURES = reference.some_features(2, 2, 2, history=True)
OF_DECISION = [("*",), ("0",), ("2", "4"), ("4",)]
LAYERS = {
    model: [tuple(f"decision.{layer}" for layer in layers) for layers in OF_DECISION]
    for model in ("melu", "din", "cbml")
} | {
    "dcnv2": [
        tuple(f"deep.{layer}" for layer in ("*" if layers == ("*",) else layers))
        for layers in OF_DECISION
    ],
    "dlrm": [
        *(tuple(f"top.{layer}" for layer in layers) for layers in OF_DECISION),
        *[("*",), ("bottom.*",), ("bottom.0", "top.*"), ("bottom.2",), ("bottom.2", "top.4")],
    ],
}

HEADS = ("*", *(f"{mlp}.{layer}" for mlp in ("decision", "top", "deep") for layer in ("*", "4")))


def learner_of(
    algorithm: AlgorithmConfig, model: ModelConfig = MELU, loss: str = "bce"
) -> MetaLearner:
    torch.manual_seed(0)
    return build_learner(FEATURES, model, algorithm, loss).double()


@pytest.fixture(autouse=True, scope="module")
def _even_a_single_common_feature_stands_apart() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gmeta.data.collate.LEAST_COMMON_WORK", {"cpu": 1})
        yield


def batch_of(sizes: list[tuple[int, int]], num_common: int = 0) -> reference.TaskBatch:
    """Random tasks of these sizes, whose rows share their last single-id features."""
    rng = random.Random(0)
    tasks = [reference.random_task(FEATURES, *size, rng) for size in sizes]
    for task in tasks:
        own = len(FEATURES.single) - num_common
        for row in task.single:
            row[own:] = task.single[0][own:]
    return reference.batch_of(tasks, FEATURES)


def arranged_together(learner: MetaLearner, batch: reference.TaskBatch) -> Episodes:
    """Both sides of all tasks at once, to train on."""
    return collate_support_query(batch, rows_per_task=learner._config.adapt_embeddings)


def assert_same_step(
    learner: MetaLearner, rows_UD: Tensor, mine: Episodes, other: Episodes,
    wanted: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Equal losses and gradients of what is wanted: by itself, of the rows and all parameters."""
    wanted = [rows_UD, *learner.parameters()] if wanted is None else wanted
    losses = [learner(rows_UD, episodes, 1.0) for episodes in (mine, other)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-10)
    grads = [
        torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        for loss in losses
    ]
    # A rate that no support row reaches: unused in the one, zero in the other.
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


def drop_odd_units(rows: Tensor, share: float) -> Tensor:
    """Dropout whose draw does not depend on how rows are laid out."""
    return rows * (torch.arange(rows.shape[1]) % 2 == 0) / (1 - share)


def keep_units(learner: MetaLearner, kept: int) -> MetaLearner:
    for part in learner.model.modules():
        if isinstance(part, DropoutReLU):
            part.kept = kept
    return learner


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["maml", "fomaml", "anil", "metasgd"]),
    model_and_layers=st.sampled_from(
        [(model, layers) for model, choices in LAYERS.items() for layers in choices]
    ),
    interaction=st.sampled_from(["dot", "cat"]),
    steps=st.integers(1, 3),
    embeddings=st.booleans(),
    rates=st.sampled_from(["layer", "output"]),
    path=st.sampled_from(["low_rank", "materialised", "auto"]),
    loss=st.sampled_from(["bce", "mse", "huber", "mae"]),
    bias_rate=st.sampled_from([1.0, 0.0, 4.0]),
    num_common=st.integers(0, 2),
    kernel=st.sampled_from([AdaptedMlp, PlainMlp]),
    dropout=st.sampled_from([0.0, 0.4]),
    sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=9).filter(
        lambda sizes: any(support and query for support, query in sizes)
    ),
)
def test_the_fused_step_equals_the_general_one(
    name: str, model_and_layers: tuple[str, tuple[str, ...]], interaction: str, steps: int,
    embeddings: bool, rates: str, path: InnerPath, loss: str, bias_rate: float, num_common: int,
    kernel: type[AdaptedMlp], dropout: float, sizes: list[tuple[int, int]],
) -> None:  # fmt: skip
    (model, layers), embeddings = model_and_layers, embeddings and name != "anil"
    moves_inputs = embeddings or (name != "anil" and any("bottom" in x or x == "*" for x in layers))
    adapts_head = name == "anil" or layers[-1] in HEADS
    algorithm = AlgorithmConfig(
        name=name, inner_steps=steps, adapt_embeddings=embeddings,
        adapt_layers=("*",) if name == "anil" else layers, options={"learned_rates": rates},
        layer_paths=(f"*={path}",), support_prior=0.5,
        bias_rate=bias_rate if adapts_head else 1.0,
    )  # fmt: skip
    config = replace(
        MELU, name=model, options={**MELU.options, "history": "m0", "interaction": interaction},
        dropout=dropout,
    )  # fmt: skip
    learner = keep_units(learner_of(algorithm, config, loss), 2 * (steps > 1))
    batch = batch_of(sizes, num_common)
    fused, general = learner.collate(batch), arranged_together(learner, batch)
    assert isinstance(fused.rows, PaddedTasks)
    assert isinstance(general.rows, Sides)
    has_side_by_side = model in ("melu", "cbml") or (model, interaction) == ("dlrm", "cat")
    may_stand_apart = has_side_by_side and not moves_inputs
    assert (fused.rows.common is not None) >= (may_stand_apart and num_common > 0)
    assert (fused.rows.common is not None) <= may_stand_apart
    assert fused.num_terms == general.num_terms
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gmeta.adaptation.fused.fused_loop.AdaptedMlp", kernel)
        patch.setattr("torch.nn.functional.dropout", drop_odd_units)
        assert_same_step(learner, rows_UD, fused, general)


@pytest.mark.parametrize("name", ["maml", "reptile", "none"])
def test_training_alone_leaves_units_out_and_each_step_others(name: str) -> None:
    dropping, whole = (
        learner_of(AlgorithmConfig(name=name, inner_lr=0.1), replace(MELU, dropout=share))
        for share in (0.5, 0.0)
    )
    whole.load_state_dict(dropping.state_dict())
    batch = batch_of([(3, 3)] * 8)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    asked = dropping.collate_to_predict(batch)
    outputs = [each.predict(rows_UD, asked).after_N for each in (dropping, whole)]
    assert torch.equal(*outputs)
    episodes, weights = dropping.collate(batch), [dropping.model.decision[0].weight]
    grads = [torch.autograd.grad(dropping(rows_UD, episodes, 1.0), weights) for _ in range(2)]
    assert not torch.equal(grads[0][0], grads[1][0])
    dropping.eval()
    grads = [
        torch.autograd.grad(each(rows_UD, episodes, 1.0), [each.model.decision[0].weight])
        for each in (dropping, whole)
    ]
    assert torch.equal(grads[0][0], grads[1][0])


@pytest.mark.parametrize("adapts", [True, ("s1",)])
def test_a_table_left_out_is_zeros_to_the_model(adapts: bool | tuple[str, ...]) -> None:
    algorithm = AlgorithmConfig(name="maml", inner_lr=0.5, adapt_embeddings=adapts)
    learner = learner_of(algorithm, replace(MELU, without=("s0",)))
    batch = batch_of([(3, 3)] * 4)
    lengths = batch.unique_lengths_B.tolist()
    rows_UD = torch.randn(sum(lengths), 4, dtype=torch.float64, requires_grad=True)
    other_UD = rows_UD.detach().clone()
    other_UD[: lengths[0]] = torch.randn(lengths[0], 4, dtype=torch.float64)
    asked = learner.collate_to_predict(batch)
    before, after = (learner.predict(each, asked).after_N for each in (rows_UD, other_UD))
    assert torch.equal(before, after)
    (grads_UD,) = torch.autograd.grad(learner(rows_UD, learner.collate(batch), 1.0), [rows_UD])
    assert not grads_UD[: lengths[0]].any()
    assert grads_UD[lengths[0] :].any()
    # The same as a model whose table holds zeros, and whose rows do not adapt.
    frozen = replace(algorithm, adapt_embeddings=("s1", "m1") if adapts is True else adapts)
    plain, zeros_UD = learner_of(frozen), other_UD
    plain.load_state_dict(learner.state_dict())
    zeros_UD[: lengths[0]] = 0.0
    torch.testing.assert_close(plain.predict(zeros_UD, asked).after_N, after, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        (AlgorithmConfig(name="reptile"), MELU),
        (AlgorithmConfig(name="metasgd", options={"learned_rates": "weight"}), MELU),
        (
            AlgorithmConfig(name="maml"),
            replace(MELU, name="din", options={**MELU.options, "history": "m0"}),
        ),
        (
            AlgorithmConfig(
                name="metasgd",
                options={"learned_rates": "weight"},
                adapt_layers=("bottom.*",),
                adapt_embeddings=False,
            ),
            replace(MELU, name="dlrm"),
        ),
    ],
)
def test_what_the_fused_loop_cannot_do_goes_to_the_general_one(
    algorithm: AlgorithmConfig, model: ModelConfig
) -> None:
    assert isinstance(learner_of(algorithm, model).collate(batch_of([(3, 2)])).rows, TaskGroups)


@pytest.mark.parametrize("name", ["maml", "fomaml"])
def test_a_step_may_have_no_history_at_all(name: str) -> None:
    """As where all users of a small step are new."""
    din = replace(MELU, name="din", options={**MELU.options, "history": "m0"})
    algorithm = AlgorithmConfig(name=name, adapt_embeddings=False, adapt_layers=("decision.*",))
    learner = learner_of(algorithm, din)
    task = reference.random_task(FEATURES, 3, 2, random.Random(0))
    empty = replace(task, multi=[[[], *others] for _, *others in task.multi])
    batch = reference.batch_of([empty], FEATURES)
    fused, general = learner.collate(batch), arranged_together(learner, batch)
    assert isinstance(fused.rows, PaddedTasks)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    assert_same_step(learner, rows_UD, fused, general)


@pytest.mark.parametrize(("example", "loop"), [("demo", MovingLoop), ("movielens-1m", StillLoop)])
def test_the_examples_train_in_the_fused_loop_by_mamls_own_function(
    example: str, loop: type[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []
    query_loss = QueryLoss.__call__

    def noted(loss: QueryLoss, inner_loop: Any, *rest: Any) -> Tensor:
        taken.append(type(inner_loop))
        return query_loss(loss, inner_loop, *rest)

    monkeypatch.setattr(QueryLoss, "__call__", noted)
    config = load_config(pathlib.Path(__file__).parents[3] / "examples" / f"{example}.toml")
    recipe = SyntheticConfig()
    learner = build_learner(features(recipe), config.model, config.algorithm, config.outer.loss)
    tasks = [
        reference.random_task(
            features(recipe), rows - recipe.query_rows, recipe.query_rows, random.Random(rows)
        )
        for rows in (recipe.min_rows, recipe.max_rows)
    ]
    batch = reference.batch_of(tasks, features(recipe))
    rows_UD = torch.randn(batch.unique_ids_U.numel(), config.model.embedding_dim)
    learner(rows_UD, learner.collate(batch), 1.0)
    assert taken == [loop]


@pytest.mark.parametrize("name", ["maml", "fomaml"])
@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("frozen", ["bottom", "top"])
def test_layers_that_the_outer_loop_does_not_train_adapt_all_the_same(
    name: str, embeddings: bool, frozen: str
) -> None:
    algorithm = AlgorithmConfig(
        name=name, inner_steps=2, adapt_embeddings=embeddings, layer_paths=("*=low_rank",)
    )
    learner = learner_of(algorithm, replace(MELU, name="dlrm"))
    learner.model.get_submodule(frozen).requires_grad_(False)
    batch = batch_of([(3, 2), (1, 4)])
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    wanted = [rows_UD, *(p for p in learner.parameters() if p.requires_grad)]
    assert_same_step(
        learner, rows_UD, learner.collate(batch), arranged_together(learner, batch), wanted
    )


@pytest.mark.parametrize(
    ("model", "embeddings"), [("dlrm", True), ("dlrm", False), ("melu", False)]
)
def test_learned_rates_learn_in_first_order_too(
    model: str, embeddings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No algorithm of ours does so; one of a user's may."""
    first_order = replace(ALGORITHMS["metasgd"], loss_sum=QueryLoss(second_order=False))
    monkeypatch.setitem(ALGORITHMS, "first-order", first_order)
    algorithm = AlgorithmConfig(
        name="first-order", inner_steps=2, layer_paths=("*=low_rank",), adapt_embeddings=embeddings
    )
    learner = learner_of(algorithm, replace(MELU, name=model))
    batch = batch_of([(3, 2), (0, 1), (1, 4)])
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    mine = learner.collate(batch)
    assert isinstance(mine.rows, PaddedTasks)
    assert_same_step(learner, rows_UD, mine, arranged_together(learner, batch))


def test_each_layer_is_held_as_its_path_says(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[tuple[int, int], Path] = {}
    path_of = AdaptationPlan.path

    def noted(plan: AdaptationPlan, name: str, wide: int, out: int, size: TaskSize) -> Path:
        held[wide, out] = path_of(plan, name, wide, out, size)
        return held[wide, out]

    monkeypatch.setattr(AdaptationPlan, "path", noted)
    paths = ("*=low_rank", "*.2=materialised", "top.4=auto")
    learner = learner_of(AlgorithmConfig(layer_paths=paths), replace(MELU, name="dlrm"))
    batch = batch_of([(3, 2)])
    learner(torch.randn(batch.unique_ids_U.numel(), 4).double(), learner.collate(batch), 1.0)
    bottom = {(2, 3): "low_rank", (3, 4): "materialised"}
    assert held == bottom | {(14, 6): "low_rank", (6, 5): "materialised", (5, 1): "materialised"}


@pytest.mark.parametrize("name", ["maml", "fomaml", "metasgd"])
@pytest.mark.parametrize("embeddings", [True, False])
def test_tasks_of_one_batch_hold_changes_in_different_ways(
    name: str, embeddings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where some have many rows and others few, which these here are all too small for."""

    def by_size(*asked: object, uses: int = 1) -> Path:
        size = asked[-1]
        assert isinstance(size, TaskSize)
        return "low_rank" if size.support_rows < 4 else "materialised"

    monkeypatch.setattr(AdaptationPlan, "path", by_size)
    algorithm = AlgorithmConfig(name=name, inner_steps=3, adapt_embeddings=embeddings)
    learner = learner_of(algorithm, replace(MELU, name="dlrm"))
    batch = batch_of([(1, 2), (9, 2), (2, 9), (5, 1), (1, 1)])
    arranged = learner.collate(batch)
    assert isinstance(arranged.rows, PaddedTasks)
    assert len({mine.rows for mine in arranged.rows.support.rectangles}) > 2
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    assert_same_step(learner, rows_UD, arranged, arranged_together(learner, batch))


@pytest.mark.parametrize(
    ("rows", "steps", "width", "path", "held"),
    [
        (10, 1, (256, 64), "auto", "low_rank"), (400, 1, (256, 64), "auto", "materialised"),
        (10, 1, (64, 64), "auto", "low_rank"), (90, 3, (64, 1), "auto", "materialised"),
        (90, 3, (64, 1), "low_rank", "low_rank"), (1, 1, (256, 64), "materialised", "materialised"),
    ],
)  # fmt: skip
def test_a_change_is_held_in_the_cheaper_way_unless_the_config_says_how(
    rows: int, steps: int, width: tuple[int, int], path: InnerPath, held: str
) -> None:
    config = AlgorithmConfig(inner_steps=steps)
    plan = AdaptationPlan(config, layers={}, paths={"layer": path})
    assert plan.path("layer", *width, TaskSize(rows, rows)) == held


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    algorithm=st.sampled_from(
        [
            AlgorithmConfig(name="reptile"),
            AlgorithmConfig(name="maml", layer_paths=("*=materialised",), inner_steps=2),
            AlgorithmConfig(name="metasgd", options={"learned_rates": "weight"}),
            AlgorithmConfig(name="fomaml", layer_paths=("*=materialised",)),
        ]
    ),
    model=st.sampled_from(["melu", "cbml", "din"]),
    sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=9),
)
def test_groups_of_similar_tasks_give_the_step_of_all_tasks_together(
    algorithm: AlgorithmConfig, model: str, sizes: list[tuple[int, int]]
) -> None:
    learner = learner_of(
        algorithm, replace(MELU, name=model, options={**MELU.options, "history": "m0"})
    )
    learner.use_general_loop()
    batch = batch_of(sizes)
    grouped, together = learner.collate(batch), arranged_together(learner, batch)
    assert isinstance(grouped.rows, TaskGroups)
    assert isinstance(together.rows, Sides)
    together = replace(together, num_terms=grouped.num_terms)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64, requires_grad=True)
    assert_same_step(learner, rows_UD, grouped, together)


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        (AlgorithmConfig(name="maml", layer_paths=("*=low_rank",)), "melu"),
        (AlgorithmConfig(name="maml", adapt_embeddings=False, inner_steps=2), "melu"),
        (AlgorithmConfig(name="fomaml", adapt_embeddings=False), "melu"),
        (
            AlgorithmConfig(
                name="metasgd", adapt_embeddings=False, layer_paths=("*=materialised",)
            ),
            "melu",
        ),
        (AlgorithmConfig(name="metasgd", layer_paths=("*=low_rank",)), "melu"),
        (AlgorithmConfig(name="maml", layer_paths=("*=low_rank",), inner_steps=2), "dlrm"),
        (AlgorithmConfig(name="maml", layer_paths=("*=materialised",), inner_steps=2), "dlrm"),
        (AlgorithmConfig(name="metasgd", layer_paths=("*=materialised",), inner_steps=2), "dlrm"),
    ],
)
@pytest.mark.parametrize("num_common", [0, 1])
def test_autocast_computes_the_fused_step_in_bfloat16(
    algorithm: AlgorithmConfig, model: str, num_common: int
) -> None:
    learner = learner_of(algorithm, replace(MELU, name=model)).float()
    batch = batch_of([(3, 2), (2, 4)], num_common)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, requires_grad=True)
    exact = learner(rows_UD, learner.collate(batch), 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = learner(rows_UD, learner.collate(batch), 1.0)
    rough.backward()
    assert 0 < abs(rough.item() - exact.item()) < 0.02 * abs(exact.item())
    assert all(parameter.grad is not None for parameter in learner.parameters())
