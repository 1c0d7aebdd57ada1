"""Forward-only adaptation against its equations, task by task with explicit weights; float64."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from gmeta.adaptation.algorithms.algorithm import TableSizes
from gmeta.config.algorithm import AlgorithmConfig, EncoderOptions
from gmeta.learner import MetaLearner
from gmeta.losses.row_losses import LossFunction, row_losses_N
from gmeta.runs.build import build_learner
from gmeta_models import InputSizes, ModelConfig, build_model
from gmeta_models.support_encoder import SupportEncoder, SupportRows
from metaio.format.features import Features
from tests.support import reference
from tests.support.refusals import catch_message

Weights = dict[str, Tensor]
Tables = dict[str, Tensor]
MODEL = ModelConfig(
    name="melu",
    embedding_dim=4,
    hidden=(5, 3),
    options={
        "bottom": (3,), "clusters": 3, "history": "m0", "structure": "parallel",
        "cross_layers": 1,
    },
)  # fmt: skip
FORWARD = AlgorithmConfig(name="encoder", options={"encoder_hidden": (6, 3), "cold_weight": 0.3})


def encoded(
    encoder: SupportEncoder, rows: list[Tensor], config: AlgorithmConfig
) -> dict[str, tuple[Tensor, Tensor]]:
    """Scale and shift of each layer for one task: the docstring's equations, a row at a time."""
    parameters = dict(encoder.named_parameters())
    options = config.options_of(EncoderOptions)
    width = options.encoder_hidden[-1]
    codes = []
    for row in rows:
        code = row
        for layer in range(len(options.encoder_hidden)):
            weight, bias = (
                parameters[f"rows.{2 * layer}.weight"],
                parameters[f"rows.{2 * layer}.bias"],
            )
            code = weight @ code + bias
            if layer + 1 < len(options.encoder_hidden):
                code = code.clamp(min=0.0)
        codes.append(code)
    counts = [torch.tensor(1.0 / len(rows), dtype=torch.float64) for _ in rows]
    if options.encoder_pooling == "attention" and rows:
        scores = torch.stack([parameters["attention.weight"][0] @ code for code in codes])
        counts = list(torch.exp(scores) / torch.exp(scores).sum())
    mean = torch.zeros(width, dtype=torch.float64)
    for count, code in zip(counts, codes, strict=True):
        mean = mean + count * code * len(rows) / (len(rows) + config.support_prior)
    known = torch.cat([mean, torch.tensor([len(rows) + 1.0], dtype=torch.float64).log()])
    task = torch.tanh(parameters["task.weight"] @ known + parameters["task.bias"])
    made = parameters["modulations.weight"] @ task + parameters["modulations.bias"]
    widths = [*encoder._outputs.values()]
    found, start = {}, 0
    for name, size in zip(encoder._outputs, widths, strict=True):
        scale = 2 / (1 + torch.exp(-made[start : start + size]))
        shift = torch.zeros(size, dtype=torch.float64)
        if options.encoder_modulation == "film":
            shift = made[sum(widths) + start : sum(widths) + start + size]
        found[name] = scale, shift
        start += size
    return found


def modulated(weights: Weights, by: dict[str, tuple[Tensor, Tensor]]) -> Weights:
    """The weights of one task: diag(scale) W and scale * b + shift."""
    weights = dict(weights)
    for name, (scale, shift) in by.items():
        weights[f"{name}.weight"] = scale[:, None] * weights[f"{name}.weight"]
        weights[f"{name}.bias"] = scale * weights[f"{name}.bias"] + shift
    return weights


def start_of(
    learner: MetaLearner, tables: Tables, features: Features, task: reference.Task,
    config: AlgorithmConfig, loss: str,
) -> Weights:  # fmt: skip
    """The weights that the encoder gives to a task with its support rows."""
    model, encoder = learner.model, learner.encoder
    assert encoder is not None
    nothing = replace(task, num_support=0)
    cold, _ = reference.start_of(model, tables, features, nothing)
    cold = modulated(cold, encoded(encoder, [], config))
    if not task.num_support:
        return cold
    support = reference.rows_inputs(task, features, tables, range(task.num_support))
    output = functional_call(model, cold, (support,))
    predicted = 1 / (1 + torch.exp(-output)) if loss == "bce" else output
    label = torch.tensor(task.label[: task.num_support], dtype=torch.float64)
    seen = support.pooled(model.pooling).side_by_side_NX()
    rows = [
        torch.cat([x, (y - p) * x, y[None], (y - p)[None]])
        for x, y, p in zip(seen, label, predicted, strict=True)
    ]
    weights, _ = reference.start_of(model, tables, features, task)
    return modulated(weights, encoded(encoder, rows, config))


def slow_loss(
    learner: MetaLearner, tables: Tables, features: Features, tasks: list[reference.Task],
    config: AlgorithmConfig, loss: str,
) -> Tensor:  # fmt: skip
    terms = []
    for task in tasks:
        query = range(task.num_support, len(task.label))
        if not query:
            continue
        label = torch.tensor(task.label, dtype=torch.float64)[task.num_support :]
        inputs = reference.rows_inputs(task, features, tables, query)
        losses = []
        for known in (task, replace(task, num_support=0)):
            weights = start_of(learner, tables, features, known, config, loss)
            output = functional_call(learner.model, weights, (inputs,))
            losses.append(row_losses_N(LossFunction(loss), output, label).mean())
        warm, cold = losses
        share = config.options["cold_weight"]
        terms.append((1 - share) * warm + share * cold)
    return torch.stack(terms).mean()


def drawn(
    learner: MetaLearner, features: Features, seed: int = 0
) -> tuple[Tables, list[nn.Parameter]]:
    """Tables, and all parameters of the learner, of random values: no gate is at its start."""
    torch.manual_seed(seed)
    for parameter in learner.parameters():
        parameter.data.normal_(std=0.5)
    tables = {
        table.name: torch.randn(table.num_rows, 4, dtype=torch.float64, requires_grad=True)
        for table in features.tables
    }
    return tables, list(learner.parameters())


def fetched(batch: Any, tables: Tables) -> Tensor:
    ids = batch.unique_ids_U.split(batch.unique_lengths_B.tolist())
    return torch.cat([table[mine] for table, mine in zip(tables.values(), ids, strict=True)])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4).filter(
        lambda sizes: any(query for _, query in sizes)
    ),
    columns=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 2)),
    model=st.sampled_from(["melu", "dlrm", "cbml", "din", "dcnv2"]),
    bags=st.sampled_from(["mean", "sum"]),
    pooling=st.sampled_from(["mean", "attention"]),
    modulation=st.sampled_from(["film", "gate"]),
    prior=st.sampled_from([0.0, 2.5]),
    loss=st.sampled_from(["bce", "mse", "huber", "mae"]),
    layers=st.sampled_from([("*",), ("*.0",)]),
    seed=st.integers(0, 1000),
)
def test_any_shape_gives_the_loss_and_gradients_of_the_equations(
    sizes: list[tuple[int, int]], columns: tuple[int, int, int], model: str, bags: Any,
    pooling: Any, modulation: Any, prior: float, loss: str, layers: tuple[str, ...], seed: int,
) -> None:  # fmt: skip
    rng = random.Random(seed)
    config = replace(
        FORWARD,
        options={**FORWARD.options, "encoder_pooling": pooling, "encoder_modulation": modulation},
        support_prior=prior,
        adapt_layers=layers,
    )
    features = reference.some_features(*columns, history=model == "din")
    tasks = [reference.random_task(features, *size, rng) for size in sizes]
    chosen = replace(MODEL, name=model, pooling=bags)
    learner = build_learner(features, chosen, config, loss).double()
    tables, parameters = drawn(learner, features, seed)
    expected = slow_loss(learner, tables, features, tasks, config, loss)
    wanted = [*parameters, *tables.values()]
    expected_grads = torch.autograd.grad(expected, wanted, allow_unused=True)
    batch = reference.batch_of(tasks, features)
    episodes = learner.collate(batch)
    actual = learner(fetched(batch, tables), episodes, weight=1 / episodes.num_terms)
    actual_grads = torch.autograd.grad(actual, wanted, allow_unused=True)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    for parameter, ours, theirs in zip(wanted, actual_grads, expected_grads, strict=True):
        zero = torch.zeros_like(parameter)
        torch.testing.assert_close(
            zero if ours is None else ours,
            zero if theirs is None else theirs,
            rtol=1e-9,
            atol=1e-10,
        )


def one_learner(
    config: AlgorithmConfig = FORWARD, loss: str = "bce"
) -> tuple[MetaLearner, Features, Tables]:
    features = reference.some_features(2, 1, 1)
    learner = build_learner(features, MODEL, config, loss).double()
    tables, _ = drawn(learner, features)
    return learner, features, tables


@pytest.mark.parametrize("name", ["encoder", "encoder_maml"])
def test_predictions_are_those_of_no_support_and_of_the_tasks_own(name: str) -> None:
    config = replace(FORWARD, name=name, inner_steps=2, inner_lr=0.1, adapt_embeddings=True)
    learner, features, tables = one_learner(config)
    rng = random.Random(1)
    tasks = [reference.random_task(features, support, 3, rng) for support in (4, 0, 2)]
    batch = reference.batch_of(tasks, features)
    shown = learner.predict(fetched(batch, tables), learner.collate_to_predict(batch))
    for index, task in enumerate(tasks):
        query = range(task.num_support, len(task.label))
        for known, found in ((replace(task, num_support=0), shown.before_N), (task, shown.after_N)):
            weights = start_of(learner, tables, features, known, config, "bce")
            own = dict(tables)
            if name == "encoder_maml" and known.num_support:
                weights, own = stepped(learner, weights, tables, features, task, config)
            inputs = reference.rows_inputs(task, features, own, query)
            output = functional_call(learner.model, weights, (inputs,))
            torch.testing.assert_close(found.split(3)[index], output.detach(), rtol=0, atol=1e-10)


def stepped(
    learner: MetaLearner, weights: Weights, tables: Tables, features: Features,
    task: reference.Task, config: AlgorithmConfig,
) -> tuple[Weights, Tables]:  # fmt: skip
    """MAML's steps from these weights on, every adapted value written out."""
    tables = {name: table.clone() for name, table in tables.items()}
    label = torch.tensor(task.label, dtype=torch.float64)[: task.num_support]
    for _ in range(config.inner_steps):
        inputs = reference.rows_inputs(task, features, tables, range(task.num_support))
        losses = row_losses_N(
            LossFunction("bce"), functional_call(learner.model, weights, (inputs,)), label
        )
        now = weights | tables if config.adapt_embeddings else weights
        grads = torch.autograd.grad(losses.mean(), list(now.values()), create_graph=True)
        steps = zip(now.items(), grads, strict=True)
        now = {name: value - config.inner_lr * grad for (name, value), grad in steps}
        weights = {name: now[name] for name in weights}
        tables = {name: now.get(name, table) for name, table in tables.items()}
    return weights, tables


@pytest.mark.parametrize("rows_adapt", [False, True])
def test_inner_steps_start_from_the_encoders_weights(rows_adapt: bool) -> None:
    config = replace(
        FORWARD, name="encoder_maml", inner_steps=2, inner_lr=0.1,
        options={**FORWARD.options, "cold_weight": 0.0}, adapt_embeddings=rows_adapt,
    )  # fmt: skip
    learner, features, tables = one_learner(config)
    tasks = [reference.random_task(features, *size, random.Random(3)) for size in ((3, 2), (2, 4))]
    terms = []
    for task in tasks:
        weights = start_of(learner, tables, features, task, config, "bce")
        weights, own = stepped(learner, weights, tables, features, task, config)
        query = range(task.num_support, len(task.label))
        inputs = reference.rows_inputs(task, features, own, query)
        label = torch.tensor(task.label, dtype=torch.float64)[task.num_support :]
        losses = row_losses_N(
            LossFunction("bce"), functional_call(learner.model, weights, (inputs,)), label
        )
        terms.append(losses.mean())
    expected = torch.stack(terms).mean()
    batch = reference.batch_of(tasks, features)
    actual = learner(fetched(batch, tables), learner.collate(batch), weight=1 / len(tasks))
    wanted = [*learner.parameters(), *tables.values()]
    ours = torch.autograd.grad(actual, wanted, allow_unused=True)
    theirs = torch.autograd.grad(expected, wanted, allow_unused=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)


def test_the_order_of_support_rows_does_not_matter_and_their_labels_do() -> None:
    learner, features, tables = one_learner(
        replace(FORWARD, options={**FORWARD.options, "encoder_pooling": "attention"})
    )
    task = reference.random_task(features, 4, 3, random.Random(0))

    def swapped(values: list[Any]) -> list[Any]:
        return [*values[3::-1], *values[4:]]

    turned = reference.Task(*map(swapped, (task.single, task.multi, task.dense, task.label)), 4)
    relabelled = replace(task, label=[1 - y for y in task.label[:4]] + task.label[4:])
    after = []
    for each in (task, turned, relabelled):
        batch = reference.batch_of([each], features)
        shown = learner.predict(fetched(batch, tables), learner.collate_to_predict(batch))
        after.append(shown.after_N)
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=1e-12)
    assert not torch.allclose(after[0], after[2])


def test_attention_over_large_scores_stays_finite() -> None:
    encoder = SupportEncoder(3, (4,), {"a": 2}, attention=True, shifts=True, prior=0.0)
    for parameter in encoder.parameters():
        parameter.data.fill_(100.0)
    assert encoder.attention is not None
    score_N1 = encoder.attention(encoder.rows(torch.full((2, 8), 50.0)))
    assert bool(score_N1.exp().isinf().all())
    support = SupportRows(
        torch.full((2, 3), 50.0), torch.full((2,), 50.0), torch.full((2,), 50.0), torch.tensor([2])
    )
    (gate_TJO,) = encoder(support).values()
    assert bool(gate_TJO.isfinite().all())


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_bf16_products_leave_the_loss_close_and_gradients_finite(pooling: Any) -> None:
    config = replace(FORWARD, options={**FORWARD.options, "encoder_pooling": pooling})
    features = reference.some_features(2, 1, 1)
    torch.manual_seed(0)
    learner = build_learner(features, MODEL, config, "bce")
    for parameter in learner.parameters():
        parameter.data.normal_(std=0.3)
    tasks = [reference.random_task(features, size, 3, random.Random(0)) for size in (4, 0, 2)]
    batch = reference.batch_of(tasks, features)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, requires_grad=True)
    losses = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False):
            losses.append(learner(rows_UD, learner.collate(batch), weight=1 / 3))
    assert losses[1].dtype == torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=0.03, atol=0.0)
    grads = torch.autograd.grad(losses[1], [rows_UD, *learner.parameters()])
    assert all(bool(grad.isfinite().all()) for grad in grads)


def refusal(config: AlgorithmConfig, told: bool = True) -> str:
    tables = TableSizes(1, 4, ("s0",), InputSizes(1, 0, 0)) if told else TableSizes(1, 4)
    model = build_model(MODEL, InputSizes(1, 0, 0))
    return catch_message(ValueError, MetaLearner, model, config, "bce", tables)


def test_what_an_encoder_cannot_be_made_of_is_refused() -> None:
    assert refusal(replace(FORWARD, adapt_layers=())) == (
        'algorithm.adapt_layers = [] with algorithm.name = "encoder": the encoder makes gates for '
        'the layers named there. Name some, or "*" for all'
    )
    assert refusal(FORWARD, told=False) == (
        'algorithm.name = "encoder" reads the support rows, and 0 columns are known: tell the '
        "learner their TableSizes, as gmeta.runs.build.build_learner does"
    )


def test_a_frozen_base_needs_a_part_that_learns() -> None:
    assert refusal(AlgorithmConfig(name="maml", options={"train_base": False})) == (
        'algorithm.options.train_base = false with algorithm.name = "maml": nothing would learn. '
        "Set it "
        "to true, or choose encoder or metaemb, which learn a part of their own"
    )


def test_a_frozen_base_gets_no_gradient_and_the_encoder_does() -> None:
    learner, features, tables = one_learner(
        replace(FORWARD, options={**FORWARD.options, "train_base": False})
    )
    tasks = [reference.random_task(features, 3, 2, random.Random(0))]
    batch = reference.batch_of(tasks, features)
    learner(fetched(batch, tables), learner.collate(batch), weight=1.0).backward()
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    assert learner.encoder is not None
    assert all(
        parameter.grad is not None and bool(parameter.grad.any())
        for name, parameter in learner.encoder.named_parameters()
        if name.endswith("weight")
    )
    assert all(table.grad is not None and not table.grad.any() for table in tables.values())
