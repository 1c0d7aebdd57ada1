"""Holds a learner's step to the loop over tasks: the same loss and gradients, float64, 1e-10."""

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import LabelPrior, SupportFeaturesConfig
from gmeta.config.labels import LabelsConfig
from gmeta.data.features.support_statistics import NO_STATISTICS, SupportStatistics
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from metaio.format.features import Features
from tests.support import reference

# What ANIL adapts in models of two hidden layers.
HEADS = {
    "dlrm": "top.4", **dict.fromkeys(("melu", "cbml", "din"), "decision.4"),
    **dict.fromkeys(("deepfm", "dcnv2"), "deep.4"), **dict.fromkeys(("mmoe", "ple"), "towers.*.4"),
}  # fmt: skip
Labelled = Callable[
    [Features, list[reference.Task], random.Random], tuple[Features, list[reference.Task]]
]


def for_the_loop(algorithm: AlgorithmConfig, model: ModelConfig) -> AlgorithmConfig:
    """What the loop runs in place of an algorithm: of ANIL MAML of the head, else the same."""
    if algorithm.name != "anil":
        return algorithm
    is_parallel = model.name == "dcnv2" and model.options.get("structure") == "parallel"
    head = "output" if is_parallel else HEADS[model.name]
    return replace(algorithm, adapt_layers=(head,), adapt_embeddings=False)


def assert_equals_loop(
    sizes: list[tuple[int, int]], columns: tuple[int, int, int], model_config: ModelConfig,
    algorithm: AlgorithmConfig, loss: str = "bce", seed: int = 0, shared_table: bool = False,
    huber_delta: float = 1.0, support_features: SupportFeaturesConfig | None = None,
    labels: tuple[LabelsConfig, Labelled, reference.RowLoss] | None = None,
    slow: AlgorithmConfig | None = None,
) -> None:  # fmt: skip
    """Loss and every gradient of a step of `algorithm` equal those of the loop, which runs `slow`;
    without it what `for_the_loop` says.

    `sizes` are the support and query rows of each task, `columns` the numbers of single-id,
    multi-id and dense ones. DIN gets its history; learned rates are made to differ. The loop sees
    statistics of support rows as dense columns. `labels` are the config of several labels, what
    gives tasks theirs, and the slow loss of a row."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    history = model_config.name == "din"
    features = reference.some_features(*columns, shared_table and not history, history)
    tasks = [reference.random_task(features, support, query, rng) for support, query in sizes]
    config, row_loss = LabelsConfig(), None
    if labels is not None:
        config, labelled, row_loss = labels
        features, tasks = labelled(features, tasks, rng)
    batch = reference.batch_of(tasks, features)
    statistics = NO_STATISTICS
    if support_features is not None:
        statistics = SupportStatistics.of(support_features, features, LabelPrior(0.4, 0.5))
    learner = build_learner(
        features, model_config, algorithm, loss, huber_delta, statistics, labels=config
    ).to(torch.float64)
    model = learner.model
    tables = {
        table.name: torch.randn(
            table.num_rows, model_config.embedding_dim, dtype=torch.float64, requires_grad=True
        )
        for table in features.tables
    }
    rates = list(learner.rates.parameters()) if isinstance(learner.rates, nn.Module) else []
    for rate in rates:
        rate.data.uniform_(0.02, 0.1)
    by_name = reference.rates_by_name(learner, features)
    dense = statistics.with_features(batch).dense_NK.split(batch.row_offsets_T1.diff().tolist())
    seen = [replace(task, dense=rows.tolist()) for task, rows in zip(tasks, dense, strict=True)]
    columns_seen = replace(features, dense=(*features.dense, *statistics.names))
    expected = reference.outer_loss(
        model, tables, columns_seen, seen, slow or for_the_loop(algorithm, model_config), loss,
        by_name, huber_delta, row_loss,
    )  # fmt: skip
    parameters = [*model.parameters(), *tables.values(), *rates]
    expected_grads = torch.autograd.grad(expected, parameters, allow_unused=True)

    rows_UD = torch.cat(
        [
            table[ids]
            for table, ids in zip(
                tables.values(),
                batch.unique_ids_U.split(batch.unique_lengths_B.tolist()),
                strict=True,
            )
        ]
    )
    episodes = learner.collate(batch)
    actual = learner(rows_UD, episodes, weight=1 / episodes.num_terms)
    actual_grads = torch.autograd.grad(actual, parameters, allow_unused=True)

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    for parameter, ours, theirs in zip(parameters, actual_grads, expected_grads, strict=True):
        zero = torch.zeros_like(parameter)
        torch.testing.assert_close(
            zero if ours is None else ours,
            zero if theirs is None else theirs,
            rtol=1e-9,
            atol=1e-10,
        )
