"""Lays out the events of a batch for their encoder: tasks of similar length in one rectangle, or
for each row the few events that a search finds. All of it is integer bookkeeping on the host.

Shape suffixes: T tasks, N rows, H longest list or task, F single-id or pooled features, M multi-id
features, V values, U unique ids, A items"""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from gmeta.data.buckets import EVENTS, TASKS, VALUES, choose_cuts
from gmeta_models.model_config import ModelConfig
from gmeta_models.options import SimOptions, event_options
from gmeta_models.sequence.encoder import EventLayout, EventRectangle
from metaio.format.features import Features, name_event_column
from metaio.ragged import Float32, Int64, offsets, owners, places, ragged_indices
from metaio.read.batch import TaskBatch

if TYPE_CHECKING:
    from gmeta.data.item_draws import ItemDraws

# Tasks of fewer events share a rectangle: one more costs more in calls than padding does.
_SHORT = 16
_LONG = 64  # more than any power of two: long tasks share no rectangle with others


@dataclass(frozen=True)
class EventColumns:
    """Which columns of the rows make a target like an event, and how a row's events are chosen."""

    target: tuple[int, ...]  # for each column of the events, the single-id feature of the rows
    category: int = -1  # the events' column that a search goes by; -1: a row knows all before it
    newest: int = 0  # of a search
    long_from: int = sys.maxsize  # events from which a task's are to be taken apart
    # Of each item; None: no loss asks.
    log_share_A: Float32 | None = field(default=None, compare=False)
    # Of items that rows compete with; None: no loss asks.
    draws: "ItemDraws | None" = field(default=None, compare=False)

    @classmethod
    def of(cls, features: Features, model: ModelConfig) -> "EventColumns":
        """Return the columns for a model's encoder of events. Raises ValueError: the dataset has no
        events, or not the column that the search is to go by."""
        names = [feature.name for feature in features.events]
        if not names:
            raise ValueError(
                f"model.events = {model.events!r}, but the dataset stores no events. Add [events] "
                "to the schema and prepare again, or leave model.events out"
            )
        target = features.event_targets
        options = event_options(model)
        if not isinstance(options, SimOptions) or options.search != "category":
            return cls(target)
        wanted = name_event_column(options.category) if options.category else names[-1]
        if wanted not in names:
            raise ValueError(
                f"model.event_options.category = {options.category!r} is no column of the events: "
                f"they have {', '.join(name.partition('.')[2] for name in names)}. Name one of them"
            )
        return cls(target, names.index(wanted), options.newest)

    def lay_out(self, batch: TaskBatch, in_buckets: bool = False) -> EventLayout:
        """Return the events of a batch, and what each of its rows knows of them; `in_buckets`: in
        few shapes (buckets.py), unless tasks are to be taken apart."""
        layout = self._lay_out(batch, in_buckets and self.long_from == sys.maxsize)
        if self.log_share_A is None and self.draws is None:
            return layout
        item_N = batch.unique_ids_U[layout.target_NM[:, 0]]
        if self.log_share_A is None:
            assert self.draws is not None
            return layout._replace(item_N=item_N, drawn=self.draws.lay_out(batch))
        log_share_N = torch.from_numpy(self.log_share_A)[item_N]
        return layout._replace(item_N=item_N, log_share_N=log_share_N)

    def _lay_out(self, batch: TaskBatch, in_buckets: bool) -> EventLayout:
        none = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        target_NM = batch.positions_NF[:, list(self.target)].to(torch.int64)
        rows_T = batch.row_offsets_T1.diff().numpy()
        if not batch.num_rows:
            return EventLayout((), torch.zeros(0, dtype=torch.int64), target_NM, *none)
        num_places = VALUES.round_up(batch.num_rows) if in_buckets else batch.num_rows
        padded_NM = pad(target_NM, (0, 0, 0, num_places - batch.num_rows))
        if self.category >= 0:
            found = self._find_events(batch, rows_T, target_NM.numpy())
            rectangle = _make_rows(batch, found, num_places, in_buckets)
            return EventLayout((rectangle,), torch.arange(num_places), padded_NM, *none)
        num_events_T = batch.num_events_T.numpy()
        if in_buckets:
            groups = _group_in_buckets(num_events_T, rows_T)
        else:
            groups = _group_by_size(num_events_T, rows_T, num_events_T >= self.long_from)
        rectangles, place_N, first = list[EventRectangle](), np.zeros(num_places, np.int64), 0
        for group in groups:
            rectangle = _make_rectangle(batch, group, rows_T)
            if num_events_T[group.tasks[-1]] >= self.long_from:
                known = tuple(map(tuple, rectangle.before_TN.tolist()))
                rectangle = rectangle._replace(known=known)
            there = group.has_rows(rows_T)
            place_N[rectangle.row_TN.numpy()[there]] = first + np.flatnonzero(there)
            first += there.size
            rectangles.append(rectangle)
        return EventLayout(tuple(rectangles), torch.from_numpy(place_N), padded_NM, *none)

    def _find_events(
        self, batch: TaskBatch, rows_T: Int64, target_NM: Int64
    ) -> tuple[Int64, Int64]:
        """Return the newest events of the category of each row's target, row after row, and how
        many each row has."""
        num_events_T = batch.num_events_T.numpy()
        category = batch.event_positions[:, self.category].numpy().astype(np.int64)
        # Within an episode equal ids are one position: task, position and place are one number.
        num_ids, most = max(batch.unique_ids_U.numel(), 1), int(num_events_T.max(initial=0)) + 1
        event_key = (owners(num_events_T) * num_ids + category) * most + places(num_events_T)
        key_N = (owners(rows_T) * num_ids + target_NM[:, self.category]) * most
        order = np.argsort(event_key)
        sorted_keys = event_key[order]
        stop_N = np.searchsorted(sorted_keys, key_N + batch.events_before_N.numpy())
        start_N = np.maximum(np.searchsorted(sorted_keys, key_N), stop_N - self.newest)
        length_N = stop_N - start_N
        found_V = order[ragged_indices(start_N, length_N)]
        return found_V, length_N


class _Group(NamedTuple):
    """Tasks of one rectangle; -1: one that pads."""

    tasks: Int64
    longest: int  # at least their events, and 1: an axis of no event has no softmax
    most_rows: int

    def has_rows(self, rows_T: Int64) -> npt.NDArray[np.bool_]:
        """Return which places [T, N] are rows of the batch."""
        return np.arange(self.most_rows) < _of_tasks(rows_T, self.tasks)[:, None]


def _of_tasks(values_T: Int64, tasks: Int64) -> Int64:
    """Return the values of these tasks, 0 of padding."""
    return np.where(tasks >= 0, values_T[tasks], 0)


def _group_by_size(
    num_events_T: Int64, rows_T: Int64, is_long_T: npt.NDArray[np.bool_]
) -> list[_Group]:
    """Return tasks of as many events, by powers of two, together; long ones last."""
    size_T = np.ceil(np.log2(np.maximum(num_events_T, _SHORT))).astype(np.int64)
    size_T += _LONG * is_long_T
    found = []
    for size in np.unique(size_T):
        tasks = np.flatnonzero(size_T == size)
        longest = int(num_events_T[tasks].max(initial=1))
        found.append(_Group(tasks, longest, int(rows_T[tasks].max())))
    return found


def _group_in_buckets(num_events_T: Int64, rows_T: Int64) -> list[_Group]:
    """Return the tasks, those of few events first, in groups of few sizes."""
    tasks = np.argsort(num_events_T, kind="stable")
    number = TASKS.round_up(len(tasks))
    tasks = np.pad(tasks, (number - len(tasks), 0), constant_values=-1)
    groups = list[_Group]()
    for part in np.split(tasks, choose_cuts(number)[:-1]):
        longest = EVENTS.round_up(max(int(_of_tasks(num_events_T, part).max()), 1))
        most_rows = EVENTS.round_up(int(_of_tasks(rows_T, part).max()))
        # Padding tasks alone make no rectangle.
        if groups and (groups[-1].longest == longest or not groups[-1].most_rows):
            before = groups.pop()
            part, most_rows = np.concatenate([before.tasks, part]), max(before.most_rows, most_rows)
        groups.append(_Group(part, longest, most_rows))
    return groups


def _make_rows(
    batch: TaskBatch, found: tuple[Int64, Int64], num_rows: int, in_buckets: bool
) -> EventRectangle:
    """Return each row as a task of its own, with the events that were found for it."""
    found_V, length_N = found
    length_N = np.pad(length_N, (0, num_rows - len(length_N)))
    longest = max(int(length_N.max()), 1)
    if in_buckets:
        longest = EVENTS.round_up(longest)
    index_NH = np.zeros((num_rows, longest), np.int64)
    index_NH[np.arange(longest) < length_N[:, None]] = found_V
    lengths = torch.from_numpy(length_N)
    row_N1 = torch.arange(num_rows).unsqueeze(1)
    return EventRectangle(*_take_events(batch, index_NH), lengths, row_N1, lengths.unsqueeze(1))


def _take_events(batch: TaskBatch, index_TH: Int64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions [T, H, M] and numbers [T, H, K] of events; any where there are none."""
    index = torch.from_numpy(index_TH)
    if not len(batch.event_positions):
        shape = index_TH.shape
        return (
            torch.zeros(*shape, batch.event_positions.shape[1], dtype=torch.int64),
            torch.zeros(*shape, batch.event_numbers.shape[1]),
        )
    return batch.event_positions[index].to(torch.int64), batch.event_numbers[index]


def _make_rectangle(batch: TaskBatch, group: _Group, rows_T: Int64) -> EventRectangle:
    num_events_T, tasks = batch.num_events_T.numpy(), group.tasks
    length_T = _of_tasks(num_events_T, tasks)
    starts_T = _of_tasks(offsets(num_events_T)[:-1], tasks)
    places_H = np.arange(group.longest)
    index_TH = np.where(places_H < length_T[:, None], starts_T[:, None] + places_H, 0)
    first_T = _of_tasks(batch.row_offsets_T1[:-1].numpy(), tasks)
    there_TN = group.has_rows(rows_T)
    places_N = np.arange(group.most_rows)
    row_TN = torch.from_numpy(np.where(there_TN, first_T[:, None] + places_N, 0))
    before_TN = batch.events_before_N[row_TN].to(torch.int64) * torch.from_numpy(there_TN)
    positions, numbers = _take_events(batch, index_TH)
    return EventRectangle(positions, numbers, torch.from_numpy(length_T), row_TN, before_TN)
