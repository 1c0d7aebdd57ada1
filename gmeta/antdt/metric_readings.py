"""A trainer's loss and validation, for people who watch; a restarted service begins anew."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, final

MAX_READINGS_PER_CALL = 64
MAX_VALUES = 64  # of a reading
MAX_POINTS = 200  # of a curve

Curves = dict[str, list[tuple[int, float | None]]]


class MetricReading(NamedTuple):
    """Numbers by name, such as "loss" and "valid/auc", after `step` steps."""

    step: int
    values: Mapping[str, float]


@final
class MetricHistory:
    """The readings of a job's present generation, and of earlier ones up to its roll-back."""

    def __init__(self) -> None:
        self._generation = 0
        self._by_step: dict[int, dict[str, float]] = {}

    def add(self, readings: Iterable[MetricReading], generation: int) -> None:
        """Take in what a worker of that generation reports. A repeated reading changes nothing."""
        for step, values in readings:
            if generation > self._generation:
                self._generation = generation
                # Later readings are of a model that is gone.
                self._by_step = {at: old for at, old in self._by_step.items() if at < step}
            of_step = self._by_step.setdefault(step, {})
            of_step.update(values)
            # A step keeps as many names as one call can bring: the newest ones.
            num_surplus = max(0, len(of_step) - MAX_READINGS_PER_CALL * MAX_VALUES)
            for name in list(of_step)[:num_surplus]:
                del of_step[name]
        if len(self._by_step) > MAX_POINTS:
            self._drop_every_second()

    def curves(self) -> Curves:
        """Return name -> [(step, value), ...] by step; None for a value that is not finite."""
        curves_by_name: Curves = {}
        for step in sorted(self._by_step):
            for name, value in self._by_step[step].items():
                # JSON has no infinity and no NaN.
                point = step, value if math.isfinite(value) else None
                curves_by_name.setdefault(name, []).append(point)
        return curves_by_name

    def _drop_every_second(self) -> None:
        """Keep every second point of each name, and always its newest."""
        # So a curve keeps its whole length, at half the points.
        seen: dict[str, int] = {}
        kept: dict[int, dict[str, float]] = {}
        for step in sorted(self._by_step, reverse=True):
            for name, value in self._by_step[step].items():
                seen[name] = seen.get(name, 0) + 1
                if seen[name] % 2:
                    kept.setdefault(step, {})[name] = value
        # A new name at each step makes no curves: then only the newest points stay.
        self._by_step = dict(list(kept.items())[:MAX_POINTS])
