"""Readings, the reports of a run, and loggers, the places that readings go to."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gmeta.config.settings import flatten_sections

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class RunInfo:
    """A run before its first step."""

    folder: Path
    config: Mapping[str, Any]  # resolved: section -> key -> value
    metric: str  # that validation goes by
    done_steps: int = 0  # above 0: the run is resumed
    total_steps: int = 0

    def parameters(self) -> dict[str, Any]:
        """Return the config as `section.key` -> value: bool, number, text, or a list as text."""
        return {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in flatten_sections(self.config).items()
        }


@dataclass(frozen=True)
class Reading:
    """The numbers of a step by name, of a split in a dict; None: undefined."""

    step: int
    epoch: int
    values: Mapping[str, Any]

    def scalars(self) -> dict[str, float]:
        """Return the numbers that are defined, those of a split as `valid/auc`."""
        nested = {
            name: value if isinstance(value, Mapping) else {"": value}
            for name, value in self.values.items()
        }
        return {
            f"{name}/{part}".rstrip("/"): value
            for name, parts in nested.items()
            for part, value in parts.items()
            if value is not None
        }


class Logger(abc.ABC):
    """One place that readings go to. Rank 0 alone makes it, without arguments, and calls it on a
    thread of its own: a call that takes longer than half of run.collective_timeout_s (with two such
    loggers a third) is its last."""

    def begin(self, run: RunInfo) -> None:  # noqa: B027 - nothing to do is a choice
        """Get ready, before the first step. An error ends the run."""

    @abc.abstractmethod
    def log(self, reading: Reading) -> None:
        """Write a reading."""

    def end(self, status: Status) -> None:  # noqa: B027 - as above
        """Close what is open. "stopped": the run goes on another time, with --resume."""
