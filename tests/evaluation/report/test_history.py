"""The learning curve keeps the shape of what was logged."""

import math
from typing import Any

import numpy as np
import pytest

from gmeta.evaluation.report.learning_curves import MAX_POINTS, make_learning_curves
from gmeta.metrics.catalogue import Scoring
from tests.evaluation.report.sample import history

# P points


def losses(values: list[float]) -> list[dict[str, Any]]:
    return [{"step": index, "loss": value} for index, value in enumerate(values)]


def test_training_loss_and_the_headline_metric_are_drawn() -> None:
    loss, valid = make_learning_curves(history("mse"), Scoring("mse"))
    assert (loss.title, loss.axis_label) == ("Training loss", "loss (squared error)")
    assert loss.values.tolist() == [2.0 / (index + 1) for index in range(100)]
    assert (valid.title, valid.axis_label) == ("Validation MAE", "MAE")
    assert valid.steps.tolist() == [100.0 * (index + 1) for index in range(10)]


def test_another_validation_metric_is_drawn_where_the_headline_was_not_logged() -> None:
    lines = [{"step": 1, "loss": 1.0, "valid": {"logloss": 0.4}}]
    assert make_learning_curves(lines, Scoring("bce"))[1].title == "Validation Logloss"


def test_an_unknown_validation_metric_keeps_its_own_name() -> None:
    lines = [{"step": 1, "loss": 1.0, "valid": {"hit@10": 0.4}}]
    assert make_learning_curves(lines, Scoring("bce"))[1].title == "Validation hit@10"


def test_no_log_gives_no_curve() -> None:
    assert make_learning_curves([], Scoring("bce")) == []


def test_losses_that_are_no_numbers_leave_gaps_not_zeros() -> None:
    lines = [*losses([1.0, math.nan, 3.0]), {"step": 9, "loss": None}, {"epoch": 1}]
    (curve,) = make_learning_curves(lines, Scoring("bce"))
    assert (curve.steps.tolist(), curve.values.tolist()) == ([0.0, 2.0], [1.0, 3.0])


def test_a_long_run_is_thinned_to_means_of_neighbours() -> None:
    (curve,) = make_learning_curves(
        losses([float(index % 10) for index in range(10 * MAX_POINTS)]), Scoring("bce")
    )
    assert curve.values.size == MAX_POINTS
    assert set(curve.values.tolist()) == {4.5}


def test_the_running_mean_equals_a_loop_over_windows() -> None:
    values_V = np.random.default_rng(0).normal(size=200)
    (curve,) = make_learning_curves(losses(values_V.tolist()), Scoring("bce"))
    slow = [values_V[max(0, place - 5) : place + 6].mean() for place in range(200)]
    assert curve.smooth == pytest.approx(slow)


def test_few_points_are_not_smoothed() -> None:
    (curve,) = make_learning_curves(losses([1.0] * 39), Scoring("bce"))
    assert curve.smooth.size == 0


@pytest.mark.parametrize(("last", "drawn"), [(264, 3), (299, 3), (300, 4), (400, 4)])
def test_the_mean_of_few_steps_at_the_end_is_left_out(last: int, drawn: int) -> None:
    lines = [{"step": step, "loss": 0.4} for step in (50, 150, 250)]
    (curve,) = make_learning_curves([*lines, {"step": last, "loss": 0.1}], Scoring("bce"))
    assert curve.steps.tolist() == [50.0, 150.0, 250.0, last][:drawn]
