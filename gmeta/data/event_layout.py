"""Lays out the events of a batch for their encoder: tasks of similar length in one rectangle, or
for each row the few events that a search finds. All of it is integer bookkeeping on the host.

Shape suffixes: T tasks, R rows of a task, N rows, E events, C columns of an event's ids, K numbers
of an event, L events of a task"""

from dataclasses import dataclass, field

import numpy as np
import torch

from gmeta_models.model_config import ModelConfig
from gmeta_models.options import SimOptions, event_options
from gmeta_models.sequence.encoder import EventLayout, EventRectangle
from metaio.format.features import Features, name_event_column
from metaio.ragged import Float32, Int64, offsets, owners, ragged_indices
from metaio.read.batch import TaskBatch

# Tasks of fewer events share a rectangle: one more costs more in calls than padding does.
_SHORT = 16


@dataclass(frozen=True)
class EventColumns:
    """Which columns of the rows make a target like an event, and how a row's events are chosen."""

    target: tuple[int, ...]  # for each column of the events, the single-id feature of the rows
    category: int = -1  # the events' column that a search goes by; -1: a row knows all before it
    newest: int = 0  # of a search
    # Of each item; None: no loss asks.
    log_share_I: Float32 | None = field(default=None, compare=False)

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
        if self.log_share_I is None:
            return layout
        item_N = batch.unique_ids_U[layout.target_NC[:, 0]]
        log_share_N = torch.from_numpy(self.log_share_I)[item_N]
        return layout._replace(item_N=item_N, log_share_N=log_share_N)

    def _lay_out(self, batch: TaskBatch) -> EventLayout:
        none = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        target_NC = batch.positions_NF[:, list(self.target)].to(torch.int64)
        rows_T = batch.row_offsets_T1.diff().numpy()
        if not batch.num_rows:
            return EventLayout((), torch.zeros(0, dtype=torch.int64), target_NC, *none)
        if self.category >= 0:
            rectangle = self._found_events(batch, rows_T, target_NC.numpy())
            every_row = torch.arange(batch.num_rows)
            return EventLayout((rectangle,), every_row, target_NC, *none)
        num_events_T = batch.num_events_T.numpy()
        size_T = np.ceil(np.log2(np.maximum(num_events_T, _SHORT))).astype(np.int64)
        found, place_N, first = list[EventRectangle](), np.zeros(batch.num_rows, np.int64), 0
        for size in np.unique(size_T):
            tasks = np.flatnonzero(size_T == size)
            rectangle = _make_rectangle(batch, tasks, rows_T[tasks])
            width = rectangle.row_TR.shape[1]
            there = np.arange(width) < rows_T[tasks][:, None]
            place_N[rectangle.row_TR.numpy()[there]] = first + np.flatnonzero(there)
            first += there.size
            found.append(rectangle)
        return EventLayout(tuple(found), torch.from_numpy(place_N), target_NC, *none)

    def _found_events(self, batch: TaskBatch, rows_T: Int64, target_NC: Int64) -> EventRectangle:
        """Return each row as a task of its own, with the newest events of its target's category."""
        num_events_T = batch.num_events_T.numpy()
        category_E = batch.event_positions_EC[:, self.category].numpy().astype(np.int64)
        # Within an episode equal ids are one position: task and position are one number.
        num_ids = max(batch.unique_ids_U.numel(), 1)
        key_E = owners(num_events_T) * num_ids + category_E
        key_N = owners(rows_T) * num_ids + target_NC[:, self.category]
        groups, group_E = np.unique(key_E, return_inverse=True)
        order_E = np.argsort(group_E, kind="stable")  # in time within a group
        first_E = offsets(num_events_T)[owners(num_events_T)]
        place_E = np.arange(len(key_E)) - first_E
        most = int(num_events_T.max(initial=0)) + 1
        sorted_E = (group_E * most + place_E)[order_E]
        group_N = np.searchsorted(groups, key_N)
        has_group_N = (group_N < len(groups)) & (
            groups[np.minimum(group_N, max(len(groups) - 1, 0))] == key_N
            if len(groups)
            else np.zeros(len(key_N), np.bool_)
        )
        stop_N = np.searchsorted(sorted_E, group_N * most + batch.events_before_N.numpy())
        start_N = np.maximum(np.searchsorted(sorted_E, group_N * most), stop_N - self.newest)
        length_N = np.where(has_group_N, stop_N - start_N, 0)
        found_V = order_E[ragged_indices(start_N, length_N)]
        longest = max(int(length_N.max(initial=0)), 1)
        index_NL = np.zeros((len(length_N), longest), np.int64)
        index_NL[np.arange(longest) < length_N[:, None]] = found_V
        lengths = torch.from_numpy(length_N)
        return EventRectangle(
            *_take_events(batch, index_NL),
            lengths,
            torch.arange(len(length_N)).unsqueeze(1),
            lengths.unsqueeze(1),
        )


def _take_events(batch: TaskBatch, index_TL: Int64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions [T, L, C] and numbers [T, L, K] of events; any where there are none."""
    index = torch.from_numpy(index_TL)
    if not len(batch.event_positions_EC):
        shape = index_TL.shape
        return (
            torch.zeros(*shape, batch.event_positions_EC.shape[1], dtype=torch.int64),
            torch.zeros(*shape, batch.event_numbers_EK.shape[1]),
        )
    return batch.event_positions_EC[index].to(torch.int64), batch.event_numbers_EK[index]


def _make_rectangle(batch: TaskBatch, tasks: Int64, rows_T: Int64) -> EventRectangle:
    num_events_T = batch.num_events_T.numpy()
    length_T, starts_T = num_events_T[tasks], offsets(num_events_T)[:-1][tasks]
    # One at least: an axis of no event has no softmax.
    longest, most_rows = int(length_T.max(initial=1)), int(rows_T.max(initial=0))
    places_L = np.arange(longest)
    index_TL = np.where(places_L < length_T[:, None], starts_T[:, None] + places_L, 0)
    first_T = batch.row_offsets_T1[:-1].numpy()[tasks]
    places_R = np.arange(most_rows)
    there_TR = places_R < rows_T[:, None]
    row_TR = torch.from_numpy(np.where(there_TR, first_T[:, None] + places_R, 0))
    before_TR = batch.events_before_N[row_TR].to(torch.int64) * torch.from_numpy(there_TR)
    positions, numbers = _take_events(batch, index_TL)
    return EventRectangle(positions, numbers, torch.from_numpy(length_T), row_TR, before_TR)
