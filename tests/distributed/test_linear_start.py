"""A fresh run starts as the regression of its training rows, on any number of ranks; one that goes
on does not start again."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gmeta.data.features.regression import PENALTY
from gmeta.distributed.ranks import Ranks
from gmeta.feeds.batch_request import BatchSettings
from gmeta.feeds.item_statistics_reader import read_item_statistics
from gmeta.runs.build import build
from gmeta.serving.model_loader import load
from metaio import open_dataset
from metaio.read.compose import compose
from tests.distributed.harness import on_ranks
from tests.distributed.test_continuing import config_of, newest, tensors, train_each
from tests.support.commands import succeed
from tests.support.increments import write_increments

KEYS = {
    "model__linear_start": True, "item_features__columns": ["item"], "support_features__task": True,
    "support_features__residual_of": "item", "outer__dense_lr": 0.0, "outer__sparse_lr": 0.0,
}  # fmt: skip


def training_rows(ranks: Ranks, increment: Path) -> tuple[np.ndarray, np.ndarray]:
    """The inputs that training gives all query rows, statistics out of fold, and their labels."""
    config = config_of(increment / "run", increment, **KEYS)
    (dataset, learner), split = build(config), open_dataset(str(increment)).split("train")
    settings = BatchSettings.of(config, dataset)
    read_item_statistics(learner.items, learner.neighbours, settings, dataset, ranks)
    inputs, labels = [], []
    for block in range(split.num_blocks):
        stored = dataset.read_block("train", block)
        whole = compose(dataset.features, [(stored, np.arange(stored.num_episodes))])
        told = learner.collate_options().with_features(whole)
        for task in range(whole.num_tasks):
            begin = int(told.row_offsets_T1[task] + told.support_lengths_T[task])
            rows = slice(begin, int(told.row_offsets_T1[task + 1]))
            inputs.append(told.dense_NK[rows].double().numpy())
            labels.append(told.label_N[rows].double().numpy())
    return np.concatenate(inputs), np.concatenate(labels)


@pytest.mark.distributed
def test_a_run_starts_as_the_regression_and_a_stream_goes_on_from_where_it_stands(
    tmp_path: Path,
) -> None:
    first, second = write_increments(tmp_path / "shop", (30, 100))
    runs = {num_ranks: tmp_path / f"on-{num_ranks}" for num_ranks in (1, 2, 4)}
    for num_ranks, run in runs.items():
        on_ranks(num_ranks, train_each, [config_of(run, first, **KEYS)])
    layers = {
        run: {k: v for k, v in tensors(newest(run)).items() if "decision" in k}
        for run in runs.values()
    }
    for name, values in layers[runs[1]].items():
        assert all(torch.equal(of_run[name], values) for of_run in layers.values()), name

    ((dense_NK, label_N),) = on_ranks(1, training_rows, first)
    weight_X = layers[runs[1]]["model.learner.model.decision.0.weight"][0].double().numpy()
    weight_K = weight_X[-dense_NK.shape[1] :]
    (bias,) = layers[runs[1]]["model.learner.model.decision.2.bias"].double().numpy()
    assert not weight_X[: -dense_NK.shape[1]].any()
    # The gradient of the penalised loss is 0 there.
    mean_K, deviation_K = dense_NK.mean(axis=0), dense_NK.std(axis=0)
    varies_K = deviation_K > 1e-6
    assert varies_K.sum() > 2
    scaled_NX = np.c_[((dense_NK - mean_K)[:, varies_K]) / deviation_K[varies_K], label_N * 0 + 1]
    base = np.log(label_N.mean() / (1.0 - label_N.mean()))
    at_X = np.r_[(weight_K * deviation_K)[varies_K], bias + mean_K @ weight_K - base]
    share_N = 1.0 / (1.0 + np.exp(-(bias + dense_NK @ weight_K)))
    gradient_X = scaled_NX.T @ (share_N - label_N) + PENALTY * at_X
    np.testing.assert_allclose(gradient_X, 0.0, atol=1e-4)

    succeed("export", runs[1], tmp_path / "model")
    served = load(tmp_path / "model").learner.state_dict()
    for name, values in layers[runs[1]].items():
        assert torch.equal(served[name.removeprefix("model.learner.")], values), name

    two = tmp_path / "two"
    on_ranks(1, train_each, [config_of(two, second, runs[2], **KEYS)])
    for name, values in tensors(newest(two)).items():
        assert "decision" not in name or torch.equal(values, layers[runs[2]][name]), name
