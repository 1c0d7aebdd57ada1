"""The sections [augment], [support_features], [item_features] and [neighbours]: batches and inputs
from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from gmeta_keys import key

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class AugmentConfig:
    """How training batches differ from the stored ones."""

    resplit_support: bool = key(
        False, "draw every task's support rows anew each epoch; not for a split by time"
    )
    min_support_share: float = key(
        0.2, "resplit_support: smallest share of a task's rows that support it", min=0.0, max=1.0
    )
    max_support_share: float = key(
        0.8,
        "resplit_support: largest such share; 0: as many rows as in the dataset",
        min=0.0,
        max=1.0,
    )
    oov_dropout: float = key(
        0.0, "probability that an id counts as unknown for a whole step", min=0.0, max=1.0
    )
    oov_tables: tuple[str, ...] = key((), "tables whose ids oov_dropout may take; []: all of them")


@dataclass(frozen=True)
class SupportFeaturesConfig:
    """What a task's support rows say, as dense inputs of the model; docs/training.md."""

    task: bool = key(False, "mean label, spread and number of the task's support rows")
    columns: tuple[str, ...] = key(
        (),
        "glob patterns over the sparse columns: mean label and number of the support rows "
        "that share the row's value",
    )
    shrinkage: float = key(3.0, "rows that the prior of these means counts as", min=0.0)
    residual_of: str = key(
        "",
        "one of item_features' columns, such as the item: labels count from what training "
        "rows say of it",
    )
    label_prior: tuple[float, ...] = key(
        (), "mean and standard deviation of the labels; []: those of the data"
    )

    @property
    def is_used(self) -> bool:
        """Tell whether any of these inputs is asked for."""
        return self.task or bool(self.columns)


@dataclass(frozen=True)
class ItemFeaturesConfig:
    """What the training rows say of a row's values, as dense inputs of the model."""

    columns: tuple[str, ...] = key(
        (),
        "glob patterns over the sparse columns: mean label and number of the training rows "
        "with the row's value",
    )
    shrinkage: float = key(
        5.0, "rows that the prior of these means counts as",
        min=0.0,
    )  # fmt: skip
    log_odds: bool = key(
        False,
        "of clicks: these means, and with support_features.residual_of the task's, as log-odds",
    )


@dataclass(frozen=True)
class NeighboursConfig:
    """What a task's support rows say of items near a row's own, as dense inputs of the model."""

    column: str = key("", "the single-id column whose values have neighbours, such as the item")
    count: int = key(50, "neighbours of each value that are kept, 8 bytes each", min=1, max=10_000)


def choose_columns(key_name: str, patterns: Sequence[str], names: Sequence[str]) -> list[bool]:
    """Return which of the sparse columns the glob patterns of a config key choose. Raises
    ValueError: a pattern matches no sparse column."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"{key_name}: {pattern!r} matches no sparse column; this dataset "
                f'has {", ".join(names)}. Name some of them, "*" for all, or none at all: []'
            )
    return [any(fnmatchcase(name, pattern) for pattern in patterns) for name in names]


class LabelPrior(NamedTuple):
    """What is known of a label before any row of its task: what statistics of support rows are
    shrunken to, and counted from in units of its deviation."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, label_N: "npt.NDArray[np.floating[Any]]") -> "LabelPrior":
        """Return mean and standard deviation of these labels; 0 and 1 if there are none, a
        deviation of 1 for labels that are all alike."""
        if not label_N.size:
            return NO_PRIOR
        return cls(float(label_N.mean(dtype=float)), float(label_N.std(dtype=float)) or 1.0)

    @classmethod
    def from_config(cls, config: "SupportFeaturesConfig") -> "LabelPrior | None":
        """Return the prior that the config gives; None if it is left to the data. Raises
        ValueError: it is no pair of a mean and a deviation above 0."""
        mean_and_deviation = config.label_prior
        if not mean_and_deviation:
            return None
        if len(mean_and_deviation) != 2 or mean_and_deviation[1] <= 0:
            raise ValueError(
                f"support_features.label_prior = {list(mean_and_deviation)} is no mean and "
                "standard deviation "
                "above 0. Write e.g. [3.6, 1.1], or [] to take them from the training split"
            )
        return cls(*mean_and_deviation)


NO_PRIOR = LabelPrior(0.0, 1.0)
