"""Steps as graphs: the eager steps, from one capture a shape."""

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.data import cuda_graphs as graphs
from gmeta.data.accumulate import accumulate_loss
from gmeta.data.collate import collate_in_parts
from gmeta.data.cuda_graphs import CudaCapture, graph_key
from gmeta.data.transfer import TensorPlace, lay_out, map_tree, pack
from gmeta.errors import GMetaError
from gmeta.learner import MetaLearner
from gmeta.platform.numerics import autocast
from gmeta.runs.build import build_learner
from tests.data.test_buckets import CASES, SMALL
from tests.pretended.learner_steps import WIDTH, Case, batch_of_sizes, distance, learner_of
from tests.support import reference
from tests.support.refusals import catch_message
from tests.support.tape import TapeCapture

LEARNT = [case for case in CASES if case.mode == "train"]


def batches_of(case: Case, number: int) -> list[reference.TaskBatch]:
    """Ragged batches that share one shape in buckets; their ids and their sizes differ."""
    rng = random.Random(3)
    found = []
    for _ in range(number):
        sizes = [(rng.randint(1, 8), rng.randint(1, 8)) for _ in range(4 + rng.randint(0, 4))]
        found.append(batch_of_sizes(case, sizes, rng))
    return found


def in_float64(batch: reference.TaskBatch) -> reference.TaskBatch:
    return batch.map(lambda one: one.double() if one.is_floating_point() else one)


def step(
    learner: MetaLearner, batch: reference.TaskBatch, take: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """Loss and gradients of a step of rows that only its batch decides."""
    dtype = next(learner.parameters()).dtype
    batch = batch.map(lambda one: one.to(dtype) if one.is_floating_point() else one)
    generator = torch.Generator().manual_seed(batch.num_rows)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), WIDTH, generator=generator).to(dtype) * 0.1
    rows_UD.requires_grad_()
    episodes = learner.collate(batch)
    # A power of two: it is the same at the start of backward and behind it, in bfloat16 too.
    loss = (take or MetaLearner.__call__)(learner, rows_UD, episodes, 0.25)
    wanted = [rows_UD, *(layer for layer in learner.parameters() if layer.requires_grad)]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return [loss.detach(), *grads]


def with_graphs(case: Case) -> tuple[MetaLearner, TapeCapture]:
    learner, capture = learner_of(replace(case, buckets=True)).double(), TapeCapture()
    assert learner.use_graphs(capture) == ""
    return learner, capture


@pytest.mark.parametrize("case", LEARNT, ids=[case.name for case in LEARNT])
def test_replayed_steps_are_the_eager_ones(case: Case) -> None:
    eager, (learner, capture) = learner_of(case).double(), with_graphs(case)
    for place, batch in enumerate(batches_of(case, 4)):
        assert distance(step(eager, batch), step(learner, batch)) < 1e-12
        # The first of a shape is eager, the second is captured, and replayed as all behind it.
        assert (len(capture.tapes), capture.replays) == (min(place, 1), place)
        with torch.no_grad():  # an optimizer's step, in place
            for mine, other in zip(learner.parameters(), eager.parameters(), strict=True):
                mine.mul_(1.1)
                other.mul_(1.1)


def test_a_step_copies_its_inputs_replays_and_reads() -> None:
    learner, capture = with_graphs(Case("melu", "maml"))
    first, second, third = batches_of(Case("melu", "maml"), 3)
    step(learner, first)
    step(learner, second)
    order: list[str] = []
    rows_UD = torch.randn(third.unique_ids_U.numel(), WIDTH, dtype=torch.float64)
    episodes = learner.collate(in_float64(third))
    (held,) = pack([episodes.inputs], pin_memory=False)
    episodes = replace(episodes, held=held)
    tape = capture.tapes[0]

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            order.append(func._schema.name.removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    with pytest.MonkeyPatch.context() as patch, Noting():
        patch.setattr(tape, "replay", lambda: order.append("the graph"))
        learner(rows_UD.requires_grad_(), episodes, 1.0)
    kernels = [name for name in order if name not in ("detach", "slice", "alias", "view_as")]
    # The rows, then what the batch is made of.
    copies = kernels[: kernels.index("the graph")]
    assert copies == ["copy_", "copy_"]
    assert kernels[kernels.index("the graph") :] == ["the graph", "clone", "mul"]


def test_each_shape_has_its_graph_and_their_steps_may_alternate() -> None:
    case = Case("melu", "fomaml")
    eager, (learner, capture) = learner_of(case).double(), with_graphs(case)
    small, features = batches_of(case, 2), reference.some_features(3, 2, 2)
    rng = random.Random(5)
    large = [
        reference.batch_of([reference.random_task(features, rows, 12, rng)] * 9, features)
        for rows in (15, 16)
    ]
    shapes = [graph_key(learner.collate(batch)) for batch in (*small, *large)]
    assert shapes[0] == shapes[1] != shapes[2] == shapes[3]
    for batch in (small[0], large[0], small[1], large[1], small[0], large[0]):
        assert distance(step(eager, batch), step(learner, batch)) < 1e-12
    assert (len(capture.tapes), capture.replays) == (2, 4)


def test_the_parts_of_a_step_replay_one_graph() -> None:
    case = Case("melu", "maml", everything=True)
    eager, (learner, capture) = learner_of(case).double(), with_graphs(case)
    for batch in batches_of(case, 3):

        def parts(learner: MetaLearner, rows_UD: Tensor, _: Any, weight: float) -> Tensor:
            arranged = collate_in_parts(learner.collate, 2)(batch)  # noqa: B023 - called at once
            return accumulate_loss(learner, rows_UD, arranged, weight)

        assert distance(step(eager, batch, parts), step(learner, batch, parts)) < 1e-12
    assert capture.replays > len(capture.tapes) > 0


def test_a_captured_step_is_in_bfloat16_as_the_eager_one() -> None:
    case = Case("dlrm", "maml")
    eager, (learner, capture) = learner_of(case), with_graphs(case)
    learner.float()

    def half(learner: MetaLearner, *rest: Any) -> Tensor:
        with autocast("bf16", torch.device("cpu")):
            return learner(*rest)

    for batch in batches_of(case, 3):
        eager.in_buckets = True  # another padding adds up in another order
        assert distance(step(eager, batch, half), step(learner, batch, half)) < 1e-6
    assert capture.replays == 2
    step(learner, batch)  # in float32 it is another graph's
    step(learner, batch)
    assert len(capture.tapes) == 2


# Every fourth, and each encoder of events.
TRACED = [case for at, case in enumerate(LEARNT) if at % 4 == 0 or case.events]


@pytest.mark.parametrize("case", TRACED, ids=[case.name for case in TRACED])
def test_the_captured_function_is_one_trace_of_tensors_without_values(case: Case) -> None:
    """What fake tensors trace serves another batch: no shape or branch came from a value."""
    learner, _ = with_graphs(case)
    traced, *others = batches_of(case, 3)
    module = learner._graphs._module
    found = None
    for batch in (traced, *others):
        arranged = learner.collate(in_float64(batch))
        tensors = [tensor for _, tensor in lay_out(arranged.inputs)[1]]
        rows_UD = torch.randn(arranged.num_fetched, WIDTH, dtype=torch.float64)

        def pure(rows_UD: Tensor, *tensors: Tensor) -> Any:
            layout, places = lay_out(arranged.inputs)  # noqa: B023
            at = {place: one for (place, _), one in zip(places, tensors, strict=True)}
            inputs = map_tree(layout.tree, at.__getitem__, TensorPlace)
            static = replace(arranged, held=inputs)  # noqa: B023
            return graphs._loss_and_gradients(module, rows_UD, static)

        # As a shape's first batch is eager: it makes what is kept for all, as weights of labels.
        expected = pure(rows_UD, *tensors)
        if found is None:
            found = make_fx(pure, tracing_mode="fake", _allow_non_fake_inputs=True)(
                rows_UD, *tensors
            )
            names = {str(node.target) for node in found.graph.nodes}
            assert not any("_local_scalar_dense" in name or "nonzero" in name for name in names)
        for one, other in zip(expected, found(rows_UD, *tensors), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_gradients_behind_another_replay_are_refused() -> None:
    learner, _ = with_graphs(Case("melu", "maml"))
    batch = batches_of(Case("melu", "maml"), 1)[0]
    step(learner, batch)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), WIDTH, dtype=torch.float64)
    episodes = learner.collate(in_float64(batch))
    first, _ = (learner(rows_UD.requires_grad_(), episodes, 1.0) for _ in range(2))
    with pytest.raises(RuntimeError, match="of replay 1 are gone: replay 2 has taken their place"):
        first.backward()


def test_shapes_beyond_the_most_are_eager_and_it_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 0)
    learner, capture = with_graphs(Case("melu", "maml"))
    with caplog.at_level(logging.WARNING):
        for batch in batches_of(Case("melu", "maml"), 4):
            step(learner, batch)
    assert capture.tapes == []
    assert caplog.messages == [
        "run.cuda_graphs: 0 shapes have a graph, and batches of more come twice: the others are "
        "taken eagerly"
    ]


def test_a_step_that_cannot_be_captured_ends_the_run_with_one_line() -> None:
    def refused(_: object) -> Any:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        finally:  # as torch.cuda.graph, once its capture is broken off
            raise RuntimeError("operation failed due to a previous error during capture")

    learner = learner_of(Case("melu", "maml", buckets=True)).double()
    assert learner.use_graphs(refused) == ""
    first, second = batches_of(Case("melu", "maml"), 2)
    step(learner, first)
    assert catch_message(GMetaError, step, learner, second) == (
        "CUDA cannot capture the step as a graph: operation not permitted when stream is "
        'capturing. Set run.cuda_graphs = "off" and --resume'
    )


def test_events_are_captured_unless_they_are_drawn_or_shared() -> None:
    case = Case("melu", "maml", buckets=True, events="sasrec")
    learner = learner_of(case)
    assert learner.events is not None
    dropout, learner.events.dropout = learner.events.dropout, nn.Dropout(0.1)
    assert learner.use_graphs(CudaCapture()) == (
        "model.event_options.dropout draws anew in each step"
    )
    learner.events.dropout = dropout
    learner.events.over_ranks = NoRanks()
    assert learner.use_graphs(CudaCapture()) == (
        "tasks of many events are encoded together with other ranks"
    )


class NoRanks:
    """Stands for other ranks, which are never asked."""


class OwnModel(nn.Module):
    """Nobody knows what it does."""


@pytest.mark.parametrize(
    ("algorithm", "own", "in_buckets", "why"),
    [
        ("reptile", False, True, "reptile adapts this model in the general loop"),
        ("none", False, True, "none adapts this model in the general loop"),
        ("maml", True, True, "OwnModel is no part of gmeta, and may read values or draw them"),
        ("maml", False, False, "batches are not arranged in few shapes (run.shape_buckets)"),
    ],
)
def test_where_a_graph_is_not_safe_the_learner_says_why(
    algorithm: str, own: bool, in_buckets: bool, why: str
) -> None:
    features = reference.some_features(1, 0, 0)
    learner = build_learner(features, SMALL, AlgorithmConfig(name=algorithm), "bce")
    learner.in_buckets = in_buckets
    if own:
        learner.model.add_module("own", OwnModel())
    assert learner.use_graphs(CudaCapture()) == why
    assert learner._graphs is None
