"""Writes the files of a report: each complete or not at all, the same bytes for the same runs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gmeta.evaluation.report.chart_files import render_sheet
from gmeta.evaluation.report.charts import make_charts
from gmeta.evaluation.report.evaluated_runs import EvaluatedBaseline, EvaluatedRun
from gmeta.evaluation.report.evaluation_schema import Evaluation, evaluation_to_json
from gmeta.evaluation.report.html_page import render_page
from gmeta.evaluation.report.learning_curves import make_learning_curves
from gmeta.evaluation.report.summarise import summarise_evaluation
from gmeta.platform.files.atomic_write import write_atomically

CHART_NAMES = (
    *("groups", "task_gains", "support_gain", "one_task", "support_size", "few_support_rows"),
    *("activity", "calibration", "learning_curve"),
)

SHEET_FILES = ("png", "svg", "json")


@dataclass(frozen=True)
class ReportPaths:
    """The files of a report, and the evaluation that they show."""

    evaluation_json: Path
    html: Path
    charts: tuple[Path, ...]
    evaluation: Evaluation


def write_report(
    folder: Path,
    runs: Sequence[EvaluatedRun],
    baselines: Sequence[EvaluatedBaseline] = (),
    notes: Sequence[str] = (),
    show_progress: Callable[[Evaluation], None] = lambda evaluation: None,
) -> ReportPaths:
    """Write the files of a report on the first run, with `notes`, and return their paths."""
    evaluation = summarise_evaluation(runs, baselines, notes)
    try:
        return _write_files(folder, runs, baselines, evaluation)
    finally:
        # Shown also where nothing could be written: a full disk must not cost an hour of scoring.
        # Only then: nor must a stream that cannot be written to.
        show_progress(evaluation)


def _write_files(
    folder: Path,
    runs: Sequence[EvaluatedRun],
    baselines: Sequence[EvaluatedBaseline],
    evaluation: Evaluation,
) -> ReportPaths:
    run = runs[0]
    named = run.label_logged, len(run.labels), run.loss_name
    curves = make_learning_curves(run.history, run.scoring, *named)
    charts = make_charts(evaluation, curves)
    chart_folder = folder / "charts"
    pictures = {
        chart_folder / f"{chart.name}.{suffix}": content
        for chart in charts
        for suffix, content in render_sheet(chart).items()
    }
    json_path, html_path = folder / "evaluation.json", folder / "report.html"
    values = evaluation_to_json(evaluation)
    text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False, default=str)
    html = render_page(evaluation, charts)
    rows = _serialise_predictions(runs, baselines)
    # All files are rendered before the first is written: an error leaves the old report.
    chart_folder.mkdir(parents=True, exist_ok=True)
    for path, content in pictures.items():
        write_atomically(path, content)
    write_atomically(folder / "predictions.parquet", rows)
    write_atomically(html_path, html.encode())
    write_atomically(json_path, f"{text}\n".encode())
    for path in (chart_folder / f"{name}.{end}" for name in CHART_NAMES for end in SHEET_FILES):
        if path not in pictures:
            # A picture of an earlier evaluation must not pass for one of this.
            path.unlink(missing_ok=True)
    return ReportPaths(json_path, html_path, tuple(pictures), evaluation)


def _serialise_predictions(
    runs: Sequence[EvaluatedRun], baselines: Sequence[EvaluatedBaseline]
) -> bytes:
    # Baselines have nulls in `before`.
    found = {run.name: run.predictions for run in runs}
    for one in baselines:
        suffix = "" if one.label == runs[0].label else f":{one.label}"
        own = {"label": f"label{suffix}", "prediction": f"after{suffix}"}
        table = one.predictions
        table = table.rename_columns([own.get(name, name) for name in table.column_names])
        for name in own.values() if one.name in found else ():
            # A baseline of another label predicts the same rows in the same order.
            found[one.name] = found[one.name].append_column(name, table[name])
        found.setdefault(one.name, table)
    tables = [
        table.add_column(0, "run", pa.array([name] * table.num_rows))
        for name, table in found.items()
    ]
    out = pa.BufferOutputStream()
    # A column that a table lacks is null in its rows.
    pq.write_table(pa.concat_tables(tables, promote_options="permissive"), out)
    return out.getvalue().to_pybytes()  # type: ignore[no-any-return]
