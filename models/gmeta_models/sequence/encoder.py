"""The interface of the encoders of events, and what they share.

A task's events are embedded once; each of its rows gets a vector made of the events before it, and
no other. The vectors are inputs of the model that do not move while it adapts to a task.

Shape suffixes: T tasks, R rows of a task, N rows, L events of a task, C columns of an event's ids,
K numbers of an event, D embedding width, H heads"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad


class EventRectangle(NamedTuple):
    """Tasks with about as many events each, padded behind the last; and their rows."""

    position_TLC: Tensor  # int64, of the fetched embedding rows
    numbers_TLK: Tensor  # float32: seconds since the task's first event, then the dense columns
    num_events_T: Tensor  # int64
    row_TR: Tensor  # int64: which row of the batch; any where there is none
    before_TR: Tensor  # int64: how many events the row knows


class EventLayout(NamedTuple):
    """The events of a batch, and what its rows need of them."""

    rectangles: tuple[EventRectangle, ...]
    place_N: Tensor  # int64: each row's place among the T * R of all rectangles
    target_NC: Tensor  # int64: the fetched rows that make the row's target
    # The item of each row and the logarithm of its share of the rows; [0] unless a loss asks.
    item_N: Tensor
    log_share_N: Tensor


class EventVectors(NamedTuple):
    """What each row's events say, and its target: [N, D] each."""

    interest_ND: Tensor
    target_ND: Tensor

    def inputs_NX(self) -> Tensor:
        """Return a row's inputs of a model: the interest, and its product with the target."""
        return torch.cat([self.interest_ND, self.interest_ND * self.target_ND], dim=1)


class EventEncoder(nn.Module, ABC):
    """Turns events into a vector a row."""

    def __init__(self, width: int, num_numbers: int) -> None:
        super().__init__()
        self.width = width
        # Of the seconds since the event before, and of the dense columns.
        self.numbers = nn.Linear(num_numbers, self.width, bias=False)
        nn.init.zeros_(self.numbers.weight)

    @property
    def outputs(self) -> int:
        """Return the width of a row's inputs, see EventVectors."""
        return 2 * self.width

    @abstractmethod
    def interest_TRD(
        self, rectangle: EventRectangle, events_TLD: Tensor, target_TRD: Tensor
    ) -> Tensor:
        """Return what each row's earlier events say, from the embedded events: [T, R, D]."""

    def embed_TLD(self, rectangle: EventRectangle, rows_UD: Tensor) -> Tensor:
        """Return the sum of an event's embeddings, and of its numbers through a layer."""
        events_TLD = embedding(rectangle.position_TLC, rows_UD).sum(dim=2)
        seconds_TL, dense_TLK = rectangle.numbers_TLK[..., 0], rectangle.numbers_TLK[..., 1:]
        gap_TL = (seconds_TL - pad(seconds_TL, (1, 0))[:, :-1]).clamp(min=0).log1p()
        numbers_TLK = torch.cat([gap_TL.unsqueeze(2), dense_TLK], dim=2).to(events_TLD.dtype)
        embedded_TLD: Tensor = events_TLD + self.numbers(numbers_TLK)
        return embedded_TLD

    def forward(self, events: EventLayout, rows_UD: Tensor) -> EventVectors:
        """Return each row's vectors, from the fetched embedding rows."""
        target_ND = embedding(events.target_NC, rows_UD).sum(dim=1)
        parts = [
            self.interest_TRD(
                rectangle,
                self.embed_TLD(rectangle, rows_UD),
                embedding(rectangle.row_TR, target_ND),
            ).flatten(0, 1)
            for rectangle in events.rectangles
        ]
        parts = parts or [rows_UD.new_zeros(0, self.width) + self.numbers.weight.sum() * 0.0]
        interest_ND = torch.cat(parts).index_select(0, events.place_N)
        return EventVectors(interest_ND, target_ND)


class Past(NamedTuple):
    """What a layer keeps of the events that it has seen."""

    key_THLD: Tensor
    value_THLD: Tensor


class StateEncoder(EventEncoder):
    """An encoder whose state behind each event serves all rows that know as many events."""

    def __init__(self, width: int, num_numbers: int) -> None:
        super().__init__(width, num_numbers)
        # Stands before the first event: the state of a row that knows none.
        self.start_D = nn.Parameter(torch.zeros(self.width))
        nn.init.normal_(self.start_D, std=0.02)

    @abstractmethod
    def states_TLD(
        self, inputs_TLD: Tensor, seconds_TL: Tensor, past: tuple[Past, ...] = ()
    ) -> tuple[Tensor, tuple[Past, ...]]:
        """Return the state behind each input, given what was kept of those before, and what to
        keep of all of them."""

    def interest_TRD(
        self, rectangle: EventRectangle, events_TLD: Tensor, target_TRD: Tensor
    ) -> Tensor:
        """Return the state behind the last event that each row knows."""
        states_TLD, _ = self.states_TLD(
            self.with_start(events_TLD), pad(rectangle.numbers_TLK[..., 0], (1, 0))
        )
        index_TRD = rectangle.before_TR.unsqueeze(2).expand(-1, -1, self.width)
        return states_TLD.gather(1, index_TRD)

    def with_start(self, events_TLD: Tensor) -> Tensor:
        """Return the inputs of the layers: the start, then the events."""
        start_T1D = self.start_D.expand(len(events_TLD), 1, -1).to(events_TLD.dtype)
        return torch.cat([start_T1D, events_TLD], dim=1)


def split_heads(rows_TLD: Tensor, heads: int) -> Tensor:
    """Return [T, L, D] as [T, H, L, D / H]."""
    return rows_TLD.unflatten(2, (heads, -1)).transpose(1, 2)


def join_heads(rows_THLD: Tensor) -> Tensor:
    """Return [T, H, L, D / H] as [T, L, D]."""
    return rows_THLD.transpose(1, 2).flatten(2)


def append_past(past: Past | None, key_THLD: Tensor, value_THLD: Tensor) -> Past:
    """Return keys and values of earlier and new events."""
    if past is None:
        return Past(key_THLD, value_THLD)
    return Past(
        torch.cat([past.key_THLD, key_THLD], dim=2), torch.cat([past.value_THLD, value_THLD], dim=2)
    )
