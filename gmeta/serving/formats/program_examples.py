"""Rows that are drawn to record a program and to compare it with its model.

Shape suffixes: N rows, H longest list or task, F single-id or pooled features, M multi-id features,
K dense columns"""

from collections.abc import Mapping
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gmeta.serving.encoded_rows import EncodedColumns, labels_shape, no_events
from gmeta.serving.formats.program_events import TIMES
from gmeta.serving.formats.program_rows import (
    DENSE,
    IDS,
    LABEL,
    LENGTHS,
    LISTS,
    QUERY,
    SUPPORT,
    WEIGHT,
)
from metaio.format.features import Features

if TYPE_CHECKING:
    from gmeta.serving.served_model import ServedModel

_UNKNOWN = 0.2  # of the labels of datasets that may lack some
_EVENTS, _SOME_TIME_S = 0.7, 1.7e9  # of the support rows

Example = dict[str, Tensor]
Shapes = dict[str, list[int | str]]


def adapting_sizes(features: Features) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return rows and longest list of both sides of an example."""
    # No two are equal, and none is a number of columns: recording takes equal sizes for one.
    columns = [len(kind) for kind in (features.single, features.multi, features.dense)]
    columns += [features.num_labels, len(features.events), features.num_event_numbers]
    free = (size for size in count(3) if size not in columns)
    query_longest, support_longest, support_rows, query_rows = islice(free, 4)
    return (support_rows, support_longest), (query_rows, query_longest)


def draw_alone(
    served: "ServedModel", num_rows: int, longest: int, support_rows: int = 5, seed: int = 0
) -> tuple[Example, Tensor]:
    """Return drawn rows of one task as the program without adaptation takes them, with support rows
    where these are the events, and what the model predicts of them."""
    example, rows = draw_rows(served, num_rows, longest, seed=seed)
    features = served.config.features
    if served.learner.events is None:
        return example, served.predict_encoded([served.unadapted], rows, [num_rows])
    support, known = draw_rows(served, support_rows, longest, SUPPORT, seed)
    names = [IDS, TIMES, *([DENSE] if features.event_dense else [])]
    example |= {name: support[name] for name in (SUPPORT + name for name in names)}
    return example, served.predict_tasks_encoded(known, rows, allow_no_support=False).before_N


def draw_both_sides(
    served: "ServedModel", support_size: tuple[int, int], query_size: tuple[int, int], seed: int = 0
) -> tuple[Example, EncodedColumns, EncodedColumns]:
    """Return drawn rows of both sides, of these numbers and longest lists, as the program that
    adapts takes them, and as the model does."""
    support, support_rows = draw_rows(served, *support_size, SUPPORT, seed)
    query, query_rows = draw_rows(served, *query_size, QUERY, seed)
    return {**support, **_select_labels(support_rows), **query}, support_rows, query_rows


def _select_labels(support: EncodedColumns) -> Example:
    """Return the labels of support rows, and weights if they have some, as programs take them."""
    labels = {SUPPORT + LABEL: torch.from_numpy(support.label_N)}
    if support.weight_NW.shape[1]:
        labels[SUPPORT + WEIGHT] = torch.from_numpy(support.weight_NW[:, 0])
    return labels


def draw_rows(
    served: "ServedModel", num_rows: int, longest: int, side: str = "", seed: int = 0
) -> tuple[Example, EncodedColumns]:
    """Return drawn rows of one task as a program takes them, and as the model does."""
    features, rng = served.config.features, np.random.default_rng(seed + len(side))
    sizes = {table.name: table.num_rows for table in features.tables}
    shape = num_rows, len(features.multi), longest
    rows_F = [sizes[c.table] for c in features.single]
    ids_NF = rng.integers(0, rows_F, (num_rows, len(rows_F)))
    rows_M1 = np.array([[sizes[c.table]] for c in features.multi], np.int64).reshape(-1, 1)
    ids_NMH = rng.integers(0, np.broadcast_to(rows_M1, shape))
    lengths_NM = rng.integers(0, longest + 1, shape[:2])
    # The first row's lists fill the padded width.
    lengths_NM[0] = longest
    dense_NK = rng.standard_normal((num_rows, len(features.dense))).astype(np.float32)
    label_N = rng.integers(0, 2, labels_shape(features, num_rows)).astype(np.float32)
    if features.labels:
        label_N[rng.random(label_N.shape) < _UNKNOWN] = np.nan
    is_there_NMH = np.arange(longest) < lengths_NM[:, :, None]
    rows = EncodedColumns(
        np.zeros(num_rows, np.int64),
        label_N,
        ids_NF,
        dense_NK,
        lengths_NM.astype(np.int32),
        ids_NMH[is_there_NMH],
        rng.random((num_rows, int(bool(features.weight))), np.float32),
        _draw_times(rng, features, num_rows),
    )
    groups: dict[str, npt.NDArray[Any]] = {
        IDS: ids_NF,
        DENSE: dense_NK,
        LISTS: ids_NMH,
        LENGTHS: lengths_NM,
    }
    if side == SUPPORT and served.learner.events is not None:
        groups[TIMES] = rows.event_times
    # A group without a column is no input.
    example = {side + n: torch.from_numpy(a) for n, a in groups.items() if a.shape[1]}
    return example, rows


def name_shapes(example: Mapping[str, Tensor]) -> Shapes:
    """Return the shape of each input, with a name for each dimension that may be of any size."""
    shapes: Shapes = {}
    for name, value in example.items():
        side = name.rpartition(".")[0]
        prefix = f"{side}_" if side else ""
        shapes[name] = [f"{prefix}rows", *value.shape[1:]]
        if name.endswith(LISTS):
            shapes[name][2] = f"{prefix}longest"
    return shapes


def _draw_times(
    rng: np.random.Generator, features: Features, num_rows: int
) -> npt.NDArray[np.float64]:
    event_times = no_events(features, num_rows)
    if event_times.shape[1]:
        # Some at one time, and in no order.
        event_times[:, 0] = _SOME_TIME_S + rng.integers(0, 2 * num_rows, num_rows)
        event_times[:, 1] = rng.random(num_rows) < _EVENTS
    return event_times
