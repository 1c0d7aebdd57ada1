"""Inner rates: what multiplies the inner gradients of a layer, and of an embedding row.

Shape suffixes: B tables, D embedding width, P task-row pairs, I inputs, O outputs"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class WeightRates(NamedTuple):
    """A rate for each weight and each bias of a layer."""

    weight_OI: Tensor
    bias_O: Tensor | None  # None: the layer has no bias


# A float or a scalar tensor is one rate for the layer; a tensor [O] one for each output, which its
# weights and its bias share. Both keep a task's change of low rank; WeightRates do not.
LayerRate = float | Tensor | WeightRates


def scale_grads(grads: Tensor, rate: float | Tensor) -> Tensor:
    """Return the gradients times their rate, in the gradients' precision (autocast's, where on)."""
    if isinstance(rate, float) and rate == 1.0:
        return grads
    return grads * (rate.to(grads.dtype) if isinstance(rate, Tensor) else rate)


class InnerRates(Protocol):
    """The rates of an inner loop, fixed or learned."""

    def of_layer(self, name: str) -> LayerRate:
        """Return the rate of the adapted layer of this name."""

    def of_rows(self, unique_lengths_B: Tensor, fetched_row_P: Tensor) -> float | Tensor:
        """Return the rate of the tasks' embedding rows, to multiply [P, D] with; `fetched_row_P`
        says which fetched row each copies, `unique_lengths_B` how many each table has."""


@dataclass(frozen=True)
class FixedRates:
    """One rate from the config for all that adapts."""

    rate: float
    tables: tuple[int, ...] | None = None  # those whose rows adapt; None: all

    def of_layer(self, name: str) -> float:
        """Return the one rate."""
        return self.rate

    def of_rows(self, unique_lengths_B: Tensor, fetched_row_P: Tensor) -> float | Tensor:
        """Return the one rate; where only some tables adapt, each row's own."""
        if self.tables is None:
            return self.rate
        # In float64, as the rate of all tables is: the gradient's own precision is taken last.
        rate_B1 = unique_lengths_B.new_zeros(len(unique_lengths_B), 1, dtype=torch.float64)
        for table in self.tables:  # with a list of them as an index CUDA makes the host wait
            rate_B1[table] = self.rate
        return select_by_table(rate_B1, unique_lengths_B, fetched_row_P)


def select_by_table(values: Tensor, unique_lengths_B: Tensor, fetched_row_P: Tensor) -> Tensor:
    """Return the value of each row's table: [P, 1] or [P, D]; see InnerRates.of_rows."""
    ends_B = unique_lengths_B.cumsum(0)
    return values.index_select(0, torch.searchsorted(ends_B, fetched_row_P, right=True))
