"""Adapted tasks as tensors: taken apart and put together in any order, they predict as alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from gmeta.adaptation.algorithms.registry import ALGORITHMS
from gmeta.adaptation.plain_update import LowRankUpdate, MaterialisedUpdate
from gmeta.config.algorithm import AlgorithmConfig, InnerPath
from gmeta.config.inputs import SupportFeaturesConfig
from gmeta.serving.encoded_rows import join_rows, split_rows
from gmeta.serving.served_model import ServedModel
from gmeta.serving.task_states import AdaptedTensors, TaskState, split_tasks, stack_tasks
from gmeta_models import MODELS
from tests.serving.test_state_bytes import served
from tests.support.exported import metaemb_rate, random_rows

SIZES = (5, 0, 1, 9, 3)  # support rows of each task


def cut(rows: pa.Table, sizes: tuple[int, ...]) -> list[pa.Table]:
    ends = np.cumsum((0, *sizes))
    return [rows.slice(first, size) for first, size in zip(ends, sizes, strict=False)]


@pytest.mark.parametrize("algorithm", [*sorted(ALGORITHMS), "none"])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_tasks_adapted_at_once_predict_as_alone(tmp_path: Path, model: str, algorithm: str) -> None:
    rates = AlgorithmConfig(name=algorithm, inner_steps=2, inner_lr=0.3)
    if algorithm == "metaemb":
        rate = metaemb_rate(model)
        rates = replace(
            rates,
            inner_lr=rate,
            adapt_embeddings=("city",),
            options={**rates.options, "content": ("tags",)},
        )
    assert_together_as_alone(served(tmp_path / "model", rates, model))


@pytest.mark.parametrize("embeddings", [False, True])
def test_tasks_keep_what_support_statistics_ask_for(tmp_path: Path, embeddings: bool) -> None:
    rates = AlgorithmConfig(inner_steps=2, inner_lr=0.3, adapt_embeddings=embeddings, bias_rate=0.5)
    statistics = SupportFeaturesConfig(task=True, columns=("city", "tags"), label_prior=(0.5, 0.5))
    assert_together_as_alone(served(tmp_path / "model", rates, statistics=statistics))


def assert_together_as_alone(found: ServedModel) -> None:
    support, query = random_rows(sum(SIZES), seed=1), random_rows(20, seed=2)
    supports, queries = cut(support, SIZES), cut(query, (4, 6, 1, 2, 7))
    states = found.adapt_encoded(found.encode(support, "support", True), SIZES)
    order = [3, 1, 0, 4, 2]
    parts = [found.encode(queries[task], "query", False) for task in order]
    together = found.predict_encoded(
        [states[task] for task in order], join_rows(parts), [part.num_rows for part in parts]
    )
    ends = np.cumsum([part.num_rows for part in parts])[:-1].tolist()
    moved = 0.0
    for task, mine in zip(order, together.tensor_split(ends), strict=True):
        alone = found.predict(queries[task])
        if supports[task].num_rows:
            alone = found.adapt(supports[task]).predict(queries[task])
            moved = max(moved, float((alone - found.predict(queries[task])).abs().max()))
        torch.testing.assert_close(mine, alone, rtol=0, atol=1e-6)
    assert moved > 1e-5


def test_a_state_is_as_small_as_its_task(tmp_path: Path) -> None:
    paths = AlgorithmConfig(inner_steps=1, inner_lr=0.3, layer_paths=("*=low_rank",))
    found = served(tmp_path / "model", paths)
    rows = found.encode(random_rows(10, seed=1), "support", True)
    small, large = found.adapt_encoded(rows, (1, 9))
    (alone,) = found.adapt_encoded(split_rows(rows, (1, 9))[0], (1,))
    assert small.num_bytes == alone.num_bytes < large.num_bytes
    assert all(isinstance(change, LowRankUpdate) for change in small.changes.values())
    # Tensors of their own: none is a view of the batch that it adapted with.
    assert all(
        tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        for change in small.changes.values()
        for tensor in vars(change).values()
        if isinstance(tensor, torch.Tensor)
    )


@pytest.mark.parametrize("path", ["low_rank", "materialised"])
@pytest.mark.parametrize("algorithm", ["maml", "ridge"])
def test_a_state_has_no_graph_but_bytes(tmp_path: Path, algorithm: str, path: InnerPath) -> None:
    """A layer's inputs follow from the layer before it, whose outputs took a gradient."""
    found = served(
        tmp_path / "model", AlgorithmConfig(algorithm, 1, 0.3, layer_paths=(f"*={path}",))
    )
    support, query = random_rows(6, seed=1), random_rows(4, seed=2)
    (state,) = found.adapt_encoded(found.encode(support, "support", True), [6])
    held = [value for change in state.changes.values() for value in vars(change).values()]
    of_tensors = [one for one in held if isinstance(one, torch.Tensor)]
    assert of_tensors
    assert not any(one.requires_grad for one in of_tensors)
    task = found.adapt(support)
    assert torch.equal(found.task(task.state()).predict(query), task.predict(query))


def random_state(generator: torch.Generator, kind: str, num_rows: int, keys: int) -> TaskState:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    change = {
        "low_rank": lambda: {
            "layer": LowRankUpdate(drawn(1, num_rows, 3), drawn(1, num_rows, 2), bias_rate=0.5)
        },
        "matrix": lambda: {"layer": MaterialisedUpdate(drawn(1, 3, 2), drawn(1, 1, 2))},
        "none": dict,
    }[kind]()
    return TaskState(change, {"layer": drawn(1, 1, 2)}, drawn(keys, 4), torch.arange(keys) * 3)


@pytest.mark.parametrize(
    "kinds",
    [
        ("low_rank", "low_rank", "none"), ("matrix", "none", "matrix"),
        ("low_rank", "matrix", "none", "low_rank"), ("none", "none"),
    ],
)  # fmt: skip
def test_changes_of_all_kinds_stand_side_by_side(kinds: tuple[str, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    states = [random_state(generator, kind, place + 1, place) for place, kind in enumerate(kinds)]
    tasks = stack_tasks(states)
    rows_THI = torch.randn(len(kinds), 5, 3, generator=generator, dtype=torch.float64)
    for place, state in enumerate(states):
        expected = torch.zeros(1, 5, 2, dtype=torch.float64)
        if "layer" in state.changes:
            expected = state.changes["layer"].output_change_THO(rows_THI[place : place + 1])
        if tasks.changes:
            mine = tasks.changes["layer"].output_change_THO(rows_THI)[place : place + 1]
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-13)
        assert torch.equal(tasks.gates_TJO["layer"][place : place + 1], state.gates_1JO["layer"])
        assert torch.equal(tasks.rows_PD[tasks.task_P == place], state.rows_PD)
        assert torch.equal(tasks.key_P[tasks.task_P == place], state.key_P)
    assert bool(tasks.changes) == (set(kinds) != {"none"})
    apart = split_tasks(tasks, len(kinds))
    for before, after in zip(states, apart, strict=True):
        assert torch.equal(before.rows_PD, after.rows_PD)
        if "layer" in before.changes:
            mine, its = after.changes["layer"], before.changes["layer"]
            some = rows_THI[:1]
            torch.testing.assert_close(
                mine.output_change_THO(some), its.output_change_THO(some), rtol=0, atol=1e-13
            )


def test_rows_are_cut_and_joined(tmp_path: Path) -> None:
    found = served(tmp_path / "model", AlgorithmConfig())
    rows = found.encode(random_rows(12, seed=3), "query", False)
    parts = split_rows(rows, (3, 0, 8, 1))
    assert [part.num_rows for part in parts] == [3, 0, 8, 1]
    for name, array in vars(join_rows(parts)).items():
        np.testing.assert_array_equal(array, vars(rows)[name])


def test_nothing_adapted_is_a_batch_of_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert split_tasks(AdaptedTensors({}, {}, torch.zeros(0, 4), none, none, []), 0) == []
