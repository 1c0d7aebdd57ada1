"""Batches arranged in few shapes: the step of the others, and how few the shapes are."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gmeta.adaptation.layout.padded_layout import PaddedTasks
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.data.buckets import ROWS, ROWS_OF_LONG, TASKS, SizeSeries
from gmeta.data.cuda_graphs import graph_key
from gmeta.data.episodes import Episodes
from gmeta.data.task_groups import RECTANGLE_WORK
from gmeta.learner import MetaLearner
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from tests.pretended.learner_steps import HOST, Case, all_cases, distance, learner_of, step_of
from tests.support import reference

# Those that the fast loop takes, each in buckets and not.
CASES = [
    case
    for case in all_cases()
    if not case.general
    and case.mode != "predict"
    and case.precision == "float32"
    and not case.buckets
    if learner_of(case).route == "fused"
]
SMALL = ModelConfig(name="melu", embedding_dim=4, hidden=(6, 5), options={"bottom": (3,)})


@given(
    size=st.integers(1, 10**9),
    series=st.builds(
        SizeSeries, st.sampled_from([1, 8, 4096]), st.sampled_from([1, 2, 4]),
        st.sampled_from([16, 1 << 62]),
    ),
)  # fmt: skip
def test_a_size_goes_up_to_the_next_of_a_geometric_series(size: int, series: SizeSeries) -> None:
    rounded = series.round_up(size)
    assert size <= rounded == series.round_up(rounded)
    steps = series.steps if max(size, series.least) <= series.fine else 1
    if size > series.least:
        assert rounded < size * (1 + 1 / steps) + 1
    # The slow way: all that there are around it, and none lies between.
    octave = 2 ** (rounded.bit_length() - 1)
    there = {
        max(of + of * step // steps, series.least)
        for of in (octave // 2, octave)
        for step in range(steps + 1)
    }
    assert rounded == min(one for one in there if one >= size)


def test_nothing_stays_nothing_and_many_are_rounded_as_one() -> None:
    sizes = np.array([0, 1, 8, 9, 13, 16, 17, 1000])
    assert ROWS.round_up_all(sizes).tolist() == [0, 8, 8, 10, 14, 16, 20, 1024]
    assert ROWS_OF_LONG.round_up_all(sizes).tolist() == [0, 8, 8, 10, 14, 16, 32, 1024]
    assert [TASKS.round_up(size) for size in (100, 128, 129)] == [112, 128, 160]


@pytest.fixture(params=["apart", "not apart"])
def _common_features(request: pytest.FixtureRequest) -> Iterator[None]:
    """What tasks share stands apart, or nothing does."""
    work = {"cpu": 1 if request.param == "apart" else 10**18}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gmeta.data.collate.LEAST_COMMON_WORK", work)
        yield


@pytest.mark.usefixtures("_common_features")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_step_in_buckets_is_the_step(case: Case) -> None:
    expected, _, _ = step_of(case, HOST)
    found, _, _ = step_of(replace(case, buckets=True), HOST)
    assert 0 < distance(expected, found) < 1e-12  # exactly 0: nothing was padded


def test_a_step_in_buckets_is_the_step_in_float32_too() -> None:
    learner = learner_of(Case("dlrm", "maml")).float()
    batch = batch_of(learner, sizes(seed=0)).map(
        lambda one: one.float() if one.is_floating_point() else one
    )
    rows_UD = torch.randn(batch.unique_ids_U.numel(), 8, requires_grad=True)
    wanted, grads = [rows_UD, *learner.parameters()], []
    for learner.in_buckets in (False, True):
        episodes = learner.collate(batch)
        loss = learner(rows_UD, episodes, 1 / episodes.num_terms)
        grads.append([loss, *torch.autograd.grad(loss, wanted)])
    assert distance(*grads) < 1e-6


@pytest.mark.parametrize("everything", [True, False])
def test_a_batch_without_any_id_is_taken_as_it_is(everything: bool) -> None:
    """As where all features are lists, and all of these empty."""
    features = reference.some_features(0, 2, 1)
    config = AlgorithmConfig(name="maml", adapt_embeddings=everything)
    learner = build_learner(features, SMALL, config, "bce").double()
    tasks = [
        replace(task, multi=[[[], []] for _ in task.multi])
        for task in (reference.random_task(features, *one, random.Random(0)) for one in [(3, 2)])
    ]
    batch = reference.batch_of(tasks, features)
    rows_UD, losses = torch.zeros(0, 4, dtype=torch.float64, requires_grad=True), []
    for learner.in_buckets in (False, True):
        losses.append(learner(rows_UD, learner.collate(batch), 1.0))
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)


def sizes(seed: int, num_tasks: int = 24) -> list[tuple[int, int]]:
    """Support and query rows of ragged tasks; some have no query row, and count in no batch."""
    rng = random.Random(seed)
    return [(rng.randint(0, 15), rng.choice([0, *range(2, 17)])) for _ in range(num_tasks)]


def batch_of(learner: MetaLearner, of_tasks: list[tuple[int, int]]) -> reference.TaskBatch:
    rng = random.Random(len(of_tasks))
    features = reference.some_features(3, 2, 2)
    return reference.batch_of(
        [reference.random_task(features, *one, rng) for one in of_tasks], features
    )


def arranged_run(in_buckets: bool) -> list[Episodes]:
    """Forty ragged batches, the last of each epoch of ten a smaller one."""
    torch.manual_seed(0)
    algorithm = AlgorithmConfig(name="maml", adapt_embeddings=True)
    learner = build_learner(reference.some_features(3, 2, 2), SMALL, algorithm, "bce")
    learner.in_buckets = in_buckets
    return [learner.collate(batch_of(learner, sizes(at, 24 if at % 10 else 7))) for at in range(40)]


def test_a_ragged_run_has_at_most_a_dozen_shapes() -> None:
    shapes = Counter(graph_key(episodes) for episodes in arranged_run(in_buckets=True))
    assert len(shapes) <= 12
    assert len({graph_key(episodes) for episodes in arranged_run(in_buckets=False)}) == 40
    # What few shapes cost: this many rows pad.
    shares = [
        episodes.rows.padded_share
        for episodes in arranged_run(in_buckets=True)
        if isinstance(episodes.rows, PaddedTasks)
    ]
    assert len(shares) == 40
    assert sum(shares) / len(shares) < 0.6


def test_a_batch_whose_lists_have_one_value_at_most_has_the_shape_of_others() -> None:
    """On a GPU, where the gradients of rows are added as they come."""
    features = reference.some_features(2, 1, 1)
    algorithm = AlgorithmConfig(name="maml", adapt_embeddings=False)
    model = replace(SMALL, pooling="sum")
    learner = build_learner(features, model, algorithm, "bce")
    learner.in_buckets = True
    shapes = []
    for longest in (3, 1, 0):
        tasks = [reference.random_task(features, 3, 2, random.Random(at)) for at in range(4)]
        tasks = [
            replace(task, multi=[[ids[:longest] for ids in side] for side in task.multi])
            for task in tasks
        ]
        batch = reference.batch_of(tasks, features)
        assert batch.multi_lengths_NM.max() == longest
        with patch("gmeta.adaptation.fused.fused_loop.kind_of_device", return_value="cuda"):
            shapes.append(graph_key(learner.collate(batch)))
    assert shapes == shapes[:1] * 3


@pytest.mark.parametrize(
    ("of_tasks", "support", "query"),
    [
        ([(4, 4)] * 30 + [(3000, 2000)], [(24, 8), (8, 4096)], [(24, 8), (8, 2048)]),
        # Where a cut saves nothing there is none.
        ([(4, 4)] * 31, [(32, 8)], [(32, 8)]),
        ([(0, 3)] * 24 + [(90, 3)] * 8, [(24, 0), (8, 128)], [(24, 8), (8, 8)]),
        # Behind seven that pad.
        ([(1, 600)], [(8, 8)], [(8, 1024)]),
    ],
)
def test_long_tasks_stand_in_a_rectangle_of_their_own(
    of_tasks: list[tuple[int, int]], support: list[tuple[int, int]], query: list[tuple[int, int]]
) -> None:
    rows = _arranged(learner_of(Case("melu", "maml")), of_tasks)[1].rows
    assert isinstance(rows, PaddedTasks)
    assert [mine[1:] for mine in rows.support.rectangles] == support
    assert [mine[1:] for mine in rows.query.rectangles] == query


def _arranged(
    learner: MetaLearner, of_tasks: list[tuple[int, int]], in_buckets: bool = True
) -> tuple[reference.TaskBatch, Episodes]:
    """A batch of these tasks, arranged as if a rectangle cost nothing."""
    batch = batch_of(learner, of_tasks)
    learner.in_buckets = in_buckets
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECTANGLE_WORK, "cuda", 1)
        return batch, learner.collate(batch)


def test_a_step_of_several_rectangles_is_the_step() -> None:
    """Tasks without support rows have a rectangle without any."""
    sizes_T = [(0, 3)] * 24 + [(random.Random(at).randint(1, 90), 2) for at in range(8)]
    learner, grads = learner_of(Case("melu", "maml", everything=True)), []
    for in_buckets in (False, True):
        batch, episodes = _arranged(learner, sizes_T, in_buckets)
        rows_UD = torch.ones(batch.unique_ids_U.numel(), 8, dtype=torch.float64).cumsum(0).sin()
        wanted = [rows_UD.requires_grad_(), *learner.parameters()]
        loss = learner(rows_UD, episodes, 1 / episodes.num_terms)
        grads.append([loss, *torch.autograd.grad(loss, wanted)])
    assert isinstance(episodes.rows, PaddedTasks)
    assert [one.rows for one in episodes.rows.support.rectangles] == [0, 128]
    assert distance(*grads) < 1e-12
