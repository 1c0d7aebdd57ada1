"""The learning curve: which lines of metrics.jsonl are drawn, thinned and smoothed how."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gmeta.metrics.catalogue import Scoring, is_metric
from gmeta.metrics.terms import Floats

# P points

# About one point for each pixel of a panel.
MAX_POINTS = 400
# The running mean spans this share of the curve.
SMOOTH_SHARE = 0.05
# With fewer points it would span less than two neighbours.
MIN_POINTS_TO_SMOOTH = 40
LOSS_NAMES = {
    "bce": "cross-entropy, nats",
    "mse": "squared error",
    "huber": "Huber's loss",
    "mae": "absolute error",
    "softmax": "softmax of a task's rows, nats",
    "pairwise": "pairs of a task's rows, nats",
}


@dataclass(frozen=True)
class LearningCurve:
    """One panel of the learning curve; `smooth` is empty where there are few values."""

    title: str
    axis_label: str
    color_name: str
    steps: Floats
    values: Floats
    smooth: Floats


def make_learning_curves(
    history: Sequence[dict[str, Any]],
    scoring: Scoring,
    label: str = "",
    num_labels: int = 1,
    loss_name: str = "",
) -> list[LearningCurve]:
    """Return the curves of the training loss and of the validation's headline metric; `loss_name`
    is that of the config, if not the scoring's."""
    curves = []
    if points := _drop_short_end(_read_points(history, "loss")):
        steps, values = _thin(points)
        title, smooth = "Training loss", _smooth(values)
        loss_name = loss_name or scoring.loss
        unit = LOSS_NAMES.get(loss_name, loss_name) if num_labels == 1 else "of all labels"
        curves += [LearningCurve(title, f"loss ({unit})", "series-0", steps, values, smooth)]
    valid = [
        {"step": line.get("step"), **line["valid"]}
        for line in history
        if isinstance(line.get("valid"), dict)
    ]
    headline = scoring.names[0]
    # The first metric that was logged, if the headline metric was not.
    wanted = f"{headline}:{label}" if label else headline
    names = list(dict.fromkeys(name for line in valid for name in line if name != "step"))
    name = wanted if wanted in names or not names else names[0]
    if points := _read_points(valid, name):
        label = scoring.info(name).label if is_metric(name) else name
        steps, values = _thin(points)
        curves.append(
            LearningCurve(f"Validation {label}", label, "series-2", steps, values, np.zeros(0))
        )
    return curves


def _read_points(lines: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [
        (float(line["step"]), float(line[name]))
        for line in lines
        if _is_number(line.get("step")) and _is_number(line.get(name))
    ]


def _drop_short_end(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points without the last one if it stands for few steps."""
    if len(points) < 3:
        return points
    before, last = np.diff([step for step, _ in points[-3:]])
    # A logged loss is the mean since the line before: that of a few steps is mostly noise.
    return points[:-1] if last < before / 2 else points


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _thin(points: Sequence[tuple[float, float]]) -> tuple[Floats, Floats]:
    steps_V, values_V = np.array(points, np.float64).T
    parts = min(MAX_POINTS, len(points))
    steps = [part.mean() for part in np.array_split(steps_V, parts)]
    values = [part.mean() for part in np.array_split(values_V, parts)]
    return np.array(steps), np.array(values)


def _smooth(values_V: Floats) -> Floats:
    """Return the centred running mean over SMOOTH_SHARE of the curve."""
    if values_V.size < MIN_POINTS_TO_SMOOTH:
        return np.zeros(0)
    half = max(1, round(SMOOTH_SHARE * values_V.size / 2))
    # Sums up to each point: the mean over any stretch is then one difference.
    sums = np.concatenate(([0.0], np.cumsum(values_V)))
    places_V = np.arange(values_V.size)
    # At both ends over the values that are there.
    first_V = np.maximum(places_V - half, 0)
    end_V = np.minimum(places_V + half + 1, values_V.size)
    return np.asarray((sums[end_V] - sums[first_V]) / (end_V - first_V))
