"""A trainer's loss, validation and run, for people who watch; the ledger stores them."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, final

MAX_READINGS_PER_CALL = 64
MAX_VALUES = 64  # of a reading
MAX_POINTS = 200  # of a curve
MAX_CURVES = 256  # names that come later are not taken: nobody looks at more
MAX_FOLDER_CHARS = 4096
MAX_WALL_S = 1e11  # in the year 5138

# name -> (step, value, wall time in s); None: no finite value, an unknown time.
Curves = dict[str, list[tuple[int, float | None, float | None]]]


class MetricReading(NamedTuple):
    """Numbers by name, such as "loss" and "valid/auc", after `step` steps."""

    step: int
    values: Mapping[str, float]
    wall_s: float = 0.0  # by the trainer's clock; 0: unknown


class RunReport(NamedTuple):
    """What a trainer says of its run: "training", "finished", "stopped" or "failed"."""

    status: str
    folder: str
    total_steps: int
    wall_s: float = 0.0


@final
class MetricHistory:
    """The readings of a job's present generation, and of earlier ones up to its roll-back."""

    def __init__(self) -> None:
        self._generation = 0
        self._by_step: dict[int, dict[str, float]] = {}
        self._wall_s: dict[int, float] = {}
        self._names: set[str] = set()

    def select_new(
        self, readings: Iterable[MetricReading], generation: int
    ) -> list[tuple[int, float, dict[str, float]]]:
        """Return (step, wall time, values) of what is drawn and not known yet."""
        new = []
        for step, values, wall_s in readings:
            known = self._by_step.get(step, {}) if generation <= self._generation else {}
            # Speed and rates are left out: store and page stay small.
            fresh = {
                name: value
                for name, value in values.items()
                if (name == "loss" or "/" in name) and not _is_same(known.get(name), value)
            }
            if fresh:
                new.append((step, wall_s, fresh))
        return new

    def add(self, readings: Iterable[tuple[int, float, dict[str, float]]], generation: int) -> None:
        """Take in (step, wall time, values) of that generation; what is repeated does no harm."""
        for step, wall_s, values in readings:
            if generation > self._generation:
                self._generation = generation
                # Later readings are of a model that is gone.
                self._keep_steps({at for at in self._by_step if at < step})
            of_step = self._by_step.setdefault(step, {})
            for name, value in values.items():
                if name in self._names or len(self._names) < MAX_CURVES:
                    self._names.add(name)
                    of_step[name] = value
            if wall_s:
                self._wall_s.setdefault(step, wall_s)
        if len(self._by_step) > MAX_POINTS:
            self._drop_every_second()

    def curves(self) -> Curves:
        """Return each name's (step, value, wall time in s) by step."""
        curves_by_name: Curves = {}
        for step in sorted(self._by_step):
            for name, value in self._by_step[step].items():
                # JSON has no infinity and no NaN.
                finite = value if math.isfinite(value) else None
                point = step, finite, self._wall_s.get(step)
                curves_by_name.setdefault(name, []).append(point)
        return curves_by_name

    def to_json(self) -> list[Any]:
        """Return what `from_json` takes."""
        steps = [[at, self._wall_s.get(at, 0.0), values] for at, values in self._by_step.items()]
        return [self._generation, steps]

    @classmethod
    def from_json(cls, document: list[Any]) -> "MetricHistory":
        """Return the history that `to_json` was called on."""
        history = cls()
        history._generation, steps = document
        history.add(steps, history._generation)
        return history

    def _keep_steps(self, steps: set[int]) -> None:
        self._by_step = {at: values for at, values in self._by_step.items() if at in steps}
        self._wall_s = {at: wall_s for at, wall_s in self._wall_s.items() if at in steps}

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
        self._keep_steps(set(self._by_step))


def _is_same(known: float | None, value: float) -> bool:
    return known == value or (known is not None and math.isnan(known) and math.isnan(value))
