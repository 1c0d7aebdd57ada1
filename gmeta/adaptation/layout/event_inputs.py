"""Puts a vector made of events in front of each row's dense columns.

Shape suffixes: N rows, X all inputs side by side"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from gmeta.adaptation.layout.padded_layout import PaddedFeatures, PaddedTasks
from gmeta.adaptation.layout.sides import Side, Sides, TaskGroups

Rows = TypeVar("Rows", Side, Sides, TaskGroups, PaddedTasks)


def with_event_inputs(rows: Rows, vectors_NX: Tensor) -> Rows:
    """Return collated rows whose dense columns begin with the vector of the batch's row that each
    of them is."""
    if isinstance(rows, Side):
        return _extend(rows, vectors_NX)
    if isinstance(rows, Sides):
        return Sides(*(_extend(side, vectors_NX) for side in rows))
    if isinstance(rows, TaskGroups):
        return TaskGroups(tuple(with_event_inputs(sides, vectors_NX) for sides in rows.groups))
    return replace(rows, features=tuple(_extend(own, vectors_NX) for own in rows.features))


Columns = TypeVar("Columns", Side, PaddedFeatures)


def _extend(columns: Columns, vectors_NX: Tensor) -> Columns:
    assert columns.row_N is not None  # a batch with events was collated with them
    own_NX = vectors_NX.index_select(0, columns.row_N)
    return replace(columns, dense_NK=torch.cat([own_NX, columns.dense_NK.to(own_NX.dtype)], dim=1))
