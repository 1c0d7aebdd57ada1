"""Lays out the events of a batch for their encoder: tasks of similar length in one rectangle, or
for each row the few events that a search finds. All of it is integer bookkeeping on the host.

Shape suffixes: T tasks, N rows, H longest list or task, F single-id or pooled features, M multi-id
features, V values, U unique ids, A items"""

import sys
from dataclasses import dataclass, field

import numpy as np
import torch

from gmeta_models.model_config import ModelConfig
from gmeta_models.options import SimOptions, event_options
from gmeta_models.sequence.encoder import EventLayout, EventRectangle
from metaio.format.features import Features, name_event_column
from metaio.ragged import Float32, Int64, offsets, owners, places, ragged_indices
from metaio.read.batch import TaskBatch

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
        single = {name_event_column(one.name): at for at, one in enumerate(features.single)}
        target = tuple(single[name] for name in names)
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

    def lay_out(self, batch: TaskBatch) -> EventLayout:
        """Return the events of a batch, and what each of its rows knows of them."""
        layout = self._lay_out(batch)
        if self.log_share_A is None:
            return layout
        item_N = batch.unique_ids_U[layout.target_NM[:, 0]]
        log_share_N = torch.from_numpy(self.log_share_A)[item_N]
        return layout._replace(item_N=item_N, log_share_N=log_share_N)

    def _lay_out(self, batch: TaskBatch) -> EventLayout:
        none = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        target_NM = batch.positions_NF[:, list(self.target)].to(torch.int64)
        rows_T = batch.row_offsets_T1.diff().numpy()
        if not batch.num_rows:
            return EventLayout((), torch.zeros(0, dtype=torch.int64), target_NM, *none)
        if self.category >= 0:
            rectangle = self._found_events(batch, rows_T, target_NM.numpy())
            every_row = torch.arange(batch.num_rows)
            return EventLayout((rectangle,), every_row, target_NM, *none)
        num_events_T = batch.num_events_T.numpy()
        size_T = np.ceil(np.log2(np.maximum(num_events_T, _SHORT))).astype(np.int64)
        is_long_T = num_events_T >= self.long_from
        size_T += _LONG * is_long_T  # the last ones
        found, place_N, first = list[EventRectangle](), np.zeros(batch.num_rows, np.int64), 0
        for size in np.unique(size_T):
            tasks = np.flatnonzero(size_T == size)
            rectangle = _make_rectangle(batch, tasks, rows_T[tasks])
            if size >= _LONG:
                known = tuple(map(tuple, rectangle.before_TN.tolist()))
                rectangle = rectangle._replace(known=known)
            width = rectangle.row_TN.shape[1]
            there = np.arange(width) < rows_T[tasks][:, None]
            place_N[rectangle.row_TN.numpy()[there]] = first + np.flatnonzero(there)
            first += there.size
            found.append(rectangle)
        return EventLayout(tuple(found), torch.from_numpy(place_N), target_NM, *none)

    def _found_events(self, batch: TaskBatch, rows_T: Int64, target_NM: Int64) -> EventRectangle:
        """Return each row as a task of its own, with the newest events of its target's category."""
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
        longest = max(int(length_N.max(initial=0)), 1)
        index_NH = np.zeros((len(length_N), longest), np.int64)
        index_NH[np.arange(longest) < length_N[:, None]] = found_V
        lengths = torch.from_numpy(length_N)
        return EventRectangle(
            *_take_events(batch, index_NH),
            lengths,
            torch.arange(len(length_N)).unsqueeze(1),
            lengths.unsqueeze(1),
        )


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


def _make_rectangle(batch: TaskBatch, tasks: Int64, rows_T: Int64) -> EventRectangle:
    num_events_T = batch.num_events_T.numpy()
    length_T, starts_T = num_events_T[tasks], offsets(num_events_T)[:-1][tasks]
    # One at least: an axis of no event has no softmax.
    longest, most_rows = int(length_T.max(initial=1)), int(rows_T.max(initial=0))
    places_H = np.arange(longest)
    index_TH = np.where(places_H < length_T[:, None], starts_T[:, None] + places_H, 0)
    first_T = batch.row_offsets_T1[:-1].numpy()[tasks]
    places_N = np.arange(most_rows)
    there_TN = places_N < rows_T[:, None]
    row_TN = torch.from_numpy(np.where(there_TN, first_T[:, None] + places_N, 0))
    before_TN = batch.events_before_N[row_TN].to(torch.int64) * torch.from_numpy(there_TN)
    positions, numbers = _take_events(batch, index_TH)
    return EventRectangle(positions, numbers, torch.from_numpy(length_T), row_TN, before_TN)
