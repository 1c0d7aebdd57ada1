"""Few support rows and little activity, in figures and pictures."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from gmeta.evaluation.report.chart_files import render_svg
from gmeta.evaluation.report.charts import make_charts
from gmeta.evaluation.report.console_table import make_console_table
from gmeta.evaluation.report.evaluated_runs import EvaluatedRun, count_task_rows, select_split
from gmeta.evaluation.report.evaluation_schema import evaluation_to_json
from gmeta.evaluation.report.html_page import render_page
from gmeta.evaluation.report.summarise import summarise_evaluation
from gmeta.metrics.catalogue import Scoring
from gmeta.metrics.scores import evaluate_split
from tests.evaluation.report.sample import baseline_of, predictions, run_of


def limited_run() -> EvaluatedRun:
    """Worth the more, the more support rows it is shown."""
    tables = {most: predictions("mse", gain=gain) for most, gain in ((0, 0.0), (3, 0.4), (20, 0.8))}
    return replace(run_of("mse"), limited=tables)


def active_run() -> EvaluatedRun:
    """Tasks of 11 to 60 rows, whose number has nothing to do with their support rows."""
    run = run_of("mse")
    sizes_N = 11 + run.predictions["task"].to_numpy() * 7 % 50
    return replace(
        run, predictions=run.predictions.append_column("task_rows", pa.array(sizes_N, pa.int32()))
    )


def test_the_curve_is_the_metric_of_each_number_of_support_rows() -> None:
    run = limited_run()
    evaluation = summarise_evaluation([run, baseline_of("mse")])
    for group in evaluation.groups:
        assert [one.max_support_rows for one in group.by_support_limit] == [0, 3, 20]
        whole = select_split(run.predictions, group.name)
        for one in group.by_support_limit:
            rows = select_split(run.limited[one.max_support_rows], group.name)
            (result,) = one.results  # the baseline was shown no limits
            expected = evaluate_split(rows.label_N, rows.after_N, rows.task_N, Scoring("mse"))
            found = {name: e.value for name, e in result.metrics.items()}
            assert found == {name: e.value for name, e in expected.items()}
            full = {
                t
                for t, s in zip(whole.task_N, whole.support_rows_N, strict=True)
                if s >= one.max_support_rows
            }
            assert one.num_tasks_full == len(full)


def test_the_curve_is_drawn_for_every_group_and_charted_metric() -> None:
    evaluation = summarise_evaluation([limited_run()])
    charts = {chart.name: chart for chart in make_charts(evaluation, [])}
    titles = [panel.title for panel in charts["few_support_rows"].panels]
    assert titles[:3] == ["user-cold: MAE", "user-cold: nDCG@3", "user-cold: AUC (rating ≥ 4)"]
    drawing = render_svg(charts["few_support_rows"], 0)
    assert "support rows shown" in drawing
    assert "few_support_rows" not in {
        chart.name for chart in make_charts(summarise_evaluation([run_of("mse")]), [])
    }


def test_tasks_fall_into_bins_by_their_rows() -> None:
    run = active_run()
    (group, _) = summarise_evaluation([run]).groups
    rows, sizes = (
        select_split(run.predictions, group.name),
        count_task_rows(run.predictions, group.name),
    )
    assert sum(one.num_tasks for one in group.by_activity) == group.num_tasks
    for one in group.by_activity:
        mine = [t for t, size in sizes.items() if one.min_rows <= size <= one.max_rows]
        kept = rows.keep_where(np.isin(rows.task_N, mine))
        assert (one.num_tasks, one.num_rows) == (len(mine), kept.task_N.size)
        expected = evaluate_split(kept.label_N, kept.after_N, kept.task_N, Scoring("mse"))["mae"]
        after = next(found for found in one.results if found.stage == "after")
        assert after.metrics["mae"].value == expected.value


def test_activity_is_drawn_unless_it_is_the_support_size_again() -> None:
    found = "activity"
    assert found in {chart.name for chart in make_charts(summarise_evaluation([active_run()]), [])}
    run = run_of("mse")
    rows = run.predictions["support_rows"].to_numpy() + 8
    alike = replace(run, predictions=run.predictions.append_column("task_rows", pa.array(rows)))
    found = "activity"
    assert found not in {chart.name for chart in make_charts(summarise_evaluation([alike]), [])}
    assert not summarise_evaluation([run]).groups[0].by_activity


@pytest.mark.parametrize("run", [limited_run(), active_run()])
def test_page_console_and_json_take_it(run: EvaluatedRun) -> None:
    evaluation = summarise_evaluation([run])
    assert "<!doctype html>" in render_page(evaluation, make_charts(evaluation, []))
    assert make_console_table(evaluation)
    group = evaluation_to_json(evaluation)["groups"][0]
    assert len(group["by_support_limit"]) == len(run.limited)
