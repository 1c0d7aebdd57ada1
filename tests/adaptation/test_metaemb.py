"""Meta-Embedding against the paper's equations in plain PyTorch, item by item; float64."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from gmeta.adaptation.algorithms.algorithm import TableSizes
from gmeta.adaptation.algorithms.metaemb import id_generator
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.learner import MetaLearner
from gmeta.losses.row_losses import LossFunction, row_losses_N
from gmeta.runs.build import build_learner, measure_inputs
from gmeta_models import ModelConfig
from gmeta_models.id_generator import IdGenerator
from gmeta_models.inputs import RowInputs
from metaio.format.features import Features, FeatureSpec, TableSpec
from metaio.read.batch import TaskBatch
from tests.support import reference

# An item's id between other columns; the user's are not of its content.
FEATURES = Features(
    tables=tuple(map(TableSpec, ("user", "item", "year", "genre", "tags"), (6, 7, 4, 5, 6))),
    single=(FeatureSpec("user", "user"), FeatureSpec("item", "item"), FeatureSpec("year", "year")),
    multi=(FeatureSpec("genre", "genre"), FeatureSpec("tags", "tags")),
    dense=("age",),
)
ITEM, YEAR, GENRE = 1, 2, 0
MODEL = ModelConfig(
    name="melu", embedding_dim=4, hidden=(8, 5), options={"bottom": (3,), "clusters": 3}
)
PAPER = AlgorithmConfig(
    name="metaemb",
    inner_lr=0.2,
    adapt_embeddings=("item",),
    options={"content": ("genre", "year"), "cold_weight": 0.3},
)
Tables = dict[str, Tensor]


def item_tasks(sizes: list[tuple[int, int]], seed: int = 0) -> list[reference.Task]:
    """Tasks whose rows are of one item each, with its year and genres."""
    rng = random.Random(seed)
    tasks = []
    for item, size in enumerate(sizes):
        task = reference.random_task(FEATURES, *size, rng)
        year, genres = rng.randrange(4), [rng.randrange(5) for _ in range(1 + item % 3)]
        single = [[user, item, year] for user, _, _ in task.single]
        multi = [[genres, tags] for _, tags in task.multi]
        tasks.append(replace(task, single=single, multi=multi))
    return tasks


def made(learner: MetaLearner, tables: Tables, task: reference.Task) -> Tensor:
    """phi = s tanh(W u), u the item's year beside the mean of its genres."""
    generator = learner.generator
    assert isinstance(generator, IdGenerator)
    year, genres = task.single[0][YEAR], task.multi[0][GENRE]
    content = torch.cat([tables["year"][year], tables["genre"][genres].mean(dim=0)])
    return generator.scale * torch.tanh(generator.generate.weight @ content)


def outputs(
    learner: MetaLearner, tables: Tables, task: reference.Task, phi: Tensor, rows: range,
    weights: Tables,
) -> Tensor:  # fmt: skip
    """The model's outputs on rows of an item whose embedding is phi."""
    inputs = reference.rows_inputs(task, FEATURES, tables, rows)
    single = [torch.stack([row[0], phi, row[2]]) for row in inputs.single_NFD]
    inputs = replace(inputs, single_NFD=torch.stack(single))
    return functional_call(learner.model, weights, (inputs,))


def slow(
    learner: MetaLearner, tables: Tables, task: reference.Task, config: AlgorithmConfig,
    loss: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Outputs on the query rows with phi and with phi', the cold loss, and the warm one."""
    label = torch.tensor(task.label, dtype=torch.float64)
    support, query = range(task.num_support), range(task.num_support, len(task.label))
    weights: Tables = dict(learner.model.named_parameters())
    phi = start = made(learner, tables, task)
    losses = []
    for _ in range(config.inner_steps if task.num_support else 0):
        output = outputs(learner, tables, task, phi, support, weights)
        cold = row_losses_N(LossFunction(loss), output, label[: task.num_support]).mean()
        losses.append(cold)
        moving = {name: weights[name] for name in weights if name.startswith("decision")}
        moving = moving if config.adapt_layers == ("decision.*",) else {}
        grads = torch.autograd.grad(cold, [phi, *moving.values()], create_graph=True)
        phi = phi - config.inner_lr * grads[0]
        for (name, value), grad in zip(moving.items(), grads[1:], strict=True):
            weights[name] = value - config.inner_lr * grad
    if not query:
        zero = torch.zeros((), dtype=torch.float64)
        return zero[None][:0], zero[None][:0], zero, zero
    before_weights: Tables = dict(learner.model.named_parameters())
    before = outputs(learner, tables, task, start, query, before_weights)
    after = outputs(learner, tables, task, phi, query, weights)
    warm = row_losses_N(LossFunction(loss), after, label[task.num_support :]).mean()
    return before, after, losses[0] if losses else torch.zeros_like(warm), warm


def drawn(config: AlgorithmConfig, model: str = "melu", loss: str = "bce") -> Any:
    """A learner and tables of random values in float64."""
    torch.manual_seed(1)
    learner = build_learner(FEATURES, replace(MODEL, name=model), config, loss).double()
    for parameter in learner.parameters():
        parameter.data.normal_(std=0.6)
    tables = {
        table.name: torch.randn(table.num_rows, 4, dtype=torch.float64, requires_grad=True)
        for table in FEATURES.tables
    }
    return learner, tables


def fetched(batch: TaskBatch, tables: Tables) -> Tensor:
    ids = batch.unique_ids_U.split(batch.unique_lengths_B.tolist())
    return torch.cat([table[mine] for table, mine in zip(tables.values(), ids, strict=True)])


@pytest.mark.parametrize("model", ["melu", "deepfm", "mmoe"])
def test_lists_of_content_are_pooled_as_the_models_are(model: str) -> None:
    config = replace(MODEL, name=model, pooling="sum")
    generator = build_learner(FEATURES, config, PAPER, "bce").generator
    assert isinstance(generator, IdGenerator)
    assert generator.columns.pooling == "sum"


def test_a_layer_that_somebody_calls_pooling_is_no_name_of_a_pooling() -> None:
    model = torch.nn.Module()
    model.pooling = torch.nn.Linear(1, 1)
    names = tuple(table.name for table in FEATURES.tables)
    made = id_generator(model, PAPER, TableSizes(len(names), 4, names, measure_inputs(FEATURES)))
    assert isinstance(made.generator, IdGenerator)
    assert made.generator.columns.pooling == "mean"


@pytest.mark.parametrize("loss", ["bce", "mse", "huber"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("model", "layers"), [("melu", ("*",)), ("melu", ("decision.*",)), ("dlrm", ("*",))]
)
def test_loss_and_gradients_are_those_of_the_paper(
    model: str, layers: tuple[str, ...], steps: int, loss: str
) -> None:
    config = replace(PAPER, inner_steps=steps, adapt_layers=layers)
    learner, tables = drawn(config, model, loss)
    tasks = item_tasks([(3, 2), (0, 2), (4, 1), (2, 3)])
    terms = []
    for task in tasks:
        _, _, cold, warm = slow(learner, tables, task, config, loss)
        terms.append(0.3 * cold + 0.7 * warm)
    wanted = [*learner.parameters(), *tables.values()]
    expected = torch.stack(terms).mean()
    theirs = torch.autograd.grad(expected, wanted, allow_unused=True)
    batch = reference.batch_of(tasks, FEATURES)
    actual = learner(fetched(batch, tables), learner.collate(batch), weight=1 / len(tasks))
    ours = torch.autograd.grad(actual, wanted, allow_unused=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    for parameter, mine, other in zip(wanted, ours, theirs, strict=True):
        zero = torch.zeros_like(parameter)
        mine, other = (zero if grad is None else grad for grad in (mine, other))
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)


def test_content_is_pooled_as_the_model_pools_it() -> None:
    for model, pooling in (("deepfm", "sum"), ("melu", "sum"), ("deepfm", "mean")):
        config = replace(MODEL, name=model, pooling=pooling)
        generator = build_learner(FEATURES, config, PAPER, "mse").generator
        assert isinstance(generator, IdGenerator)
        assert generator.columns.pooling == pooling


def test_a_frozen_base_learns_nothing_and_the_generator_the_same() -> None:
    tasks = item_tasks([(3, 2), (4, 1)])
    batch = reference.batch_of(tasks, FEATURES)
    grads = []
    for train_base in (True, False):
        learner, tables = drawn(replace(PAPER, options={**PAPER.options, "train_base": train_base}))
        learner(fetched(batch, tables), learner.collate(batch), weight=0.5).backward()
        generator = learner.generator
        grads.append([parameter.grad for parameter in generator.parameters()])
        reached = [p for p in learner.model.parameters() if p.grad is not None and p.grad.any()]
        reached += [t for name, t in tables.items() if t.grad is not None and t.grad.any()]
        assert bool(reached) == train_base
        assert all(table.grad is not None for table in tables.values())
    for joint, alone in zip(*grads, strict=True):
        torch.testing.assert_close(joint, alone, rtol=0, atol=0)
        assert bool(joint.any())


def test_predictions_are_those_of_the_generated_and_of_the_warmed_up_embedding() -> None:
    config = replace(PAPER, inner_steps=2)
    learner, tables = drawn(config)
    tasks = item_tasks([(3, 2), (0, 2), (4, 2)])
    batch = reference.batch_of(tasks, FEATURES)
    shown = learner.predict(fetched(batch, tables), learner.collate_to_predict(batch))
    for index, task in enumerate(tasks):
        before, after, _, _ = slow(learner, tables, task, config, "bce")
        torch.testing.assert_close(shown.before_N.split(2)[index], before.detach())
        torch.testing.assert_close(shown.after_N.split(2)[index], after.detach())
    assert not torch.allclose(shown.before_N[[0, 1, 4, 5]], shown.after_N[[0, 1, 4, 5]])


def test_the_row_in_the_table_says_nothing_and_the_content_does() -> None:
    learner, tables = drawn(PAPER)
    task = item_tasks([(0, 2)])[0]
    other = replace(task, single=[[user, 5, year] for user, _, year in task.single])
    older = replace(task, single=[[user, i, (year + 1) % 4] for user, i, year in task.single])
    shown = []
    for each in (task, other, older):
        batch = reference.batch_of([each], FEATURES)
        prediction = learner.predict(fetched(batch, tables), learner.collate_to_predict(batch))
        shown.append(prediction.before_N)
    assert torch.equal(shown[0], shown[1])
    assert not torch.allclose(shown[0], shown[2])


def refusal(features: Features = FEATURES, **changes: Any) -> str:
    with pytest.raises(ValueError) as caught:
        build_learner(features, MODEL, replace(PAPER, **changes), "bce")
    return str(caught.value)


def test_what_no_embedding_can_be_generated_of_is_refused() -> None:
    assert refusal(adapt_embeddings=True) == (
        'algorithm.adapt_embeddings = true with algorithm.name = "metaemb": it generates the '
        'embeddings of exactly 1 table. Name it, such as ["item"]'
    )
    assert refusal(adapt_embeddings=("item", "user")) == (
        "algorithm.adapt_embeddings = ['item', 'user'] with algorithm.name = \"metaemb\": it "
        'generates the embeddings of exactly 1 table. Name it, such as ["item"]'
    )
    assert refusal(options={"content": ()}) == (
        'algorithm.options.content = [] with algorithm.name = "metaemb": an embedding is '
        "generated from "
        "columns that describe 'item'. Name some of user, year, genre, tags"
    )
    assert refusal(options={"content": ("item",)}) == (
        "algorithm.options.content names 'item': the columns that may describe 'item' are user, "
        "year, genre, tags. Name some of them"
    )
    assert refusal(adapt_embeddings=("genre",)) == (
        "algorithm.name = \"metaemb\" generates the embeddings of table 'genre', which genre "
        "reads: exactly 1 single-id column may. Name the table of such a column in "
        "algorithm.adapt_embeddings, or give it a table of its own in the schema and prepare again"
    )
    shared = replace(FEATURES, multi=(FeatureSpec("genre", "genre"), FeatureSpec("seen", "item")))
    assert refusal(shared) == (
        "algorithm.name = \"metaemb\" generates the embeddings of table 'item', which item, seen "
        "reads: exactly 1 single-id column may. Name the table of such a column in "
        "algorithm.adapt_embeddings, or give it a table of its own in the schema and prepare again"
    )


def test_rows_keep_all_columns_but_the_id() -> None:
    learner, tables = drawn(PAPER)
    task = item_tasks([(0, 3)])[0]
    inputs = reference.rows_inputs(task, FEATURES, tables, range(3))
    found: RowInputs = learner.generator(inputs)
    assert torch.equal(found.single_NFD[:, [0, 2]], inputs.single_NFD[:, [0, 2]])
    moved = found.single_NFD[:, ITEM] - inputs.single_NFD[:, ITEM]
    torch.testing.assert_close(moved, made(learner, tables, task).expand(3, -1))
