"""Events encoded once a task say what they would say of each row encoded on its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.data.augment import drop_ids
from gmeta.data.event_layout import EventColumns
from gmeta.data.transfer import lay_out
from gmeta.learner import MetaLearner
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from gmeta_models.sequence.encoder import StateEncoder
from metaio import open_dataset
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose
from tests.metaio.prepare.test_events import log, prepared, schema

WIDTH = 8
ENCODERS = {
    "sasrec": {"dropout": 0.0},
    "sasrec, linear": {"attention": "linear"},
    "hstu": {},
    "din": {},
    "sim": {"newest": 5, "category": "kind"},
    "sim, hash": {"newest": 5, "search": "hash"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TaskBatch]:
    body = schema(dense=[{"column": "number", "standardise": True}])
    dataset = open_dataset(prepared(tmp_path_factory.mktemp("events"), log(), body))
    block = dataset.read_block("train", 0)
    return dataset.features, compose(dataset.features, [(block, np.arange(block.num_episodes))])


def learner_of(features: Any, encoder: str, algorithm: str = "none", **model: Any) -> MetaLearner:
    torch.manual_seed(3)
    config = ModelConfig(
        **{"name": "melu", "embedding_dim": WIDTH, "hidden": (12, 6), **model},
        events=encoder.split(",")[0],  # type: ignore[arg-type]
        event_options=ENCODERS[encoder],
    )
    learner = build_learner(features, config, AlgorithmConfig(name=algorithm, inner_lr=0.1), "bce")
    assert learner.events is not None
    with torch.no_grad():
        # What begins as 0 says something, too.
        for weight in learner.events.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return learner.double()


def fetched(batch: TaskBatch) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = batch.unique_ids_U.numel(), WIDTH
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def vectors(learner: MetaLearner, batch: TaskBatch, rows_UD: Tensor) -> Tensor:
    assert learner.events is not None
    assert learner.event_columns is not None
    found: Tensor = learner.events(learner.event_columns.lay_out(batch), rows_UD).inputs_NX()
    return found


def alone(batch: TaskBatch, task: int, row: int) -> TaskBatch:
    """A batch of one row and the events that it knows."""
    own = batch.tasks(task, task + 1)
    known = int(own.events_before_N[row])
    return TaskBatch(
        **{
            **vars(own),
            "row_offsets_T1": torch.tensor([0, 1]),
            "support_lengths_T": torch.tensor([0]),
            **{
                name: getattr(own, name)[row : row + 1]
                for name in ("label_N", "dense_NK", "positions_NF", "events_before_N")
            },
            "multi_lengths_NM": own.multi_lengths_NM[row : row + 1],
            "num_events_T": torch.tensor([known]),
            "event_positions": own.event_positions[:known],
            "event_numbers": own.event_numbers[:known],
        }
    )


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_row_reads_what_it_would_read_alone(data: tuple[Any, TaskBatch], encoder: str) -> None:
    features, batch = data
    learner, rows_UD = learner_of(features, encoder), fetched(batch)
    together = vectors(learner, batch, rows_UD)
    assert together.shape == (batch.num_rows, 2 * WIDTH)
    num_known = 0
    for task in range(0, batch.num_tasks, 5):
        first, stop = batch.row_offsets_T1[task : task + 2].tolist()
        for row in range(0, stop - first, 3):
            one = alone(batch, task, row)
            num_known += int(one.num_events_T)
            found = vectors(learner, one, rows_UD)
            torch.testing.assert_close(found[0], together[first + row], rtol=1e-9, atol=1e-9)
    assert num_known > 100


@pytest.mark.parametrize("encoder", ENCODERS)
def test_later_events_change_nothing(data: tuple[Any, TaskBatch], encoder: str) -> None:
    features, batch = data
    learner, rows_UD = learner_of(features, encoder), fetched(batch)
    before = vectors(learner, batch, rows_UD)
    # Behind what the middle row of each task knows, all events change.
    changed, first_event = batch.event_positions.clone(), 0
    middles = []
    for task in range(batch.num_tasks):
        first, stop = batch.row_offsets_T1[task : task + 2].tolist()
        middle = (first + stop) // 2
        middles.append((first, middle))
        known, count = int(batch.events_before_N[middle]), int(batch.num_events_T[task])
        own = slice(first_event + known, first_event + count)
        changed[own] = changed[own].flip(0)
        first_event += count
    other = TaskBatch(**{**vars(batch), "event_positions": changed})
    after = vectors(learner, other, rows_UD)
    for first, middle in middles:
        known_N = batch.events_before_N[first : middle + 1] <= batch.events_before_N[middle]
        torch.testing.assert_close(
            after[first : middle + 1][known_N], before[first : middle + 1][known_N]
        )
    assert not torch.allclose(after, before)


def test_category_search_finds_the_newest_of_the_targets_kind(data: tuple[Any, TaskBatch]) -> None:
    features, batch = data
    columns = learner_of(features, "sim").event_columns
    assert columns is not None
    (found,) = columns.lay_out(batch).rectangles
    starts = np.concatenate([[0], np.cumsum(batch.num_events_T.numpy())])
    position_EC = batch.event_positions.numpy()
    num_found = 0
    for task in range(batch.num_tasks):
        for row in range(*batch.row_offsets_T1[task : task + 2].tolist()):
            own = position_EC[starts[task] : starts[task] + int(batch.events_before_N[row])]
            kind = int(batch.positions_NF[row, columns.target[columns.category]])
            wanted = own[own[:, columns.category] == kind][-5:]
            num = int(found.num_events_T[row])
            np.testing.assert_array_equal(found.position_THM[row, :num], wanted)
            num_found += num
    assert num_found > batch.num_rows


@pytest.mark.parametrize("encoder", ["sasrec", "sasrec, linear", "hstu"])
def test_appended_events_make_the_states_of_a_fresh_pass(
    data: tuple[Any, TaskBatch], encoder: str
) -> None:
    features, _ = data
    states = learner_of(features, encoder).events
    assert isinstance(states, StateEncoder)
    events, seconds = torch.randn(2, 11, WIDTH).double(), torch.rand(2, 11).double().cumsum(1) * 50
    whole, _ = states.states_THD(events, seconds)
    first, past = states.states_THD(events[:, :6], seconds[:, :6])
    second, past = states.states_THD(events[:, 6:10], seconds[:, 6:10], past)
    last, _ = states.states_THD(events[:, 10:], seconds[:, 10:], past)
    torch.testing.assert_close(torch.cat([first, second, last], dim=1), whole)


@pytest.mark.parametrize("algorithm", ["maml", "fomaml"])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_the_fused_loop_is_the_general_one(
    data: tuple[Any, TaskBatch], encoder: str, algorithm: str
) -> None:
    features, batch = data
    found = []
    for is_general in (False, True):
        learner = learner_of(features, encoder, algorithm)
        assert learner.route == "fused"
        if is_general:
            learner.use_general_loop()
        rows_UD = fetched(batch).requires_grad_()
        loss = learner(rows_UD, learner.collate(batch), 1.0)
        loss.backward()
        grads = {name: weight.grad for name, weight in learner.named_parameters()}
        found.append((loss, rows_UD.grad, grads))
    (loss, rows, grads), (other, other_rows, other_grads) = found
    torch.testing.assert_close(loss, other)
    torch.testing.assert_close(rows, other_rows)
    assert grads.keys() == other_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, other_grads[name], rtol=1e-6, atol=1e-9)
    of_encoder = [grad for name, grad in grads.items() if name.startswith("events.")]
    assert of_encoder
    assert sum(float(grad.abs().sum()) > 0 for grad in of_encoder if grad is not None) > 2


@pytest.mark.parametrize("is_general", [False, True])
@pytest.mark.parametrize("encoder", ["sasrec", "din", "sim"])
def test_a_table_left_out_of_the_model_is_read_by_the_events(
    data: tuple[Any, TaskBatch], encoder: str, is_general: bool
) -> None:
    features, batch = data
    place = [one.name for one in features.single].index("item")
    left_out = learner_of(features, encoder, "anil", without=("item",))
    # The obvious way: a model whose first layer has weights of 0 for the item, and adapts the last.
    zeros = learner_of(features, encoder, "anil")
    with torch.no_grad():
        # Behind the inputs, as the embeddings stand first: one width for each feature.
        own = slice(place * WIDTH, (place + 1) * WIDTH)
        zeros.model.get_submodule("decision.0").weight[:, own] = 0.0
    found = []
    for learner in (left_out, zeros):
        if is_general:
            learner.use_general_loop()
        rows_UD = fetched(batch).requires_grad_()
        loss = learner(rows_UD, learner.collate(batch), 1.0)
        (grads_UD,) = torch.autograd.grad(loss, [rows_UD])
        after_N = learner.predict(rows_UD, learner.collate_to_predict(batch)).after_N
        found.append((loss, grads_UD, after_N))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    first = int(batch.unique_lengths_B[: features.table_of_single[place]].sum())
    assert found[0][1][first].any() or found[0][1][first + 1].any()


def test_a_model_that_reads_no_events_is_not_changed_by_them(data: tuple[Any, TaskBatch]) -> None:
    features, batch = data
    torch.manual_seed(0)
    config = ModelConfig(name="melu", embedding_dim=WIDTH, hidden=(12, 6))
    learner = build_learner(features, config, AlgorithmConfig(name="maml"), "bce").double()
    assert learner.event_columns is None
    loss = learner(fetched(batch), learner.collate(batch), 1.0)
    none = TaskBatch(
        **{
            name: value
            for name, value in vars(batch).items()
            if name not in ("num_events_T", "event_positions", "event_numbers", "events_before_N")
        }
    )
    assert torch.equal(loss, learner(fetched(batch), learner.collate(none), 1.0))


def test_a_dataset_without_events_cannot_be_read_for_them(tmp_path: Path) -> None:
    body = schema()
    del body["events"]
    features = open_dataset(prepared(tmp_path, log(), body)).features
    with pytest.raises(ValueError, match="the dataset stores no events"):
        EventColumns.of(features, ModelConfig(events="sasrec"))


def test_dropped_ids_are_dropped_from_events_too(tmp_path: Path) -> None:
    dataset = open_dataset(prepared(tmp_path, log(), schema()))
    block = dataset.read_block("train", 0)
    batch = compose(dataset.features, [(block, np.arange(block.num_episodes))])
    found = drop_ids(batch, 0.5, np.ones(len(dataset.features.tables), np.bool_), key=3)
    before = batch.unique_ids_U[batch.event_positions.long()]
    after = found.unique_ids_U[found.event_positions.long()]
    assert ((after == before) | (after == 0)).all()
    assert 0.2 < (after == before).float().mean() < 0.8


@pytest.mark.parametrize("encoder", ENCODERS)
def test_events_in_buckets_are_the_events(data: tuple[Any, TaskBatch], encoder: str) -> None:
    features, batch = data
    learner, rows_UD = learner_of(features, encoder), fetched(batch)
    assert learner.events is not None
    assert learner.event_columns is not None
    # Some tasks have many events, and fill a rectangle of their own.
    for some in (batch, batch.tasks(0, 1), batch.tasks(3, 17)):
        expected = vectors(learner, some, rows_UD)
        layout = learner.event_columns.lay_out(some, in_buckets=True)
        found = learner.events(layout, rows_UD).inputs_NX()
        assert len(found) > len(expected)
        torch.testing.assert_close(found[: some.num_rows], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("encoder", ["sasrec", "sim"])
def test_ragged_batches_of_events_have_few_shapes(
    data: tuple[Any, TaskBatch], encoder: str
) -> None:
    features, batch = data
    columns = learner_of(features, encoder).event_columns
    assert columns is not None
    shapes = []
    for in_buckets in (False, True):
        parts = [batch.tasks(at, at + 14) for at in range(20)]
        laid = [lay_out(columns.lay_out(part, in_buckets))[0] for part in parts]
        shapes.append(len(set(laid)))
    assert shapes[0] > 15
    assert shapes[1] <= 4
