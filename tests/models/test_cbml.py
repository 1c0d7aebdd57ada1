"""CBML's gates against their equations task by task, and what the inner loop makes of them."""

import random

import torch
from torch import Tensor

from gmeta.adaptation.adaptation_plan import adaptable_layers
from gmeta.adaptation.layout.ragged import RowLayout
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.learner import MetaLearner
from gmeta.runs.build import measure_inputs
from gmeta_models import InputSizes, ModelConfig, build_model
from gmeta_models.cbml import CBML
from tests.models.inputs import some_inputs
from tests.support import reference

CONFIG = ModelConfig(name="cbml", embedding_dim=4, hidden=(6, 5), options={"clusters": 3})


def cbml(sizes: InputSizes) -> CBML:
    torch.manual_seed(0)
    model = build_model(CONFIG, sizes).double()
    assert isinstance(model, CBML)
    return model


def gates_of_mean(model: CBML, mean_X: Tensor) -> Tensor:
    """The equations of the docstring for one task: gates of all layers in a row."""
    gate = model.gate
    task_O = torch.tanh(gate.encode.weight @ mean_X + gate.encode.bias)
    nearness = torch.stack([torch.exp(-((task_O - c) ** 2).sum() / 2) for c in gate.centres_CZ])
    known = torch.tanh(gate.clusters(task_O)).view(3, 4)
    cluster_O = sum((n / nearness.sum()) * k for n, k in zip(nearness, known, strict=True))
    return 2 * torch.sigmoid(gate.gates(torch.cat([task_O, cluster_O])))


def test_gates_follow_from_the_mean_of_a_tasks_support_rows() -> None:
    sizes = InputSizes(2, 1, 1)
    model = cbml(sizes)
    rows_NX = model.seen_NX(some_inputs(5, sizes, 4))
    gates = model.gates_TO(RowLayout.of(torch.tensor([2, 0, 3])).mean_TX(rows_NX))
    expected = {"decision.0": (3, 6), "decision.2": (3, 5), "decision.4": (3, 1)}
    assert {name: tuple(gate.shape) for name, gate in gates.items()} == expected
    together = torch.cat(list(gates.values()), dim=1)
    means = [rows_NX[:2].mean(0), torch.zeros_like(rows_NX[0]), rows_NX[2:].mean(0)]
    for task, mean_X in enumerate(means):
        torch.testing.assert_close(together[task], gates_of_mean(model, mean_X))
    assert not torch.allclose(together[0], together[2])


def test_before_adaptation_a_task_has_the_gates_of_no_support_and_after_it_its_own() -> None:
    features = reference.some_features(2, 1, 0)
    rng = random.Random(0)
    tasks = [reference.random_task(features, support, 3, rng) for support in (4, 0, 2)]
    model = cbml(measure_inputs(features))
    # A rate of 0: what differs after adaptation is the gates alone.
    learner = MetaLearner(model, AlgorithmConfig(inner_lr=0.0), "bce")
    batch = reference.batch_of(tasks, features)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 4, dtype=torch.float64)
    shown = learner.predict(rows_UD, learner.collate_to_predict(batch))
    before, after = shown.before_N.split(3), shown.after_N.split(3)
    torch.testing.assert_close(before[1], after[1], rtol=0, atol=0)
    assert not torch.allclose(before[0], after[0])
    assert not torch.allclose(before[2], after[2])


def test_the_layers_of_the_gate_never_adapt() -> None:
    expected = ["decision.0", "decision.2", "decision.4"]
    assert list(adaptable_layers(cbml(InputSizes(1, 0, 0)), ("*",))) == expected
