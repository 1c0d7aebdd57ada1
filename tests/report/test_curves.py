"""Few support rows and little activity, in figures and pictures."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from gmeta.metrics.catalogue import Scoring
from gmeta.metrics.scores import evaluate_split
from gmeta.report.charts import charts_of
from gmeta.report.console import console_table
from gmeta.report.evaluation import to_json
from gmeta.report.page import page
from gmeta.report.render import svg_panel
from gmeta.report.runs import EvaluatedRun, rows_of_split, task_rows_of
from gmeta.report.summarise import summarise
from tests.report.sample import baseline_of, predictions, run_of


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
    evaluation = summarise([run, baseline_of("mse")])
    for group in evaluation.groups:
        assert [one.max_support_rows for one in group.by_support_limit] == [0, 3, 20]
        whole = rows_of_split(run.predictions, group.name)
        for one in group.by_support_limit:
            rows = rows_of_split(run.limited[one.max_support_rows], group.name)
            (result,) = one.results  # the baseline was shown no limits
            expected = evaluate_split(rows.label_N, rows.after_N, rows.task_N, Scoring("mse"))
            assert {name: e.value for name, e in result.metrics.items()} == {
                name: e.value for name, e in expected.items()
            }
            full = {
                t
                for t, s in zip(whole.task_N, whole.support_rows_N, strict=True)
                if s >= one.max_support_rows
            }
            assert one.num_tasks_full == len(full)


def test_the_curve_is_drawn_for_every_group_and_charted_metric() -> None:
    evaluation = summarise([limited_run()])
    charts = {chart.name: chart for chart in charts_of(evaluation, [])}
    titles = [panel.title for panel in charts["few_support_rows"].panels]
    assert titles[:3] == ["user-cold: MAE", "user-cold: nDCG@3", "user-cold: AUC (rating ≥ 4)"]
    drawing = svg_panel(charts["few_support_rows"], 0)
    assert "support rows shown" in drawing
    assert "few_support_rows" not in {
        chart.name for chart in charts_of(summarise([run_of("mse")]), [])
    }


def test_tasks_fall_into_bins_by_their_rows() -> None:
    run = active_run()
    (group, _) = summarise([run]).groups
    rows, sizes = (
        rows_of_split(run.predictions, group.name),
        task_rows_of(run.predictions, group.name),
    )
    assert sum(one.num_tasks for one in group.by_activity) == group.num_tasks
    for one in group.by_activity:
        mine = [t for t, size in sizes.items() if one.min_rows <= size <= one.max_rows]
        kept = rows.where(np.isin(rows.task_N, mine))
        assert (one.num_tasks, one.num_rows) == (len(mine), kept.task_N.size)
        expected = evaluate_split(kept.label_N, kept.after_N, kept.task_N, Scoring("mse"))["mae"]
        after = next(found for found in one.results if found.stage == "after")
        assert after.metrics["mae"].value == expected.value


def test_activity_is_drawn_unless_it_is_the_support_size_again() -> None:
    assert "activity" in {chart.name for chart in charts_of(summarise([active_run()]), [])}
    run = run_of("mse")
    rows = run.predictions["support_rows"].to_numpy() + 8
    alike = replace(run, predictions=run.predictions.append_column("task_rows", pa.array(rows)))
    assert "activity" not in {chart.name for chart in charts_of(summarise([alike]), [])}
    assert not summarise([run]).groups[0].by_activity


@pytest.mark.parametrize("run", [limited_run(), active_run()])
def test_page_console_and_json_take_it(run: EvaluatedRun) -> None:
    evaluation = summarise([run])
    assert "<!doctype html>" in page(evaluation, charts_of(evaluation, []))
    assert console_table(evaluation)
    group = to_json(evaluation)["groups"][0]
    assert len(group["by_support_limit"]) == len(run.limited)
