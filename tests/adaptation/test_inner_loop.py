"""Every algorithm, all tasks at once, against a loop over tasks with explicit weights; float64."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from gmeta.adaptation.adaptation_plan import AdaptationPlan, Path, resolve_paths
from gmeta.adaptation.algorithms.algorithm import TableSizes
from gmeta.adaptation.plain_update import PlainUpdate, step_update
from gmeta.config.algorithm import AlgorithmConfig, InnerPath, LearnedRates
from gmeta.errors import ConfigError
from gmeta.learner import MetaLearner
from gmeta.runs.build import build_learner, measure_inputs
from gmeta_models import InputSizes, ModelConfig, RowInputs, build_model
from metaio.read.batch import TaskBatch
from tests.adaptation.agreement import HEADS, assert_equals_loop
from tests.support import reference
from tests.support.refusals import catch_message

# Those that the loop knows; a test of its own holds any other to one of these.
ALGORITHMS = ("maml", "fomaml", "anil", "reptile", "metasgd", "none")


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=5).filter(
        lambda sizes: any(support for support, _ in sizes) and any(query for _, query in sizes)
    ),
    columns=st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 2)),
    model=st.sampled_from(sorted(HEADS)),
    name=st.sampled_from(ALGORITHMS),
    steps=st.integers(1, 3),
    embeddings=st.sampled_from([False, True, "one table"]),
    pooling=st.sampled_from(["mean", "sum"]),
    interaction=st.sampled_from(["dot", "cat"]),
    loss=st.sampled_from(["bce", "mse", "huber", "mae"]),
    prior=st.sampled_from([0.0, 2.5]),
    seed=st.integers(0, 10_000),
    shared_table=st.booleans(),
    path=st.sampled_from(["auto", "low_rank", "materialised"]),
    rates=st.sampled_from(["layer", "output", "weight"]),
    bias_rate=st.sampled_from([1.0, 0.0, 4.0]),
)
def test_any_shape_gives_the_loss_and_gradients_of_the_loop(
    sizes: list[tuple[int, int]], columns: tuple[int, int, int], model: str, name: str,
    steps: int, embeddings: bool | str, pooling: str, interaction: str, loss: str, prior: float,
    seed: int, shared_table: bool, path: InnerPath, rates: LearnedRates, bias_rate: float,
) -> None:  # fmt: skip
    if model == "din":
        columns = (columns[0], max(columns[1], 1), columns[2])
    if model == "dlrm" and columns == (1, 0, 0):
        columns = (2, 0, 0)  # a single vector has no pair for dot products
    config = ModelConfig(
        name=model,
        embedding_dim=4,
        hidden=(5, 3),
        options={
            "bottom": (3,), "interaction": interaction, "clusters": 3, "history": "m0",
            "attention": (6,), "cross_layers": 2, "cross_rank": 2 if interaction == "cat" else 0,
            "structure": "parallel" if interaction == "cat" else "stacked", "experts": 2,
            "own_experts": 1, "expert": (4,),
        },
        pooling=pooling,
    )  # fmt: skip
    one_table = ("shared" if shared_table and model != "din" else "s0",)
    algorithm = AlgorithmConfig(
        name=name, inner_steps=steps, inner_lr=0.05, support_prior=prior,
        adapt_embeddings=one_table if embeddings == "one table" else bool(embeddings),
        options={"learned_rates": rates},
        layer_paths=("*=" + ("auto" if rates == "weight" else path),),
        bias_rate=1.0 if name == "reptile" else bias_rate,
    )  # fmt: skip
    assert_equals_loop(sizes, columns, config, algorithm, loss, seed, shared_table)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("sizes", [[(0, 1)], [(0, 3), (0, 1)], [(2, 0), (0, 2)], [(1, 1)]])
def test_tasks_may_lack_support_or_query_rows(name: str, sizes: list[tuple[int, int]]) -> None:
    if name == "reptile" and not any(support for support, _ in sizes):
        pytest.skip("no support row: Reptile has no term at all")
    config = ModelConfig(name="dlrm", embedding_dim=4, hidden=(5, 3), options={"bottom": (3,)})
    assert_equals_loop(
        sizes, (2, 1, 2), config, AlgorithmConfig(name=name, inner_steps=2), "bce", seed=2
    )


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("sizes", [[], [(0, 0)], [(0, 2)], [(2, 0)]])
def test_a_rank_with_nothing_to_learn_from_still_reaches_every_parameter(
    name: str, sizes: list[tuple[int, int]]
) -> None:
    features = reference.some_features(2, 1, 1)
    tasks = [reference.random_task(features, *size, random.Random(0)) for size in sizes]
    config = ModelConfig(name="dlrm", embedding_dim=4, hidden=(5,), options={"bottom": (3,)})
    model = build_model(config, measure_inputs(features))
    learner = MetaLearner(model, AlgorithmConfig(name=name), "bce", TableSizes(3, 4))
    batch = reference.batch_of(tasks, features)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, requires_grad=True)
    loss = learner(rows_UD, learner.collate(batch), weight=1.0)
    grads = torch.autograd.grad(loss, [rows_UD, *learner.parameters()], allow_unused=True)
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads)


@pytest.mark.parametrize("patterns", [("top.*",), ("bottom.0", "top.2"), ()])
@pytest.mark.parametrize("name", ["maml", "fomaml", "reptile", "metasgd"])
def test_only_the_named_layers_adapt(name: str, patterns: tuple[str, ...]) -> None:
    algorithm = AlgorithmConfig(name=name, inner_steps=2, adapt_layers=patterns)
    config = ModelConfig(name="dlrm", embedding_dim=4, hidden=(5,), options={"bottom": (3,)})
    assert_equals_loop([(3, 2), (1, 4)], (2, 1, 2), config, algorithm, "bce", seed=1)


def test_support_rows_of_doubt_shrink_the_inner_step() -> None:
    """3 rows under a prior of 3 move as far as 3 rows at half the rate."""
    config = ModelConfig(name="melu", embedding_dim=4, hidden=(5,))
    features = reference.some_features(2, 1, 0)
    batch = reference.batch_of([reference.random_task(features, 3, 4, random.Random(0))], features)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64)
    after = []
    for prior, rate in ((3.0, 0.2), (0.0, 0.1)):
        torch.manual_seed(0)
        model = build_model(config, measure_inputs(features)).to(torch.float64)
        algorithm = AlgorithmConfig(inner_lr=rate, support_prior=prior)
        learner = MetaLearner(model, algorithm, "mse")
        prediction = learner.predict(rows_UD, learner.collate_to_predict(batch))
        after.append(prediction.after_N)
        assert not torch.equal(prediction.after_N, prediction.before_N)
    torch.testing.assert_close(after[0], after[1], rtol=1e-12, atol=0)


def refusal(algorithm: AlgorithmConfig) -> str:
    """What a MeLU with two layers answers to this algorithm."""
    model = build_model(ModelConfig(name="melu", embedding_dim=4, hidden=(5,)), InputSizes(1, 0, 0))
    return catch_message(ValueError, MetaLearner, model, algorithm, "bce")


def test_a_pattern_that_matches_no_layer_is_refused_with_the_layers_there_are() -> None:
    assert refusal(AlgorithmConfig(adapt_layers=("fc*",))) == (
        "algorithm.adapt_layers: 'fc*' matches no layer; this model has decision.0, decision.2. "
        'Name some of them, "*" for all, or none at all: []'
    )


def test_nothing_to_adapt_is_refused() -> None:
    assert refusal(AlgorithmConfig(adapt_layers=(), adapt_embeddings=False)) == (
        "algorithm.adapt_layers = [] and algorithm.adapt_embeddings = false: nothing would adapt. "
        'Set one of them, or algorithm.name = "none" with any of them for the plain baseline'
    )


def test_a_table_to_adapt_that_there_is_not_is_refused_with_those_there_are() -> None:
    features = reference.some_features(2, 1, 0)
    algorithm = AlgorithmConfig(adapt_embeddings=("s1", "itme"))
    with pytest.raises(ValueError) as caught:
        build_learner(features, ModelConfig(name="melu", embedding_dim=4), algorithm, "bce")
    assert str(caught.value) == (
        "algorithm.adapt_embeddings names 'itme', which is no table of the dataset: it has "
        "s0, s1, m0. Name some of them, or set true for all"
    )


def test_an_unknown_algorithm_lists_the_known_ones() -> None:
    assert refusal(AlgorithmConfig(name="mamll")) == (
        "algorithm.name = 'mamll' is unknown: known are anil, encoder, encoder_maml, fomaml, maml, "
        "metaemb, metasgd, none, reptile, ridge. Did you mean 'maml'? Choose one of them, or name "
        "yours as package.module:Name (docs/extending.md)"
    )


def test_anil_refuses_other_layers_than_the_head() -> None:
    assert refusal(AlgorithmConfig(name="anil", adapt_layers=("decision.0",))) == (
        "algorithm.adapt_layers = ['decision.0'] with algorithm.name = \"anil\": "
        "ANIL adapts the head alone, here 'decision.2'. "
        'Leave adapt_layers out, or set algorithm.name = "maml"'
    )


def test_learned_rates_of_rows_need_to_know_the_tables() -> None:
    assert refusal(AlgorithmConfig(name="metasgd")) == (
        'algorithm.name = "metasgd" with adapt_embeddings = true, and 0 tables to learn rates for: '
        "tell the learner their TableSizes, as gmeta.runs.build.build_learner does"
    )


@pytest.mark.parametrize("path", ["*=low_rank", "decision.2=low_rank"])
def test_a_rate_for_each_weight_refuses_the_low_rank_path(path: str) -> None:
    options = {"learned_rates": "weight"}
    config = AlgorithmConfig(name="metasgd", layer_paths=(path,), options=options)
    assert refusal(config) == (
        'algorithm.layer_paths says "low_rank" with algorithm.options.learned_rates = "weight": a '
        "rate for each weight leaves a change no low rank. Leave it out, or set learned_rates = "
        '"layer" or "output"'
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["maml", "fomaml", "reptile", "metasgd"]),
    model=st.sampled_from(sorted(HEADS)),
    entries=st.lists(
        st.sampled_from(["*.0=materialised", "*.2=low_rank", "*.4=materialised", "*=auto"]),
        max_size=3,
    ),
    path=st.sampled_from(["auto", "low_rank", "materialised"]),
    embeddings=st.booleans(),
)
def test_each_layer_may_have_a_path_of_its_own(
    name: str, model: str, entries: list[str], path: InnerPath, embeddings: bool
) -> None:
    config = ModelConfig(
        name=model, embedding_dim=4, hidden=(5, 3), options={"history": "m0", "attention": (6,)}
    )
    algorithm = AlgorithmConfig(
        name=name, inner_steps=2, layer_paths=(f"*={path}", *entries), adapt_embeddings=embeddings
    )
    assert_equals_loop([(3, 2), (0, 1), (1, 4)], (2, 1, 1), config, algorithm, "bce", seed=3)


def test_layers_are_held_as_their_paths_say(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[str, int]] = []

    def noted(path: Path, *step: Any) -> PlainUpdate:
        change = step_update(path, *step)
        grads_TSO = step[1]
        held.append((type(change).__name__, grads_TSO.shape[-1]))
        return change

    monkeypatch.setattr("gmeta.adaptation.adapted_layers.step_update", noted)
    monkeypatch.setattr(AdaptationPlan, "route", lambda *_: "general")
    config = ModelConfig(name="dlrm", embedding_dim=4, hidden=(5, 3))
    paths = ("*=low_rank", "top.2=materialised")
    algorithm = AlgorithmConfig(name="maml", layer_paths=paths)
    assert_equals_loop([(3, 2), (2, 4)], (2, 0, 0), config, algorithm, "bce", seed=0)
    assert set(held) == {("LowRankUpdate", 5), ("MaterialisedUpdate", 3), ("LowRankUpdate", 1)}


def test_the_later_entry_that_matches_a_layer_says_its_path() -> None:
    entries = ("decision.*=low_rank", "*.2=materialised", "decision.4=auto")
    config = AlgorithmConfig(layer_paths=entries)
    layers = ["attention.0", "decision.0", "decision.2", "decision.4"]
    paths = ["auto", "low_rank", "materialised", "auto"]
    assert resolve_paths(config, layers) == dict(zip(layers, paths, strict=True))


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (
            "decision.1=low_rank",
            "algorithm.layer_paths: 'decision.1' matches no layer that adapts; those are "
            "decision.0, decision.2. Name one of them, or remove the entry",
        ),
        (
            "decision.0=lowrank",
            "algorithm.layer_paths has 'decision.0=lowrank': write layer=path with one of the "
            "paths auto, low_rank, materialised",
        ),
    ],
)
def test_a_path_of_no_layer_and_no_path_of_a_layer_are_refused(entry: str, complaint: str) -> None:
    assert refusal(AlgorithmConfig(layer_paths=(entry,))) == complaint


class OverTasks(nn.Module):
    """One layer that does not work on rows: on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, inputs: RowInputs) -> Tensor:
        mean = inputs.single_NFD.mean(dim=(0, 1, 2)).reshape(1, 1)
        return self.layer(mean).expand(inputs.num_rows, 1).squeeze(1)


def one_task() -> tuple[TaskBatch, Tensor]:
    features = reference.some_features(1, 0, 0)
    batch = reference.batch_of([reference.random_task(features, 2, 2, random.Random(0))], features)
    return batch, torch.randn(batch.unique_ids_U.numel(), 4)


def test_a_layer_that_works_on_no_rows_is_refused_by_name() -> None:
    learner = MetaLearner(OverTasks(), AlgorithmConfig(name="maml"), "bce")
    batch, rows_UD = one_task()
    assert catch_message(ConfigError, learner, rows_UD, learner.collate(batch), 1.0) == (
        "layer 'layer' works on 1 rows, the tasks have 2: only layers applied row by row can "
        "adapt. Leave it out of algorithm.adapt_layers"
    )


class TwoLayers(nn.Module):
    """Two layers; `how` is what it does with the first."""

    def __init__(self, how: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.how, self.pooling = how, "mean"
        self.below, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, inputs: RowInputs) -> Tensor:
        return self.head(self.how(self.below, inputs.single_NFD[:, 0])).squeeze(1)


WAYS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "weight read": lambda layer, rows: functional.linear(rows, layer.weight, layer.bias),
    "by keyword": lambda layer, rows: layer(input=rows),
    "not at all": lambda layer, rows: rows,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["maml", "reptile", "ridge", "none", "encoder", "encoder_maml"])
def test_a_layer_that_is_not_called_cannot_adapt_and_is_refused(way: str, name: str) -> None:
    features = reference.some_features(1, 0, 0)
    tables = TableSizes(1, 4, ("s0",), InputSizes(1, 0, 0))
    config = AlgorithmConfig(name=name, options={"encoder_hidden": (3,)})
    learner = MetaLearner(TwoLayers(WAYS[way]), config, "bce", tables)
    tasks = [reference.random_task(features, *of, random.Random(0)) for of in ((2, 2), (0, 1))]
    batch = reference.batch_of(tasks, features)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4)
    runs = {
        "train": lambda: learner(rows_UD, learner.collate(batch), 1.0),
        "predict": lambda: learner.predict(rows_UD, learner.collate_to_predict(batch)),
    }
    if name == "none":  # adapts in evaluation alone
        del runs["train"]
    for run in runs.values():
        assert catch_message(ConfigError, run) == (
            "layer 'below' is not called as layer(x): only layers called so can adapt, and none "
            "whose weight is read alone. Call it so in the model, or leave it out of "
            "algorithm.adapt_layers"
        )
    if name not in ("encoder", "encoder_maml"):
        of_head = replace(config, adapt_layers=("head",))
        learner = MetaLearner(TwoLayers(WAYS[way]), of_head, "bce", tables)
        for run in runs.values():
            run()


def test_what_torchs_attention_reads_of_a_layer_does_not_adapt() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, 1)

        def forward(self, inputs: RowInputs) -> Tensor:
            seen, _ = self.attention(*[inputs.single_NFD.transpose(0, 1)] * 3)
            return self.head(seen[0]).squeeze(1)

    learner = MetaLearner(Attending(), AlgorithmConfig(name="maml"), "bce")
    batch, rows_UD = one_task()
    with pytest.raises(ConfigError, match=r"^layer 'attention.out_proj' is not called as layer"):
        learner(rows_UD, learner.collate(batch), 1.0)


def test_the_last_bias_has_a_rate_of_its_own_only_where_it_adapts() -> None:
    model = build_model(
        ModelConfig(name="melu", embedding_dim=4, hidden=(5, 3)), InputSizes(1, 0, 0)
    )
    config = AlgorithmConfig(adapt_layers=("decision.0", "decision.2"), bias_rate=5.0)
    assert catch_message(ValueError, MetaLearner, model, config, "mse") == (
        "algorithm.bias_rate = 5.0, but the last layer, decision.4, does not adapt. Add it to "
        "algorithm.adapt_layers, or leave bias_rate at 1"
    )
    with pytest.raises(ValueError) as raised:
        MetaLearner(model, AlgorithmConfig("reptile", bias_rate=5.0), "mse")
    assert str(raised.value) == (
        'algorithm.bias_rate = 5.0 with algorithm.name = "reptile": Reptile takes one rate for all '
        'that adapts. Leave bias_rate out, or set algorithm.name = "maml" or "fomaml"'
    )


@pytest.mark.parametrize("model", ["dlrm", "cbml"])  # cbml: gates from the support rows
@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(name="maml", support_prior=2.0, bias_rate=3.0),
        AlgorithmConfig(name="maml", adapt_embeddings=("s1",)), AlgorithmConfig(name="anil"),
        AlgorithmConfig(name="ridge"), AlgorithmConfig(name="encoder_maml"),
        AlgorithmConfig(name="none"),
    ],
    ids=lambda config: config.name,
)  # fmt: skip
def test_predictions_on_the_way_are_of_as_few_steps(model: str, algorithm: AlgorithmConfig) -> None:
    rng = random.Random(7)
    features = reference.some_features(2, 1, 2)
    tasks = [reference.random_task(features, *size, rng) for size in ((5, 3), (0, 2), (1, 4))]
    batch = reference.batch_of(tasks, features)
    widths = ModelConfig(name=model, embedding_dim=4, hidden=(6,), options={"bottom": (4,)})
    rows_UD = torch.randn(len(batch.unique_ids_U), 4, dtype=torch.float64)

    def learner_of(steps: int) -> MetaLearner:
        torch.manual_seed(3)
        config = replace(algorithm, inner_lr=0.3, inner_steps=steps)
        return build_learner(features, widths, config, "bce").to(torch.float64)

    longest = learner_of(7)
    found = longest.predict_along(rows_UD, longest.collate_to_predict(batch), (1, 2, 4, 7))
    for steps, along in zip((1, 2, 4, 7), found, strict=True):
        alone = learner_of(steps)
        wanted = alone.predict(rows_UD, alone.collate_to_predict(batch))
        for name in ("before_N", "after_N", "label_N"):
            pair = getattr(along, name), getattr(wanted, name)
            torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-10)
    assert not torch.equal(found[0].after_N, found[1].after_N)
