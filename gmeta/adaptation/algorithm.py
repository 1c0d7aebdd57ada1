"""What tells one meta-learning algorithm from another; each has a file and a line in ALGORITHMS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from gmeta.adaptation.rates import FixedRates, InnerRates

if TYPE_CHECKING:
    from gmeta.adaptation.config import AlgorithmConfig
    from gmeta.adaptation.inner_loop import InnerLoop, WorkingRows
    from gmeta.adaptation.side import Side


@dataclass(frozen=True)
class TableSizes:
    """The embedding tables in front of a model: how many, and how wide each row is."""

    num_tables: int
    width: int


def as_configured(model: nn.Module, config: AlgorithmConfig) -> AlgorithmConfig:
    """The preset of an algorithm that takes the config as it stands."""
    return config


def fixed_rates(
    layers: Mapping[str, nn.Linear], config: AlgorithmConfig, tables: TableSizes
) -> InnerRates:
    """The rates of an algorithm that learns none: algorithm.inner_lr for everything."""
    return FixedRates(config.inner_lr)


@dataclass(frozen=True)
class Algorithm:
    """How a learner adapts to its tasks, and from what it gets its meta-gradient."""

    # (inner loop, rows, support, query) -> a scalar, the sum over the tasks of the outer losses;
    # its gradient is the sum of the tasks' meta-gradients.
    loss_sum: Callable[[InnerLoop, WorkingRows, Side, Side], Tensor]
    preset: Callable[[nn.Module, AlgorithmConfig], AlgorithmConfig] = as_configured
    rates: Callable[[Mapping[str, nn.Linear], AlgorithmConfig, TableSizes], InnerRates] = (
        fixed_rates
    )
    # Set where loss_sum is no more than the query loss at what the inner steps make, of this order:
    # the fused loop then computes it where it can.
    query_loss_of: Literal["first order", "second order"] | None = None
    # The side that a task needs rows of to count in the mean over the tasks.
    learns_from: Literal["query", "support"] = "query"
