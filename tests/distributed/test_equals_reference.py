"""1, 2 and 4 gloo ranks = a plain PyTorch loop, with unequal tasks per rank, several labels."""

import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.labels import LabelsConfig
from gmeta.config.train_config import OuterConfig, RunConfig, TrainConfig
from gmeta.data.collate import collate_in_parts
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import shard_learner, table_shards
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from metaio.format.features import Features
from tests.distributed.harness import on_ranks, steps_of
from tests.losses.test_objectives import CONFIGS, NAMES, Labelled, slow_loss
from tests.losses.test_ranking import CONFIGS as RANKED
from tests.losses.test_ranking import LEVELS, slow_row_loss
from tests.losses.test_ranking import NAMES as RANKED_NAMES
from tests.support import reference

MODEL = ModelConfig(name="dlrm", embedding_dim=4, hidden=(6,), options={"bottom": (5,)})
COLUMNS = (2, 1, 2)
# Tasks of each outer step by rank, for 4 ranks; fewer ranks take neighbours together. Rank 2 starts
# with nothing, and the ranks run out at different steps.
TASKS_PER_RANK = [[2, 1, 3], [1, 4, 1], [0, 2], [3, 0, 1, 2]]
STEPS = 4
CASES = {
    "maml, sgd": (AlgorithmConfig(name="maml", inner_steps=2, inner_lr=0.1), "sgd"),
    "maml, layers only, adagrad": (
        AlgorithmConfig(name="maml", inner_lr=0.1, adapt_layers=("top.*",), adapt_embeddings=False),
        "adagrad",
    ),
    "fomaml, rowwise adagrad": (AlgorithmConfig(name="fomaml", inner_lr=0.1), "rowwise_adagrad"),
    "fomaml, layers only, adagrad": (
        AlgorithmConfig(name="fomaml", inner_lr=0.1, adapt_embeddings=False),
        "adagrad",
    ),
    "fomaml, layers only, clipped, in parts, rowwise adagrad": (
        AlgorithmConfig(name="fomaml", inner_steps=2, inner_lr=0.1, adapt_embeddings=False),
        "rowwise_adagrad",
    ),
    "fomaml with cbml, layers only, sgd": (
        AlgorithmConfig(name="fomaml", inner_lr=0.1, adapt_embeddings=False),
        "sgd",
    ),
    "none, sgd": (AlgorithmConfig(name="none"), "sgd"),
    "anil, sgd": (AlgorithmConfig(name="anil", inner_lr=0.1), "sgd"),
    "reptile, sgd": (AlgorithmConfig(name="reptile", inner_steps=2, inner_lr=0.1), "sgd"),
    "metasgd by output, adagrad": (AlgorithmConfig(name="metasgd", inner_lr=0.1), "adagrad"),
    "metasgd by weight, rowwise adagrad": (
        AlgorithmConfig(name="metasgd", inner_steps=2, options={"learned_rates": "weight"}),
        "rowwise_adagrad",
    ),
    "ridge, adagrad": (AlgorithmConfig(name="ridge", inner_lr=0.2), "adagrad"),
    "ridge in parts, sgd": (AlgorithmConfig(name="ridge", inner_lr=0.2), "sgd"),
    "maml with cbml, sgd": (AlgorithmConfig(name="maml", inner_lr=0.1), "sgd"),
    "maml, clipped, sgd": (AlgorithmConfig(name="maml", inner_lr=0.1), "sgd"),
    "maml, clipped, adagrad": (AlgorithmConfig(name="maml", inner_lr=0.1), "adagrad"),
    "none, clipped adamw, rowwise adagrad": (AlgorithmConfig(name="none"), "rowwise_adagrad"),
    "none, momentum, sgd": (AlgorithmConfig(name="none"), "sgd"),
    "none, clipped, adam": (AlgorithmConfig(name="none"), "adam"),
    "maml, rowwise adam": (AlgorithmConfig(name="maml", inner_lr=0.1), "partial_rowwise_adam"),
    "metasgd in parts, rowwise adagrad": (
        AlgorithmConfig(name="metasgd", inner_steps=2, inner_lr=0.1),
        "rowwise_adagrad",
    ),
}
SEVERAL = {
    "maml of three labels, sgd": (AlgorithmConfig(name="maml", inner_lr=0.1), "entire space"),
    "metasgd of three labels, layers only, in parts, sgd": (
        AlgorithmConfig(name="metasgd", inner_steps=2, inner_lr=0.1, adapt_embeddings=False),
        "own losses",
    ),
    "fomaml, layers only, of ranked labels, sgd": (
        AlgorithmConfig(name="fomaml", inner_lr=0.1, adapt_embeddings=False),
        "mixed",
    ),
    "maml of ranked labels, in parts, sgd": (
        AlgorithmConfig(name="maml", inner_lr=0.1),
        "pairwise",
    ),
    "none of ranked labels, sgd": (AlgorithmConfig(name="none"), "softmax"),
}
# model.admission: after how many steps a row has an embedding, after how many without not any more.
ADMISSION = {
    "maml, rows shared, sgd": (2, 0),
    "fomaml, layers only, rows shared, adagrad": (3, 0),
    "none, rows shared and lost, clipped, adam": (1, 1),
    "maml in parts, rows shared and lost, rowwise adagrad": (2, 1),
}
CASES |= {
    "maml, rows shared, sgd": (AlgorithmConfig(name="maml", inner_lr=0.1), "sgd"),
    "fomaml, layers only, rows shared, adagrad": (
        AlgorithmConfig(name="fomaml", inner_lr=0.1, adapt_embeddings=False),
        "adagrad",
    ),
    "none, rows shared and lost, clipped, adam": (AlgorithmConfig(name="none"), "adam"),
    "maml in parts, rows shared and lost, rowwise adagrad": (
        AlgorithmConfig(name="maml", inner_lr=0.1),
        "rowwise_adagrad",
    ),
}
CASES |= {case: (algorithm, "sgd") for case, (algorithm, _) in SEVERAL.items()}
# The gradients' norms stand around 0.3 in these cases: some steps are clipped, some are not.
OUTER = {
    "maml, clipped, sgd": {"dense_optimizer": "sgd", "dense_lr": 0.2, "clip_norm": 0.3},
    "maml, clipped, adagrad": {"clip_norm": 0.25, "accumulate_steps": 2},
    "fomaml, layers only, clipped, in parts, rowwise adagrad": {
        "clip_norm": 0.25,
        "accumulate_steps": 2,
    },
    "none, clipped adamw, rowwise adagrad": {
        "dense_optimizer": "adamw",
        "weight_decay": 0.3,
        "clip_norm": 0.2,
    },
    "metasgd in parts, rowwise adagrad": {"accumulate_steps": 3},
    "ridge in parts, sgd": {"accumulate_steps": 2},
    "metasgd of three labels, layers only, in parts, sgd": {"accumulate_steps": 2},
    # Ranking losses have no gradient at the last bias: Adam would take its rounding for one.
    "fomaml, layers only, of ranked labels, sgd": {"dense_optimizer": "sgd", "dense_lr": 0.2},
    "none of ranked labels, sgd": {"dense_optimizer": "sgd", "dense_lr": 0.2},
    "maml of ranked labels, in parts, sgd": {
        "dense_optimizer": "sgd",
        "dense_lr": 0.2,
        "accumulate_steps": 2,
    },
    "none, clipped, adam": {"clip_norm": 0.2},
    "none, rows shared and lost, clipped, adam": {"clip_norm": 0.2},
    "maml in parts, rows shared and lost, rowwise adagrad": {"accumulate_steps": 2},
    "none, momentum, sgd": {"dense_optimizer": "sgd", "dense_lr": 0.2, "momentum": 0.9},
}
DENSE = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def model_of(case: str) -> ModelConfig:
    name = "cbml" if "cbml" in case else MODEL.name
    return replace(MODEL, name=name, admission=ADMISSION.get(case, (0, 0)))


class SlowAdmission:
    """Which rows have embeddings of their own, kept as a dict of counts and one of steps."""

    def __init__(self, features: Features, after: int, expires: int, shared_BD: Tensor) -> None:
        self.features, self.after, self.expires = features, after, expires
        self.shared_BD, self.names = shared_BD, [table.name for table in features.tables]
        self.counts: dict[tuple[str, int], int] = {}
        self.last: dict[tuple[str, int], int] = {}
        self.own: set[tuple[str, int]] = set()

    def seen(self, tables: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tables as the model sees them."""
        place = self.names.index
        return {
            name: torch.stack(
                [
                    rows[i] if (name, i) in self.own else self.shared_BD[place(name)]
                    for i in range(len(rows))
                ]
            )
            for name, rows in tables.items()
        }

    def record(
        self, step: int, tasks: list[reference.Task], tables: dict[str, Tensor],
        states: list[dict[str, Tensor]], before: Tensor,
    ) -> None:  # fmt: skip
        """Count a step, once for each row that it asked for; `before`: shared, before the step."""
        asked = set()
        for task in tasks:
            for single, multi in zip(task.single, task.multi, strict=True):
                asked |= {(f.table, i) for f, i in zip(self.features.single, single, strict=True)}
                asked |= {
                    (f.table, i)
                    for f, bag in zip(self.features.multi, multi, strict=True)
                    for i in bag
                }
        for name, row in asked:
            key = name, row
            if self.expires and step - self.last.get(key, step) > self.expires:
                self.own.discard(key)
                self.counts[key] = 0
                for values in (tables, *states):
                    values[name][row] = 0.0
            self.last[key] = step
            self.counts[key] = self.counts.get(key, 0) + 1
            if row and self.counts[key] >= self.after and key not in self.own:
                self.own.add(key)
                tables[name][row] = before[self.names.index(name)]


class Labels(NamedTuple):
    """What is learnt of the labels of a case: of one, the click of every row."""

    config: LabelsConfig = LabelsConfig()
    labelled: Labelled | None = None
    slow: reference.RowLoss | None = None


def labels_of(case: str) -> Labels:
    if case not in SEVERAL:
        return Labels()
    kind = SEVERAL[case][1]
    if kind in RANKED:
        labelled = Labelled(RANKED_NAMES, 0.3, True, LEVELS)
        return Labels(RANKED[kind], labelled, slow_row_loss(RANKED[kind], RANKED_NAMES, "bce"))
    labelled = Labelled(NAMES, 0.4, True)
    return Labels(CONFIGS[kind], labelled, slow_loss(CONFIGS[kind], NAMES))


def tasks_of_step(case: str) -> tuple[Features, list[list[list[reference.Task]]]]:
    """The columns, and [4 ranks][steps] -> tasks."""
    rng, features, labelled = (
        random.Random(5),
        reference.some_features(*COLUMNS),
        labels_of(case)[1],
    )
    tasks = [
        [
            [
                reference.random_task(features, rng.randrange(0, 5), rng.randrange(1, 4), rng)
                for _ in range(count)
            ]
            for count in counts
        ]
        for counts in TASKS_PER_RANK
    ]
    if labelled is None:
        return features, tasks
    return labelled(features, [], rng)[0], [
        [labelled(features, of_step, rng)[1] for of_step in of_rank] for of_rank in tasks
    ]


def train_config(case: str) -> TrainConfig:
    _, sparse = CASES[case]
    values = {"dense_lr": 0.01, "sparse_lr": 0.1, "sparse_optimizer": sparse, **OUTER.get(case, {})}
    return TrainConfig(model=model_of(case), outer=OuterConfig(**values), run=RunConfig(seed=11))


def train_on_rank(ranks: Ranks, cases: list[str]) -> dict[str, dict[str, Any]]:
    """Train these cases; this rank's rows of the tables, the layers and the losses of each."""
    share = range(4 * ranks.rank // ranks.world_size, 4 * (ranks.rank + 1) // ranks.world_size)
    results = {}
    for case in cases:
        algorithm, _ = CASES[case]
        features, tasks = tasks_of_step(case)
        config, labels = train_config(case), labels_of(case).config
        torch.manual_seed(3)
        learner = build_learner(features, model_of(case), algorithm, "bce", labels=labels)
        sharded = shard_learner(learner, features, config, ranks)
        start = local_rows(sharded)
        optimizer = build_optimizer(sharded, config.outer)
        arrange = collate_in_parts(learner.collate, config.outer.accumulate_steps)
        num_steps = max(len(tasks[rank]) for rank in share)
        batches = (
            reference.batch_of(
                [task for rank in share for task in (tasks[rank][step : step + 1] or [[]])[0]],
                features,
            )
            for step in range(num_steps)
        )
        losses = []
        for episodes, totals in steps_of(batches, arrange, features, ranks, sharded=sharded):
            optimizer.begin_step(len(losses), STEPS)
            loss = sharded(episodes, ranks.world_size / totals.num_terms)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results[case] = {
            "start": start,
            "tables": local_rows(sharded),
            "layers": {name: value.detach().clone() for name, value in learner.named_parameters()},
            "losses": losses,
        }
    return results


def local_rows(sharded: torch.nn.Module) -> dict[str, list[tuple[int, Tensor]]]:
    return {
        name.removeprefix("tables.embeddings.").removesuffix(".weight"): [
            (shard.metadata.shard_offsets[0], shard.tensor.clone())
            for shard in table.local_shards()
        ]
        for name, table in table_shards(sharded).items()
    }


def whole_tables(results: list[dict[str, Any]], key: str) -> dict[str, Tensor]:
    names = results[0][key]
    parts = {
        name: sorted((p for r in results for p in r[key][name]), key=lambda part: part[0])
        for name in names
    }
    return {name: torch.cat([rows for _, rows in parts[name]]) for name in names}


def train_by_loop(
    case: str, start: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Tables, layers and losses of the plain loop in float64."""
    algorithm, sparse = CASES[case]
    if algorithm.name == "anil":
        algorithm = replace(algorithm, adapt_layers=("top.2",), adapt_embeddings=False)
    features, tasks = tasks_of_step(case)
    labels, _, slow = labels_of(case)
    torch.manual_seed(3)
    learner = build_learner(features, model_of(case), algorithm, "bce", labels=labels).double()
    model = learner.model
    tables = {name: rows.double().requires_grad_() for name, rows in start.items()}
    outer = train_config(case).outer
    momentum = {"momentum": outer.momentum} if outer.momentum else {}
    dense = DENSE[outer.dense_optimizer](
        learner.parameters(), lr=outer.dense_lr, weight_decay=outer.weight_decay, **momentum
    )
    everything = [*learner.parameters(), *tables.values()]
    state = {name: torch.zeros_like(rows) for name, rows in tables.items()}
    means = {name: torch.zeros_like(rows) for name, rows in tables.items()}
    losses, admission = [], None
    if case in ADMISSION:
        shared_BD = learner.projections.shared_BD
        shared_BD.data.copy_(drawn_shared(len(shared_BD)))
        admission = SlowAdmission(features, *ADMISSION[case], shared_BD)
    for step in range(STEPS):
        now = [task for of_rank in tasks for task in (of_rank[step : step + 1] or [[]])[0]]
        rates = reference.rates_by_name(learner, features)
        seen = tables if admission is None else admission.seen(tables)
        loss = reference.outer_loss(
            model, seen, features, now, algorithm, "bce", rates, row_loss=slow
        )
        for value in everything:
            value.grad = None
        loss.backward()
        for rows in tables.values():
            rows.grad = torch.zeros_like(rows) if rows.grad is None else rows.grad
        if outer.clip_norm:
            torch.nn.utils.clip_grad_norm_(everything, outer.clip_norm)
        before = None if admission is None else shared_BD.detach().clone()
        dense.step()
        with torch.no_grad():
            for name, rows in tables.items():
                grad = rows.grad
                if sparse == "sgd":
                    rows -= 0.1 * grad
                    continue
                squared = grad.square()
                if sparse not in ("adagrad", "adam"):
                    squared = squared.mean(dim=1, keepdim=True).expand_as(grad)
                if "adam" in sparse:
                    # Of the rows of the step alone.
                    here = grad.any(dim=1)
                    means[name][here] += 0.1 * (grad - means[name])[here]
                    state[name][here] += 0.001 * (squared - state[name])[here]
                    root = (state[name] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
                    rows[here] -= (0.1 / (1 - 0.9 ** (step + 1)) * means[name] / root)[here]
                    continue
                state[name] += squared
                rows -= 0.1 * grad / (state[name].sqrt() + 1e-8)
            if admission is not None:
                admission.record(step + 1, now, tables, [state, means], before)
        losses.append(loss.item())
    return tables, dict(learner.named_parameters()), losses


def drawn_shared(num_tables: int) -> Tensor:
    """What rare rows of each table share, as a run of seed 11 begins."""
    drawn = torch.randn(num_tables, 4, generator=torch.Generator().manual_seed(11))
    return drawn.double() * OuterConfig().embedding_init_std


TRAINED_BY_LOOP: dict[str, tuple[dict[str, Tensor], Any]] = {}


def trained_by_loop(case: str, start: dict[str, Tensor]) -> Any:
    """What `train_by_loop` returns; once for all numbers of ranks that start from the same."""
    known, found = TRAINED_BY_LOOP.get(case, ({}, None))
    if known.keys() != start.keys() or not all(torch.equal(known[t], start[t]) for t in start):
        found = train_by_loop(case, start)
        TRAINED_BY_LOOP[case] = start, found
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_train_the_model_of_a_plain_loop(world_size: int) -> None:
    results = on_ranks(world_size, train_on_rank, list(CASES))
    for case in CASES:
        mine = [result[case] for result in results]
        tables, layers, losses = trained_by_loop(case, whole_tables(mine, "start"))
        trained = whole_tables(mine, "tables")
        for name, rows in tables.items():
            torch.testing.assert_close(trained[name].double(), rows.detach(), rtol=0, atol=1e-5)
        for name, value in layers.items():
            for result in mine:
                torch.testing.assert_close(
                    result["layers"][name].double(), value.detach(), rtol=0, atol=1e-5
                )
        mean_losses = torch.tensor([one["losses"] for one in mine], dtype=torch.float64).mean(dim=0)
        torch.testing.assert_close(
            mean_losses, torch.tensor(losses, dtype=torch.float64), rtol=0, atol=1e-5
        )


@pytest.mark.distributed
def test_tables_start_from_the_same_values_at_any_world_size() -> None:
    starts = [
        whole_tables(
            [r["none, sgd"] for r in on_ranks(world, train_on_rank, ["none, sgd"])], "start"
        )
        for world in (1, 2)
    ]
    assert starts[0].keys() == starts[1].keys()
    for name, rows in starts[0].items():
        assert torch.equal(rows, starts[1][name])
