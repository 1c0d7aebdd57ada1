"""Puts a vector made of events in front of each row's dense columns.

Shape suffixes: N rows, K dense columns, X all inputs side by side"""

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from gmeta.adaptation.layout.padded_layout import PaddedFeatures, PaddedTasks
from gmeta.adaptation.layout.sides import Side, Sides, TaskGroups

Columns = TypeVar("Columns", Side, PaddedFeatures)


def with_event_inputs(
    rows: Side | Sides | TaskGroups | PaddedTasks, vectors_NX: Tensor
) -> Side | Sides | TaskGroups | PaddedTasks:
    """Return collated rows, each with its batch row's vector in front of its dense columns."""
    if isinstance(rows, Side):
        return put_before_dense(rows, vectors_NX)
    if isinstance(rows, Sides):
        return _of_both(rows, vectors_NX)
    if isinstance(rows, TaskGroups):
        return TaskGroups(tuple(_of_both(sides, vectors_NX) for sides in rows.groups))
    features = tuple(put_before_dense(own, vectors_NX) for own in rows.features)
    return replace(rows, features=features)


def _of_both(sides: Sides, vectors_NX: Tensor) -> Sides:
    return Sides(*(put_before_dense(side, vectors_NX) for side in sides))


def put_before_dense(columns: Columns, vectors_NX: Tensor) -> Columns:
    """Return rows of one side, each with its batch row's vector in front of its dense columns."""
    assert columns.row_N is not None  # a batch with events was collated with them
    own_NX = vectors_NX.index_select(0, columns.row_N)
    return replace(columns, dense_NK=torch.cat([own_NX, columns.dense_NK.to(own_NX.dtype)], dim=1))
