"""The interface of the encoders of events, and what they share.

A task's events are embedded once; each of its rows gets a vector made of the events before it, and
no other. The vectors are inputs of the model that do not move while it adapts to a task.

Shape suffixes: T tasks, N rows, H longest list or task, M multi-id features, K dense columns, D
embedding width, U unique ids, X all inputs side by side, A items"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

KnownEvents = tuple[tuple[int, ...], ...]  # how many each row of each task knows


class EventRectangle(NamedTuple):
    """Tasks with about as many events each, padded behind the last; and their rows."""

    position_THM: Tensor  # int64, of the fetched embedding rows
    numbers_THK: Tensor  # float32: seconds since the task's first event, then the dense columns
    num_events_T: Tensor  # int64
    row_TN: Tensor  # int64: which row of the batch; any where there is none
    before_TN: Tensor  # int64: how many events the row knows
    # The same on the host, where the tasks' events are to be taken apart; None: they are not.
    known: KnownEvents | None = None


class DrawnItems(NamedTuple):
    """Items that rows compete with, beside their own."""

    target_AM: Tensor  # int64: the fetched rows that make the item's vector
    item_A: Tensor
    log_expected_A: Tensor  # the logarithm of how often a step draws the item, on average


class EventLayout(NamedTuple):
    """The events of a batch, and what its rows need of them."""

    rectangles: tuple[EventRectangle, ...]
    place_N: Tensor  # int64: each row's place among the T * N of all rectangles
    target_NM: Tensor  # int64: the fetched rows that make the row's target
    # The item of each row and the logarithm of its share of the rows; [0] unless a loss asks.
    item_N: Tensor
    log_share_N: Tensor
    drawn: DrawnItems | None = None


class EventVectors(NamedTuple):
    """What each row's events say, and its target: [N, D] each."""

    interest_ND: Tensor
    target_ND: Tensor

    def inputs_NX(self) -> Tensor:
        """Return a row's inputs of a model: the interest, and its product with the target."""
        return torch.cat([self.interest_ND, self.interest_ND * self.target_ND], dim=1)


# Maps rows [T, H, D] to the same shape, given what its queries, keys and values meet by.
Layer = Callable[[Tensor, Any], Tensor]


class LongEvents(Protocol):
    """Encodes long tasks with other processes; all of them make the same calls."""

    def align(self, own: Sequence[EventRectangle], none: EventRectangle) -> list[EventRectangle]:
        """Return the rectangles in an order that all share, `none` for those of others alone."""

    def encode(
        self, layers: Sequence[Layer], inputs_THD: Tensor, seconds_TH: Tensor, known: KnownEvents
    ) -> Tensor:
        """Return the states behind all layers."""

    def pool(
        self, pool: Callable[[Tensor, Tensor, Tensor], Tensor], events_THD: Tensor,
        target_TND: Tensor, known: KnownEvents,
    ) -> Tensor:  # fmt: skip
        """Return the sum of what `pool` makes of parts of the events, of all targets, and of how
        many events of its part a row knows."""


class EventEncoder(nn.Module, ABC):
    """Turns events into a vector a row."""

    def __init__(self, width: int, num_numbers: int) -> None:
        super().__init__()
        self.width = width
        self.over_ranks: LongEvents | None = None  # None: all events are encoded here
        # Of the seconds since the event before, and of the dense columns.
        self.numbers = nn.Linear(num_numbers, self.width, bias=False)
        nn.init.zeros_(self.numbers.weight)

    @property
    def outputs(self) -> int:
        """Return the width of a row's inputs, see EventVectors."""
        return 2 * self.width

    @abstractmethod
    def interest_TND(
        self, rectangle: EventRectangle, events_THD: Tensor, target_TND: Tensor
    ) -> Tensor:
        """Return what each row's earlier events say, from the embedded events: [T, N, D]."""

    def embed_THD(
        self, rectangle: EventRectangle, rows_UD: Tensor, before_s: float = 0.0
    ) -> Tensor:
        """Return the sum of an event's embeddings, and of its numbers through a layer; the event
        before the first is of the second `before_s`."""
        events_THD = embedding(rectangle.position_THM, rows_UD).sum(dim=2)
        seconds_TH, dense_THK = rectangle.numbers_THK[..., 0], rectangle.numbers_THK[..., 1:]
        before_TH = pad(seconds_TH, (1, 0), value=before_s)[:, :-1]
        gap_TH = (seconds_TH - before_TH).clamp(min=0).log1p()
        numbers_THK = torch.cat([gap_TH.unsqueeze(2), dense_THK], dim=2).to(events_THD.dtype)
        embedded_THD: Tensor = events_THD + self.numbers(numbers_THK)
        return embedded_THD

    def forward(self, events: EventLayout, rows_UD: Tensor) -> EventVectors:
        """Return each row's vectors, from the fetched embedding rows."""
        target_ND = embedding(events.target_NM, rows_UD).sum(dim=1)
        rectangles = list(events.rectangles)
        if self.over_ranks is not None:
            short = [one for one in rectangles if one.known is None]
            # Those are the last ones, as `place_N` has them.
            long, none = rectangles[len(short) :], self._no_rectangle(events.target_NM)
            rectangles = short + self.over_ranks.align(long, none)
        parts = [
            self.interest_TND(
                rectangle,
                self.embed_THD(rectangle, rows_UD),
                embedding(rectangle.row_TN, target_ND),
            ).flatten(0, 1)
            for rectangle in rectangles
        ]
        parts = parts or [rows_UD.new_zeros(0, self.width) + self.numbers.weight.sum() * 0.0]
        interest_ND = torch.cat(parts).index_select(0, events.place_N)
        return EventVectors(interest_ND, target_ND)

    def _no_rectangle(self, target_NM: Tensor) -> EventRectangle:
        """Return a long rectangle without tasks."""
        none_TN = target_NM.new_zeros(0, 0)
        return EventRectangle(
            target_NM.new_zeros(0, 1, target_NM.shape[1]),
            torch.zeros(0, 1, self.numbers.in_features, device=target_NM.device),
            target_NM.new_zeros(0), none_TN, none_TN, (),
        )  # fmt: skip


class Past(NamedTuple):
    """What a layer keeps of the events that it has seen."""

    key: Tensor
    value: Tensor


class StateEncoder(EventEncoder):
    """An encoder whose state behind each event serves all rows that know as many events."""

    dropout: nn.Dropout
    blocks: nn.ModuleList  # Layers
    norm: nn.LayerNorm

    def __init__(self, width: int, num_numbers: int) -> None:
        super().__init__(width, num_numbers)
        # Stands before the first event: the state of a row that knows none.
        self.start_D = nn.Parameter(torch.zeros(self.width))
        nn.init.normal_(self.start_D, std=0.02)

    @abstractmethod
    def states_THD(
        self, inputs_THD: Tensor, seconds_TH: Tensor, past: tuple[Past, ...] = ()
    ) -> tuple[Tensor, tuple[Past, ...]]:
        """Return the state behind each input, given what was kept of those before, and what to
        keep of all of them."""

    def layers(self) -> list[Layer]:
        """Return what makes states of inputs, one after the other."""
        return [lambda rows, _: self.dropout(rows), *self.blocks, lambda rows, _: self.norm(rows)]

    def interest_TND(
        self, rectangle: EventRectangle, events_THD: Tensor, target_TND: Tensor
    ) -> Tensor:
        """Return the state behind the last event that each row knows."""
        inputs_THD = self.with_start(events_THD)
        seconds_TH, known = pad(rectangle.numbers_THK[..., 0], (1, 0)), rectangle.known
        if self.over_ranks is None or known is None:
            states_THD, _ = self.states_THD(inputs_THD, seconds_TH)
        else:
            states_THD = self.over_ranks.encode(self.layers(), inputs_THD, seconds_TH, known)
        index_TND = rectangle.before_TN.unsqueeze(2).expand(-1, -1, self.width)
        return states_THD.gather(1, index_TND)

    def with_start(self, events_THD: Tensor) -> Tensor:
        """Return the inputs of the layers: the start, then the events."""
        start_T1D = self.start_D.expand(len(events_THD), 1, -1).to(events_THD.dtype)
        return torch.cat([start_T1D, events_THD], dim=1)


def split_heads(rows_THD: Tensor, heads: int) -> Tensor:
    """Return [T, H, D] as [T, heads, H, D / heads]."""
    parts: Tensor = rows_THD.unflatten(2, (heads, -1))
    return parts.transpose(1, 2)


def join_heads(rows: Tensor) -> Tensor:
    """Return [T, heads, H, D / heads] as [T, H, D]."""
    return rows.transpose(1, 2).flatten(2)


def append_past(past: Past | None, key: Tensor, value: Tensor) -> Past:
    """Return keys and values of earlier and new events."""
    if past is None:
        return Past(key, value)
    return Past(torch.cat([past.key, key], dim=2), torch.cat([past.value, value], dim=2))
