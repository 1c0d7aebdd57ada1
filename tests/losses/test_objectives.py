"""Several labels, masks, weights and the entire space, against a loop over rows and labels."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gmeta.adaptation.algorithms import registry
from gmeta.adaptation.algorithms.algorithm import Algorithm
from gmeta.adaptation.algorithms.encoder import support_encoder
from gmeta.adaptation.algorithms.maml import QueryLoss
from gmeta.adaptation.layout.ragged import RowLayout
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.labels import LabelsConfig
from gmeta.losses.named_losses import make_objectives
from gmeta.losses.objectives import LabelLosses, Objectives, label_weights
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from metaio.format.features import Features
from tests.adaptation.agreement import assert_equals_loop
from tests.support import reference
from tests.support.refusals import catch_message

ALGORITHMS = ("maml", "fomaml", "anil", "reptile", "metasgd", "none")
NAMES = ("click", "buy", "stars")
CONFIGS = {
    "alike": LabelsConfig(),
    "own losses": LabelsConfig(
        loss={"stars": "huber"}, weight={"buy": 3.0, "stars": 0.25}, adapt=("click", "stars")
    ),
    "entire space": LabelsConfig(
        loss={"stars": "mse"}, weight={"buy": 2.0}, entire_space={"buy": "click"}
    ),
    "chain": LabelsConfig(adapt=("stars",), entire_space={"buy": "click", "stars": "buy"}),
}
MODELS = {
    name: ModelConfig(name=name, embedding_dim=4, hidden=(5, 3), options={
        "bottom": (3,), "history": "m0", "clusters": 2, "attention": (4,), "cross_layers": 1,
        "experts": 2, "own_experts": 1, "expert": (4,),
    })
    for name in ("dlrm", "melu", "cbml", "din", "deepfm", "dcnv2", "mmoe", "ple")
}  # fmt: skip


class Labelled:
    """Gives tasks labels of these names, of which a share is not known, and weights."""

    def __init__(
        self, names: tuple[str, ...], unknown: float, weighted: bool,
        levels: tuple[float, ...] = (0.0, 1.0),
    ) -> None:  # fmt: skip
        self.names, self.unknown, self.weighted = names, unknown, weighted
        self.levels = levels

    def __call__(
        self, features: Features, tasks: list[reference.Task], rng: random.Random
    ) -> tuple[Features, list[reference.Task]]:
        features = replace(features, labels=self.names, weight="w" if self.weighted else "")
        return features, [self._of(task, rng) for task in tasks]

    def _of(self, task: reference.Task, rng: random.Random) -> reference.Task:
        def label() -> float:
            return math.nan if rng.random() < self.unknown else rng.choice(self.levels)

        num_rows, num_labels = len(task.label), len(self.names)
        labels = [[label() for _ in self.names] for _ in range(num_rows)]
        # Now and then a weight of 0: such a row teaches nothing.
        weights = [rng.choice([0.0, 0.5, 1.0, 2.0]) for _ in range(num_rows)]
        return replace(
            task,
            label=labels if num_labels > 1 else [one for (one,) in labels],
            weight=weights if self.weighted else None,
        )


def slow_loss(config: LabelsConfig, names: tuple[str, ...]) -> reference.RowLoss:
    """The loss of a row, label by label, of probabilities."""

    def of_label(at: int, outputs_L: Tensor, label: float) -> Tensor:
        name = names[at]
        kind = config.loss.get(name, "bce")
        if kind != "bce":
            error = (outputs_L[at] - label).abs()
            if kind == "huber":
                return error**2 / 2 if error <= 1 else error - 0.5
            return error**2
        p = torch.sigmoid(outputs_L[at])
        while name in config.entire_space:
            name = config.entire_space[name]
            p = p * torch.sigmoid(outputs_L[names.index(name)])
        return -label * p.log() - (1 - label) * (1 - p).log()

    def row_loss(output: Tensor, task: reference.Task, rows: range, is_inner: bool) -> Tensor:
        losses = []
        for outputs, row in zip(output.reshape(len(rows), len(names)), rows, strict=True):
            labels = np.reshape(task.label[row], -1).tolist()
            total = outputs.sum() * 0.0
            for at, (name, label) in enumerate(zip(names, labels, strict=True)):
                if not math.isnan(label) and not (is_inner and name not in (config.adapt or names)):
                    total = total + config.weight.get(name, 1.0) * of_label(at, outputs, label)
            losses.append(total if task.weight is None else total * task.weight[row])
        return torch.stack(losses) if losses else output.new_zeros(0)

    return row_loss


def compare(
    model: str, name: str, config: LabelsConfig, names: tuple[str, ...], unknown: float,
    weighted: bool, steps: int = 2, embeddings: bool = False, seed: int = 0,
) -> None:  # fmt: skip
    algorithm = AlgorithmConfig(
        name=name, inner_steps=steps, adapt_embeddings=embeddings, support_prior=0.5
    )
    sizes, labelled = [(3, 2), (1, 4), (4, 0), (0, 2)], Labelled(names, unknown, weighted)
    assert_equals_loop(
        sizes, (2, 1, 2), MODELS[model], algorithm, seed=seed,
        labels=(config, labelled, slow_loss(config, names)),
    )  # fmt: skip


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["maml", "fomaml", "anil", "metasgd"])
@pytest.mark.parametrize("embeddings", [False, True])
def test_the_fast_loop_of_many_labels_is_the_loop(config: str, name: str, embeddings: bool) -> None:
    compare("melu", name, CONFIGS[config], NAMES, 0.4, True, embeddings=embeddings)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    model=st.sampled_from(sorted(MODELS)), name=st.sampled_from(ALGORITHMS),
    config=st.sampled_from(sorted(CONFIGS)), unknown=st.sampled_from([0.0, 0.5]),
    weighted=st.booleans(), steps=st.integers(1, 2), embeddings=st.booleans(),
    seed=st.integers(0, 1_000),
)  # fmt: skip
def test_every_model_and_algorithm_learns_several_labels_as_the_loop_does(
    model: str, name: str, config: str, unknown: float, weighted: bool, steps: int,
    embeddings: bool, seed: int,
) -> None:  # fmt: skip
    compare(model, name, CONFIGS[config], NAMES, unknown, weighted, steps, embeddings, seed)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_label_that_is_not_always_known_is_learnt_as_in_the_loop(name: str) -> None:
    compare("dlrm", name, LabelsConfig(weight={"buy": 2.0}), ("buy",), 0.5, True)


def test_the_logit_of_the_entire_space_holds_where_probabilities_do_not() -> None:
    losses = make_objectives("bce", 1.0, CONFIGS["chain"], NAMES).outer
    output_NL = torch.tensor(
        [[90.0, 80.0, 95.0], [-90.0, 3.0, 100.0], [200.0, -150.0, 0.0]], requires_grad=True
    )
    logits = losses.logits(output_NL)
    # log(e^-a + e^-b + e^-c ...), of which the largest counts.
    expected = torch.tensor([[90.0, 80.0, 80.0], [-90.0, -90.05, -90.05], [200.0, -150.0, -150.7]])
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.06)
    label_NL = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    ones_NL, lists = torch.ones_like(label_NL), RowLayout.of(torch.tensor([3]))
    (slopes,) = torch.autograd.grad(
        losses.losses_NL(output_NL, label_NL, ones_NL, lists).sum(), output_NL, create_graph=True
    )
    (curvatures,) = torch.autograd.grad(slopes.sum(), output_NL)
    torch.testing.assert_close(losses.grads_NL(output_NL, label_NL, ones_NL, lists), slopes)
    assert slopes.isfinite().all()
    assert curvatures.isfinite().all()


def test_what_is_always_known_and_weighs_the_same_needs_no_weights() -> None:
    none = torch.zeros(0)
    known, unknown = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, math.nan]])
    assert label_weights(known, none) is None
    assert label_weights(unknown, none).tolist() == [[1.0, 0.0]]
    assert label_weights(unknown, torch.tensor([3.0])).tolist() == [[3.0, 0.0]]
    assert label_weights(unknown[0], torch.tensor([3.0, 2.0])).tolist() == [3.0, 0.0]


@pytest.mark.parametrize(
    ("config", "names", "message"),
    [
        (LabelsConfig(weight={"bye": 2.0}), NAMES, "labels.weight names 'bye', which is no label "
         "of the dataset: it has click, buy, stars. Name one of them, or take it out"),
        (LabelsConfig(weight=dict.fromkeys(NAMES, 0.0)), NAMES, "labels.weight is 0 for every "
         "label: nothing would be learnt. Raise one"),
        (LabelsConfig(entire_space={"click": "buy"}), NAMES, "labels.entire_space.click = 'buy': a "
         "label before click in the schema is needed: there is none. Name one of them, or change "
         "the order of [[label]]"),
        (LabelsConfig(loss={"buy": "mse"}, entire_space={"buy": "click"}), NAMES,
         "labels.entire_space has buy among click, of losses mse and bce: a product is of "
         "probabilities. Give both the loss bce"),
    ],
)  # fmt: skip
def test_labels_that_cannot_be_learnt_so_are_refused(
    config: LabelsConfig, names: tuple[str, ...], message: str
) -> None:
    assert catch_message(ValueError, make_objectives, "bce", 1.0, config, names) == message


def test_without_names_there_is_the_one_label_of_outer_loss() -> None:
    assert make_objectives("huber", 0.5, LabelsConfig(), ()) == Objectives.of("huber", 0.5)
    assert isinstance(Objectives.of("bce").outer, LabelLosses)


@pytest.mark.parametrize("name", ["encoder", "encoder_maml", "of_mine"])
def test_what_reads_a_rows_one_label_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Algorithm(QueryLoss(True), parts=support_encoder)
    monkeypatch.setitem(registry.ALGORITHMS, "of_mine", own)
    features = replace(reference.some_features(2, 1, 1), labels=NAMES)
    with pytest.raises(ValueError) as caught:
        build_learner(features, MODELS["melu"], AlgorithmConfig(name=name), "bce")
    assert str(caught.value) == (
        f"algorithm.name = '{name}' reads one label that every row has, and the dataset's are "
        "click, buy, stars. Leave it out, or prepare the data with one [label]"
    )


def test_an_algorithm_of_ones_own_may_be_called_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ALGORITHMS, "my_encoder", Algorithm(QueryLoss(True)))
    features = replace(reference.some_features(2, 1, 1), labels=NAMES)
    learner = build_learner(features, MODELS["melu"], AlgorithmConfig(name="my_encoder"), "bce")
    assert learner.encoder is None


def test_a_label_that_is_weighed_is_so_in_the_outer_loop_alone_and_a_probability() -> None:
    config = LabelsConfig(loss={"dwell": "mse"})
    found = make_objectives("bce", 1.0, config, ("click", "dwell"), ("click",))
    assert [loss.comes_late for loss in found.outer.losses] == [True, False]
    assert not any(loss.comes_late for loss in found.inner.losses)
    arguments = "bce", 1.0, config, ("click", "dwell"), ("dwell",)
    assert catch_message(ValueError, make_objectives, *arguments) == (
        'label dwell of the schema has unripe = "weigh", and the loss mse: a weight is of a '
        "probability. Give it the loss bce, or let its rows wait"
    )
