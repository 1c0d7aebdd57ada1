"""Metrics over draws: means of means, and intervals that cover tasks and draws."""

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from gmeta.config.evaluation import EvaluationConfig
from gmeta.evaluation.report.evaluated_runs import EvaluatedRun, SplitRows, select_draws
from gmeta.evaluation.report.metric_estimates import measure_metrics
from gmeta.evaluation.report.summarise import summarise_evaluation
from gmeta.metrics.catalogue import Scoring
from gmeta.metrics.scores import evaluate_split
from tests.evaluation.report.sample import predictions, run_of

# N rows, T tasks, D draws

MAE = Scoring("mse", EvaluationConfig(metrics=("mae",)))


def tasks_of_draws(
    num_draws: int, num_tasks: int, between: float, within: float, seed: int
) -> list[SplitRows]:
    """Errors of one row a task: |1 + taste of the task + luck of its draw|."""
    rng = np.random.default_rng(seed)
    task_T = np.arange(num_tasks)
    taste_T = rng.normal(0, between, num_tasks)
    zeros_T = np.zeros(num_tasks)
    return [
        SplitRows(task_T, zeros_T, zeros_T, error_T, error_T, np.full((len(task_T), 4), -1))
        for error_T in (
            np.abs(5 + taste_T + rng.normal(0, within, num_tasks)) for _ in range(num_draws)
        )
    ]


def test_one_draw_is_the_metric_itself() -> None:
    rows = select_draws(predictions("bce"), "user-cold")
    assert len(rows) == 1
    found = measure_metrics(rows, "after", Scoring("bce"))
    expected = evaluate_split(rows[0].label_N, rows[0].after_N, rows[0].task_N, Scoring("bce"))
    told = {name: one.value for name, one in found.items()}
    assert told == {name: one.value for name, one in expected.items()}


@pytest.mark.parametrize(("between", "within"), [(1.0, 0.0), (0.0, 1.0), (0.6, 1.2)])
def test_an_interval_over_draws_covers_tasks_and_draws(between: float, within: float) -> None:
    """The estimate's variance over many data sets is (between^2 + within^2 / draws) / tasks."""
    draws, tasks = 4, 300
    expected = math.sqrt((between**2 + within**2 / draws) / tasks)
    widths = []
    for seed in range(8):
        measured = measure_metrics(
            tasks_of_draws(draws, tasks, between, within, seed), "after", MAE
        )["mae"]
        estimate = measured.estimate()
        widths.append((estimate.high - estimate.low) / (2 * 1.96))
    # Of 300 tasks a deviation is known to 4 %, of 1,000 resamples the ends of an interval to 2 %.
    assert np.mean(widths) == pytest.approx(expected, rel=0.06)


def drawn_run(num_draws: int) -> EvaluatedRun:
    """The same tasks and labels in every draw, with other errors."""
    run = run_of("mse")
    rng = np.random.default_rng(0)
    tables = []
    for draw in range(num_draws):
        table = run.predictions
        noisy = table["after"].to_numpy() + rng.normal(0, 0.2, table.num_rows)
        table = table.set_column(table.column_names.index("after"), "after", pa.array(noisy))
        tables.append(table.append_column("draw", pa.array([draw] * table.num_rows)))
    return replace(run, predictions=pa.concat_tables(tables))


def test_a_report_over_draws_is_the_mean_of_its_draws_and_shows_each() -> None:
    run = drawn_run(3)
    evaluation = summarise_evaluation([run])
    assert evaluation.interval.draws == 3
    assert evaluation.interval.method == "percentile bootstrap over tasks, each with all its draws"
    for group in evaluation.groups:
        draws = select_draws(run.predictions, group.name)
        expected = [
            evaluate_split(one.label_N, one.after_N, one.task_N, Scoring("mse"))["mae"].value
            for one in draws
        ]
        found = group.result(run.name, "after")
        assert found
        assert found.metrics["mae"].value == pytest.approx(np.mean(expected), rel=1e-12)
        assert group.num_rows == draws[0].task_N.size
        shown = {(one.run, one.stage): one.metrics["mae"] for one in group.by_draw}
        assert shown[run.name, "after"] == tuple(expected)
        # Before adapting all draws of this sample are alike: nothing but tasks makes an interval.
        assert len(set(shown[run.name, "before"])) == 1


def test_a_metric_that_a_draw_leaves_undefined_has_no_value() -> None:
    rows = tasks_of_draws(2, 20, 1.0, 1.0, 0)
    rows[1] = replace(rows[1], after_N=np.full(20, np.nan))
    estimate = measure_metrics(rows, "after", MAE)["mae"].estimate()
    assert math.isnan(estimate.value)
    assert estimate.reason == "draw 1: 20 of 20 predictions are not finite: the model diverged"


def test_runs_of_other_numbers_of_draws_are_not_compared() -> None:
    group = summarise_evaluation([drawn_run(3), replace(drawn_run(2), name="fewer")]).groups[0]
    comparison = group.comparison("melu-maml", "after", "fewer", "after")
    assert comparison
    assert comparison.metrics["mae"].verdict == "unknown"
