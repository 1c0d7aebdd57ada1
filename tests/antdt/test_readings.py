"""The loss and the scores that the live page draws."""

import math

from gmeta.antdt.metric_readings import MAX_POINTS, MetricHistory, MetricReading


def test_curves_come_by_step_whatever_order_readings_come_in() -> None:
    readings = MetricHistory()
    readings.add(
        [MetricReading(20, {"loss": 0.5}), MetricReading(10, {"loss": 0.6, "valid/auc": 0.7})], 1
    )
    readings.add([MetricReading(10, {"loss": 0.6})], 1)  # once more
    assert readings.curves() == {"loss": [(10, 0.6), (20, 0.5)], "valid/auc": [(10, 0.7)]}


def test_what_is_no_number_is_a_gap() -> None:
    readings = MetricHistory()
    readings.add([MetricReading(1, {"loss": math.nan}), MetricReading(2, {"loss": math.inf})], 1)
    assert readings.curves() == {"loss": [(1, None), (2, None)]}


def test_a_job_that_is_rolled_back_goes_on_from_its_checkpoint() -> None:
    readings = MetricHistory()
    readings.add([MetricReading(step, {"loss": 1.0}) for step in (10, 20, 30)], 1)
    readings.add([MetricReading(20, {"loss": 2.0})], 2)
    readings.add([MetricReading(25, {"loss": 3.0})], 2)
    assert readings.curves() == {"loss": [(10, 1.0), (20, 2.0), (25, 3.0)]}


def test_a_long_curve_keeps_its_length_and_its_newest_point() -> None:
    readings = MetricHistory()
    for step in range(1, 5 * MAX_POINTS):
        values = {"loss": 1.0 / step} | ({"valid/auc": 0.5} if step % 100 == 0 else {})
        readings.add([MetricReading(step, values)], 1)
    curve = readings.curves()["loss"]
    assert MAX_POINTS / 2 <= len(curve) <= MAX_POINTS
    assert curve[0][0] < MAX_POINTS
    assert curve[-1] == (5 * MAX_POINTS - 1, 1.0 / (5 * MAX_POINTS - 1))
    assert readings.curves()["valid/auc"][-1] == (900, 0.5)


def test_names_without_end_fill_no_memory() -> None:
    readings = MetricHistory()
    for step in range(5 * MAX_POINTS):
        readings.add([MetricReading(step, {f"loss-{step}": 1.0})], 1)
    assert len(readings.curves()) <= MAX_POINTS + 1
    assert f"loss-{5 * MAX_POINTS - 1}" in readings.curves()
