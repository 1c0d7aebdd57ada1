"""The interface of a meta-learning algorithm; each has a file here and a line in registry.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from torch import Tensor, nn

from gmeta.adaptation.learned_parts import NOTHING_LEARNED, LearnedParts
from gmeta.adaptation.rates import FixedRates, InnerRates
from gmeta_models.model_config import InputSizes

if TYPE_CHECKING:
    from gmeta.adaptation.adaptation_plan import AdaptationPlan
    from gmeta.adaptation.general_loop import GeneralLoop
    from gmeta.adaptation.layout.sides import Sides, WorkingRows
    from gmeta.config.algorithm import AlgorithmConfig

Tasks = TypeVar("Tasks", contravariant=True)
Adapted = TypeVar("Adapted")


class InnerLoop(Protocol[Tasks, Adapted]):
    """The calls that MAML makes on an inner loop, the general or the fused one."""

    config: AlgorithmConfig

    def start(self, rows: WorkingRows, tasks: Tasks, second_order: bool) -> Adapted:
        """Return theta of every task before the first step."""

    def step(self, adapted: Adapted, second_order: bool) -> Adapted:
        """Return theta of every task after one more step on its support rows."""

    def query_loss_sum(self, adapted: Adapted, tasks: Tasks) -> Tensor:
        """Return the sum over the tasks of the mean query loss at theta_t: a scalar."""


@dataclass(frozen=True)
class TableSizes:
    """The embedding tables in front of a model: number, row width, names and columns."""

    num_tables: int
    width: int
    names: tuple[str, ...] = ()
    inputs: InputSizes = InputSizes(0, 0, 0)  # noqa: RUF009 - frozen
    left_out: tuple[str, ...] = ()  # of the names: the model does not see their rows

    def adapting_tables(self, config: AlgorithmConfig) -> tuple[int, ...] | None:
        """Return the places of the tables whose rows adapt, ascending; None: all, or none. Raises
        ValueError: the config names a table that does not exist, or is left out."""
        if isinstance(config.adapt_embeddings, bool):
            if not self.left_out:
                return None
            return tuple(i for i, name in enumerate(self.names) if name not in self.left_out)
        for name in config.adapt_embeddings:
            if name not in self.names:
                raise ValueError(
                    f"algorithm.adapt_embeddings names {name!r}, which is no table of the dataset: "
                    f"it has {', '.join(self.names) or 'none'}. Name some of them, or set true "
                    "for all"
                )
            if name in self.left_out:
                raise ValueError(
                    f"algorithm.adapt_embeddings names {name!r}, which model.without leaves out of "
                    "the model. Take it out of one of them"
                )
        return tuple(sorted({self.names.index(name) for name in config.adapt_embeddings}))


def keep_config(model: nn.Module, config: AlgorithmConfig) -> AlgorithmConfig:
    """Return the config unchanged: the preset of an algorithm that fixes nothing."""
    return config


def without_embeddings(model: nn.Module, config: AlgorithmConfig) -> AlgorithmConfig:
    """Return the config with no embedding row to adapt: for algorithms whose steps move none."""
    return replace(config, adapt_embeddings=False)


def fixed_rates(plan: AdaptationPlan, tables: TableSizes) -> InnerRates:
    """Return algorithm.inner_lr for all that adapts: the rates of an algorithm that learns none."""
    return FixedRates(plan.config.inner_lr, tables.adapting_tables(plan.config))


def no_learned_parts(model: nn.Module, config: AlgorithmConfig, tables: TableSizes) -> LearnedParts:
    """Return no parts: for an algorithm that learns the model alone."""
    return NOTHING_LEARNED


@dataclass(frozen=True)
class Algorithm:
    """How a learner adapts to its tasks, and where its meta-gradient comes from."""

    # (inner loop, rows, tasks) -> a scalar, the sum over the tasks of the outer losses; its
    # gradient is the sum of the tasks' meta-gradients. A QueryLoss (maml.py) may be given the fused
    # inner loop and its tasks instead.
    loss_sum: Callable[[GeneralLoop, WorkingRows, Sides], Tensor]
    preset: Callable[[nn.Module, AlgorithmConfig], AlgorithmConfig] = keep_config
    rates: Callable[[AdaptationPlan, TableSizes], InnerRates] = fixed_rates
    parts: Callable[[nn.Module, AlgorithmConfig, TableSizes], LearnedParts] = no_learned_parts
    solves: bool = False  # an inner step is solved in closed form: closed_form.py
    takes_steps: bool = True  # False: adapting is a forward pass alone
    # A task counts in the mean over the tasks if it has rows of this side.
    learns_from: Literal["query", "support"] = "query"
    options: type | None = None  # of another package: a dataclass of algorithm.options
