"""What an encoder keeps of a task's events, so that a further one is encoded alone.

Shape suffixes: T tasks, N rows, H longest list or task, M multi-id features, K dense columns, U
unique ids, D embedding width"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from gmeta_models.sequence.encoder import EventRectangle, Past, StateEncoder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class EventMemory:
    """The state behind the newest event of a task, and what its layers keep of all of them."""

    state_TD: Tensor  # of one task
    past: tuple[Past, ...]
    first_s: float  # the time of the oldest event
    last_s: float

    @property
    def num_bytes(self) -> int:
        """Count the bytes of the tensors."""
        tensors = [self.state_TD, *(tensor for past in self.past for tensor in past)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def encode_events(
    encoder: StateEncoder,
    rectangle: EventRectangle,
    rows_UD: Tensor,
    seconds_N: npt.NDArray[np.float64],
    before: EventMemory | None = None,
) -> EventMemory:
    """Return what is kept of the events of one task, of these times, oldest first, and of those
    before them."""
    num_events = len(seconds_N)
    first_s = seconds_N[0] if before is None else before.first_s
    # As a dataset has them: since the first event, in 32 bits.
    since_H = torch.from_numpy(seconds_N - first_s).to(torch.float32)
    numbers_THK = rectangle.numbers_THK[:, :num_events].clone()
    numbers_THK[0, :, 0] = since_H
    rectangle = rectangle._replace(
        position_THM=rectangle.position_THM[:, :num_events], numbers_THK=numbers_THK
    )
    if before is None:
        inputs_THD = encoder.with_start(encoder.embed_THD(rectangle, rows_UD))
        states_THD, past = encoder.states_THD(inputs_THD, pad(since_H, (1, 0)).unsqueeze(0))
    else:
        last_s = float(torch.tensor(before.last_s - first_s, dtype=torch.float32))
        events_THD = encoder.embed_THD(rectangle, rows_UD, last_s)
        states_THD, past = encoder.states_THD(events_THD, since_H.unsqueeze(0), before.past)
    return EventMemory(states_THD[:, -1], past, float(first_s), float(seconds_N[-1]))
