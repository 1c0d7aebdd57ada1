"""Ranking losses of a task's rows against loops over rows and pairs, inside the learner too."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gmeta.adaptation.layout.ragged import RowLayout
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.labels import LabelsConfig
from gmeta.losses import ranking
from gmeta.losses.objectives import Objectives
from gmeta.losses.ranking import list_grads, list_losses
from gmeta.losses.row_losses import RANKING
from tests.adaptation.agreement import assert_equals_loop
from tests.losses.test_objectives import MODELS, Labelled
from tests.support import reference

LEVELS = (0.0, 0.5, 1.0)
NAMES = ("click", "order", "stars")
CONFIGS = {
    "softmax": LabelsConfig(loss=dict.fromkeys(NAMES, "softmax"), weight={"order": 2.0}),
    "pairwise": LabelsConfig(loss=dict.fromkeys(NAMES, "pairwise"), adapt=("order", "stars")),
    "mixed": LabelsConfig(
        loss={"order": "softmax", "stars": "pairwise"}, weight={"stars": 0.5, "order": 3.0}
    ),
}


def slow_losses(kind: str, scores: Sequence[Tensor], labels: Sequence[float]) -> list[Tensor]:
    """What each row of a list adds to the sum of its losses; NaN: a label that is not known."""
    rows = [row for row, label in enumerate(labels) if not math.isnan(label)]
    total = sum(labels[row] for row in rows)
    losses = [score * 0.0 for score in scores]
    if len({labels[row] for row in rows}) < 2:
        return losses
    if kind == "softmax":
        whole = torch.stack([scores[row].exp() for row in rows]).sum()
        for row in rows:
            share = labels[row] / total
            losses[row] = -len(rows) * share * (scores[row].exp() / whole).log()
        return losses
    pairs = [(i, j) for i in rows for j in rows if labels[i] > labels[j]]
    for i, j in pairs:
        half = len(rows) / len(pairs) / 2 * (1 + (scores[j] - scores[i]).exp()).log()
        losses[i], losses[j] = losses[i] + half, losses[j] + half
    return losses


def slow_row_loss(config: LabelsConfig, names: tuple[str, ...], loss: str) -> reference.RowLoss:
    def row_loss(output: Tensor, task: reference.Task, rows: range, is_inner: bool) -> Tensor:
        outputs_NL = output.reshape(len(rows), len(names))
        weights = [1.0 if task.weight is None else task.weight[row] for row in rows]
        losses = [outputs.sum() * 0.0 for outputs in outputs_NL]
        for at, name in enumerate(names):
            labels = [torch.tensor(task.label[row]).reshape(-1)[at].item() for row in rows]
            # A row of no weight is in no list.
            labels = [label if w else math.nan for label, w in zip(labels, weights, strict=True)]
            weight = config.weight.get(name, 1.0)
            if is_inner and name not in (config.adapt or names):
                weight = 0.0
            kind = config.loss.get(name, loss)
            if kind == "bce":
                p = outputs_NL[:, at].sigmoid()
                known = [0.0 if math.isnan(y) else y for y in labels]
                found = [
                    -y * one.log() - (1 - y) * (1 - one).log()
                    for y, one in zip(known, p, strict=True)
                ]
                found = [one * (not math.isnan(y)) for one, y in zip(found, labels, strict=True)]
            else:
                found = slow_losses(kind, list(outputs_NL[:, at]), labels)
            losses = [
                before + one * w * weight
                for before, one, w in zip(losses, found, weights, strict=True)
            ]
        return torch.stack(losses) if losses else output.new_zeros(0)

    return row_loss


def compare(
    model: str, algorithm: AlgorithmConfig, config: LabelsConfig, names: tuple[str, ...],
    loss: str = "bce", unknown: float = 0.3, weighted: bool = True, seed: int = 0,
) -> None:  # fmt: skip
    # Ragged; no query or support rows, one row, and, of one label, lists of equal labels.
    sizes = [(5, 6), (1, 4), (4, 0), (0, 2), (3, 1), (2, 2)]
    assert_equals_loop(
        sizes, (2, 1, 2), MODELS[model], algorithm, loss=loss, seed=seed,
        labels=(config, Labelled(names, unknown, weighted, LEVELS),
                slow_row_loss(config, names, loss)),
    )  # fmt: skip


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("loss", RANKING)
@pytest.mark.parametrize("name", ["maml", "fomaml", "anil", "metasgd"])
@pytest.mark.parametrize("embeddings", [False, True])
def test_the_fast_loop_ranks_a_label_as_the_loop(loss: str, name: str, embeddings: bool) -> None:
    algorithm = AlgorithmConfig(
        name=name, inner_steps=2, adapt_embeddings=embeddings, support_prior=0.5
    )
    compare("melu", algorithm, LabelsConfig(), ("order",), loss)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    model=st.sampled_from(sorted(MODELS)),
    name=st.sampled_from(("maml", "fomaml", "anil", "reptile", "metasgd", "none")),
    config=st.sampled_from(sorted(CONFIGS)), unknown=st.sampled_from([0.0, 0.5]),
    weighted=st.booleans(), steps=st.integers(1, 2), embeddings=st.booleans(),
    seed=st.integers(0, 1_000),
)  # fmt: skip
def test_every_model_and_algorithm_ranks_several_labels_as_the_loop_does(
    model: str, name: str, config: str, unknown: float, weighted: bool, steps: int,
    embeddings: bool, seed: int,
) -> None:  # fmt: skip
    algorithm = AlgorithmConfig(
        name=name, inner_steps=steps, adapt_embeddings=embeddings, support_prior=0.5
    )
    compare(model, algorithm, CONFIGS[config], NAMES, "bce", unknown, weighted, seed)


@pytest.mark.parametrize("kind", RANKING)
def test_losses_and_slopes_are_those_of_the_definition_twice_differentiable(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that lists are cut, and the rows of the longest too.
    monkeypatch.setattr(ranking, "MOST_PAIRS", 20)
    lengths, rng = [7, 1, 3, 0, 5, 2], torch.Generator().manual_seed(1)
    layout = RowLayout.of(torch.tensor(lengths))
    output_N = torch.randn(18, dtype=torch.float64, generator=rng, requires_grad=True)
    label_N = torch.randint(0, 3, (18,), generator=rng).double()
    weight_N = torch.rand(18, dtype=torch.float64, generator=rng)
    weight_N[[2, 8, 12]] = 0.0
    expected, first = [], 0
    for length in lengths:
        labels = [
            label if w else math.nan
            for label, w in zip(
                label_N[first : first + length].tolist(),
                weight_N[first : first + length].tolist(),
                strict=True,
            )
        ]
        expected += slow_losses(kind, list(output_N[first : first + length]), labels)
        first += length
    expected_N = torch.stack(expected)
    found_N = list_losses(kind, output_N, label_N, weight_N, layout)
    torch.testing.assert_close(found_N, expected_N, rtol=0, atol=1e-12)
    slopes_N, written_N = (
        torch.autograd.grad((of_N * weight_N).sum(), output_N, create_graph=True)[0]
        for of_N in (expected_N, found_N)
    )
    by_hand_N = list_grads(kind, output_N, label_N, weight_N, layout)
    towards_N = torch.randn(18, dtype=torch.float64, generator=rng)
    curvature_N = torch.autograd.grad((slopes_N * towards_N).sum(), output_N)[0]
    for one_N in (written_N, by_hand_N):
        torch.testing.assert_close(one_N, slopes_N, rtol=0, atol=1e-12)
        found_N = torch.autograd.grad((one_N * towards_N).sum(), output_N)[0]
        torch.testing.assert_close(found_N, curvature_N, rtol=0, atol=1e-12)


def test_the_slopes_of_pairs_are_differentiable_by_the_weights_of_their_rows() -> None:
    layout = RowLayout.of(torch.tensor([3, 4]))
    output_N = torch.randn(7, dtype=torch.float64, requires_grad=True)
    label_N = torch.tensor([0.0, 1, 2, 1, 0, 1, 0], dtype=torch.float64)
    weight_N = torch.rand(7, dtype=torch.float64).add(0.1).requires_grad_()

    def slopes(output_N: Tensor, weight_N: Tensor) -> Tensor:
        return list_grads("pairwise", output_N, label_N, weight_N, layout)

    assert torch.autograd.gradcheck(slopes, (output_N, weight_N))


@pytest.mark.parametrize("kind", RANKING)
@pytest.mark.parametrize("labels", [[1.0], [1.0, 1.0, 1.0], [0.0, 0.0], []])
def test_a_list_that_says_nothing_of_order_has_loss_0(kind: str, labels: list[float]) -> None:
    layout = RowLayout.of(torch.tensor([len(labels)]))
    output_N = torch.randn(len(labels), requires_grad=True)
    label_N = torch.tensor(labels)
    losses_N = list_losses(kind, output_N, label_N, torch.ones(len(labels)), layout)
    (slopes_N,) = torch.autograd.grad(losses_N.sum(), output_N)
    assert losses_N.tolist() == [0.0] * len(labels)
    assert slopes_N.tolist() == [0.0] * len(labels)


@pytest.mark.parametrize("kind", RANKING)
def test_scores_that_lie_far_apart_have_finite_losses_and_slopes(kind: str) -> None:
    layout = RowLayout.of(torch.tensor([3]))
    output_N = torch.tensor([-3e4, 0.0, 5e4], requires_grad=True)
    label_N, weight_N = torch.tensor([1.0, 0.0, 0.0]), torch.ones(3)
    losses_N = list_losses(kind, output_N, label_N, weight_N, layout)
    (slopes_N,) = torch.autograd.grad(losses_N.sum(), output_N, create_graph=True)
    (curvatures_N,) = torch.autograd.grad(slopes_N.square().sum(), output_N)
    assert losses_N.sum() > 1e4
    assert slopes_N.isfinite().all()
    assert curvatures_N.isfinite().all()


@pytest.mark.parametrize("kind", RANKING)
def test_what_an_encoder_reads_of_a_row_is_the_way_in_which_the_loss_pulls_it(kind: str) -> None:
    layout, losses = RowLayout.of(torch.tensor([4])), Objectives.of(kind).outer
    output_N = torch.randn(4, dtype=torch.float64, requires_grad=True)
    label_N = torch.tensor([0.0, 1.0, 1.0, 0.0])
    weight_N = torch.tensor([2.0, 0.5, 0.0, 1.0])
    loss = list_losses(kind, output_N, label_N, weight_N, layout).sum()
    (slopes_N,) = torch.autograd.grad(loss, output_N)
    torch.testing.assert_close(losses.errors(output_N, label_N, weight_N, layout), -slopes_N)


@pytest.mark.parametrize("kind", RANKING)
def test_the_prediction_of_a_ranking_loss_is_the_score_as_it_is(kind: str) -> None:
    scores_N = torch.tensor([-3.0, 0.5, 40.0])
    assert torch.equal(Objectives.of(kind).outer.predictions(scores_N), scores_N)
