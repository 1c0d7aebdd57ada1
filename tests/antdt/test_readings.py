"""The loss and the scores that the live page draws."""

import math

from gmeta.antdt.metric_readings import MAX_CURVES, MAX_POINTS, MetricHistory, MetricReading


def report(history: MetricHistory, readings: list[MetricReading], generation: int) -> None:
    """As the ledger does; what is stored in between gives the same history."""
    history.add(history.select_new(readings, generation), generation)
    assert MetricHistory.from_json(history.to_json()).to_json() == history.to_json()


def test_curves_come_by_step_whatever_order_readings_come_in() -> None:
    readings = MetricHistory()
    report(
        readings,
        [MetricReading(20, {"loss": 0.5}), MetricReading(10, {"loss": 0.6, "valid/auc": 0.7})],
        1,
    )
    report(readings, [MetricReading(10, {"loss": 0.6})], 1)  # once more
    assert readings.curves() == {
        "loss": [(10, 0.6, None), (20, 0.5, None)],
        "valid/auc": [(10, 0.7, None)],
    }


def test_what_is_no_number_is_a_gap() -> None:
    readings = MetricHistory()
    report(
        readings, [MetricReading(1, {"loss": math.nan}), MetricReading(2, {"loss": math.inf})], 1
    )
    assert readings.curves() == {"loss": [(1, None, None), (2, None, None)]}


def test_a_job_that_is_rolled_back_goes_on_from_its_checkpoint() -> None:
    readings = MetricHistory()
    report(readings, [MetricReading(step, {"loss": 1.0}) for step in (10, 20, 30)], 1)
    report(readings, [MetricReading(20, {"loss": 2.0})], 2)
    report(readings, [MetricReading(25, {"loss": 3.0})], 2)
    assert readings.curves() == {"loss": [(10, 1.0, None), (20, 2.0, None), (25, 3.0, None)]}


def test_a_long_curve_keeps_its_length_and_its_newest_point() -> None:
    readings = MetricHistory()
    for step in range(1, 5 * MAX_POINTS):
        values = {"loss": 1.0 / step} | ({"valid/auc": 0.5} if step % 100 == 0 else {})
        report(readings, [MetricReading(step, values)], 1)
    curve = readings.curves()["loss"]
    assert MAX_POINTS / 2 <= len(curve) <= MAX_POINTS
    assert curve[0][0] < MAX_POINTS
    assert curve[-1] == (5 * MAX_POINTS - 1, 1.0 / (5 * MAX_POINTS - 1), None)
    assert readings.curves()["valid/auc"][-1] == (900, 0.5, None)


def test_names_without_end_fill_no_memory() -> None:
    readings = MetricHistory()
    for step in range(5 * MAX_POINTS):
        report(readings, [MetricReading(step, {f"valid/{step}": 1.0, "loss": 2.0})], 1)
    assert len(readings.curves()) <= MAX_CURVES
    assert readings.curves()["loss"][-1][0] == 5 * MAX_POINTS - 1


def test_what_is_known_or_not_drawn_is_not_stored_again() -> None:
    readings = MetricHistory()
    first = MetricReading(1, {"loss": math.nan, "valid/auc": 0.5, "samples_per_s": 9.0}, 1e9)
    (found,) = readings.select_new([first], 1)
    assert sorted(found[2]) == ["loss", "valid/auc"]
    report(readings, [first], 1)
    assert readings.select_new([first], 1) == []
    assert readings.select_new([MetricReading(1, {"loss": 0.5})], 1) == [(1, 0.0, {"loss": 0.5})]
    assert readings.select_new([first], 2) == [found]  # of another model
    assert readings.curves()["valid/auc"] == [(1, 0.5, 1e9)]
