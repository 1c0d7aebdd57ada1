"""What events cost when they are stored and read once a task: bytes, steps, search, appending."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.learner import MetaLearner
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from gmeta_models.sequence.encoder import EventLayout, EventRectangle, StateEncoder
from gmeta_models.sequence.registry import build_encoder
from metaio.format.dataset import Dataset, open_dataset
from metaio.prepare.engines.local import prepare
from metaio.prepare.schema.schema_file import parse_schema
from metaio.ragged import Int64
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose

WIDTH, ROWS, EVENTS, ITEMS, KINDS = 32, 30, 200, 5_000, 40


def make_log(num_tasks: int, num_events: int) -> dict[str, Any]:
    """A log of so many events a task, and then 30 rows more."""
    rng, length = np.random.default_rng(0), num_events + ROWS
    item = np.minimum(rng.zipf(1.3, (num_tasks, length)), ITEMS - 1)
    return {
        "user": np.repeat(np.arange(num_tasks), length),
        "item": item.ravel(),
        "kind": (item.ravel() * 7) % KINDS + 1,
        "click": rng.integers(0, 2, num_tasks * length),
        "time": np.tile(np.arange(length), num_tasks),
    }


def prepare_log(folder: Path, columns: dict[str, Any], **changes: Any) -> Dataset:
    """The dataset of a log, whose tasks keep their last 30 rows."""
    schema = {
        "task": {"column": "user"},
        "label": {"column": "click"},
        "time": {"column": "time"},
        "single": [{"column": "item", "hash": ITEMS}, {"column": "kind", "hash": 4 * KINDS}],
        "episodes": {
            "by": "last", "query_rows": 10, "min_rows": 11, "max_rows": ROWS, "longer": "truncate",
        },
        **changes,
    }  # fmt: skip
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "log.parquet")
    prepare([str(folder / "log.parquet")], str(folder / "data"), parse_schema(schema))
    return open_dataset(str(folder / "data"))


def bytes_of(dataset: Dataset) -> int:
    """The bytes of the files of the training split."""
    return sum(path.stat().st_size for path in Path(dataset.url, "train").glob("*.parquet"))


def measure_bytes(num_tasks: int) -> float:
    """Bytes of the split with events over those with a list of the last 200 items and kinds in
    each row."""
    columns = make_log(num_tasks, EVENTS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        events = prepare_log(folder / "events", columns, events={"columns": ["item", "kind"]})
        by_task = {one: values.reshape(num_tasks, -1) for one, values in columns.items()}
        rows = {one: values[:, EVENTS:].ravel() for one, values in by_task.items()}
        for one in ("item", "kind"):
            window = np.lib.stride_tricks.sliding_window_view(by_task[one], EVENTS, axis=1)
            lists = window[:, :ROWS].reshape(-1, EVENTS)
            rows[f"{one}s"] = pa.array(list(lists))
        multi = [
            {"column": "items", "table": "item", "hash": ITEMS},
            {"column": "kinds", "table": "kind", "hash": 4 * KINDS},
        ]
        lists_a_row = prepare_log(folder / "lists", rows, multi=multi)
        return bytes_of(events) / bytes_of(lists_a_row)


def batch_of(folder: Path, num_tasks: int, num_events: int) -> tuple[Dataset, TaskBatch]:
    """A dataset of tasks with so many events each, and all of its tasks."""
    rule = {"columns": ["item", "kind"], "longest": 0}
    dataset = prepare_log(folder, make_log(num_tasks, num_events), events=rule)
    block = dataset.read_block("train", 0)
    return dataset, compose(dataset.features, [(block, np.arange(block.num_episodes))])


def learner_of(dataset: Dataset, encoder: str, **options: Any) -> MetaLearner:
    """A learner that adapts its layers, over an encoder of events."""
    torch.manual_seed(0)
    model = ModelConfig(
        name="melu", embedding_dim=WIDTH, hidden=(64, 32), events=encoder, event_options=options
    )
    algorithm = AlgorithmConfig(name="maml", adapt_embeddings=False)
    return build_learner(dataset.features, model, algorithm, "bce")


def one_row_a_task(layout: EventLayout) -> EventLayout:
    """The layout in which the events are encoded anew for every row."""
    rectangles, places, first = [], [], 0
    for own in layout.rectangles:
        num_tasks, num_rows = own.row_TN.shape
        task: Int64 = np.repeat(np.arange(num_tasks), num_rows)
        rectangles.append(
            EventRectangle(
                own.position_THM[task], own.numbers_THK[task], own.num_events_T[task],
                own.row_TN.reshape(-1, 1), own.before_TN.reshape(-1, 1),
            )
        )  # fmt: skip
        places.append(first + torch.arange(num_tasks * num_rows))
        first += num_tasks * num_rows
    return layout._replace(rectangles=tuple(rectangles))


def seconds_of(work: Callable[[], object], turns: int) -> float:
    """The median time of some work, once warm."""
    work()
    found = []
    for _ in range(turns):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def ratio_of(slow: Callable[[], object], fast: Callable[[], object], turns: int) -> float:
    """The time of one work over that of another: the median of turns of both, once warm. What else
    the machine does slows both of a turn alike."""
    slow(), fast()
    found = []
    for _ in range(turns):
        began = time.perf_counter()
        slow()
        between = time.perf_counter()
        fast()
        found.append((between - began) / (time.perf_counter() - between))
    return statistics.median(found)


def measure_step(num_tasks: int, turns: int) -> float:
    """Time of a training step that runs the encoder for every row, over one that runs it once a
    task: forward and backward, 200 events and 30 rows a task."""
    with tempfile.TemporaryDirectory() as name:
        dataset, batch = batch_of(Path(name, "log"), num_tasks, EVENTS)
        learner = learner_of(dataset, "sasrec")
        rows_UD = torch.randn(batch.unique_ids_U.numel(), WIDTH, requires_grad=True)
        once = learner.collate(batch)
        assert once.inputs.events is not None
        each = once.with_events(one_row_a_task(once.inputs.events))
        losses = [learner(rows_UD, episodes, 1.0).item() for episodes in (once, each)]
        assert abs(losses[0] - losses[1]) < 1e-3 * abs(losses[0]), losses
        return ratio_of(
            lambda: learner(rows_UD, each, 1.0).backward(),
            lambda: learner(rows_UD, once, 1.0).backward(),
            turns,
        )


def measure_search(num_tasks: int, turns: int) -> float:
    """Time of a training step whose target attends to all of 10,000 events, over one in which a
    search by category has found the newest 100."""
    with tempfile.TemporaryDirectory() as name:
        dataset, batch = batch_of(Path(name, "log"), num_tasks, 10_000)
        rows_UD = torch.randn(batch.unique_ids_U.numel(), WIDTH, requires_grad=True)
        searched = {"search": "category", "category": "kind", "newest": 100}
        # A search that may find all events looks for none.
        of_all = {"search": "hash", "newest": 100_000}
        few, many = (learner_of(dataset, "sim", **options) for options in (searched, of_all))
        # With the search, which is the host's.
        return ratio_of(
            lambda: many(rows_UD, many.collate(batch), 1.0).backward(),
            lambda: few(rows_UD, few.collate(batch), 1.0).backward(),
            turns,
        )


def measure_append(turns: int) -> float:
    """Time to encode 1,000 events over the time to append one to the states of those before, each
    many times in a row, on one thread."""
    torch.set_num_threads(1)
    model = ModelConfig(name="melu", embedding_dim=64, events="sasrec")
    encoder = build_encoder(model, 1).eval()
    assert isinstance(encoder, StateEncoder)
    events, seconds = torch.randn(1, 1_000, 64), torch.arange(1_000.0)[None]
    with torch.no_grad():
        _, past = encoder.states_THD(events[:, :-1], seconds[:, :-1])
        whole = seconds_of(lambda: encoder.states_THD(events, seconds), turns)
        one = seconds_of(lambda: encoder.states_THD(events[:, -1:], seconds[:, -1:], past), turns)
    return whole / one


def measure_all(quick: bool) -> dict[str, float]:
    """All figures of one machine."""
    return {
        "bytes_ratio": measure_bytes(200 if quick else 2_000),
        "append_speedup": measure_append(30 if quick else 200),
        # Before the steps: what malloc keeps of them would be the larger part of this figure.
        "search_speedup": measure_search(16, 3 if quick else 9),
        "step_speedup": measure_step(16 if quick else 64, 3 if quick else 9),
    }
