"""Writing a report: every file whole or not at all, the same bytes for the same runs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gmeta.files.whole import write_whole
from gmeta.report.charts import charts_of
from gmeta.report.evaluation import Evaluation, to_json
from gmeta.report.history import curves_of
from gmeta.report.page import page
from gmeta.report.render import png_sheet
from gmeta.report.runs import EvaluatedRun, EvaluatedYardstick
from gmeta.report.summarise import summarise

CHART_NAMES = (
    "groups",
    "support_size",
    "few_support_rows",
    "activity",
    "calibration",
    "learning_curve",
)


@dataclass(frozen=True)
class ReportPaths:
    """The files of a report, and the evaluation that they show."""

    evaluation_json: Path
    html: Path
    charts: tuple[Path, ...]
    evaluation: Evaluation


def write(
    folder: Path,
    runs: Sequence[EvaluatedRun],
    yardsticks: Sequence[EvaluatedYardstick] = (),
    notes: Sequence[str] = (),
    tell: Callable[[Evaluation], None] = lambda evaluation: None,
) -> ReportPaths:
    """Write evaluation.json, report.html, charts/*.png and predictions.parquet; the first run is
    the one reported, `notes` say which yardsticks are missing. `tell` shows the result before
    anything is written: a full disk must not cost an hour of scoring."""
    evaluation = summarise(runs, yardsticks, notes)
    tell(evaluation)
    charts = charts_of(
        evaluation,
        curves_of(runs[0].history, runs[0].scoring, runs[0].label_logged, len(runs[0].labels)),
    )
    chart_folder = folder / "charts"
    pictures = {chart_folder / f"{chart.name}.png": png_sheet(chart) for chart in charts}
    json_path, html_path = folder / "evaluation.json", folder / "report.html"
    text = json.dumps(
        to_json(evaluation), indent=1, ensure_ascii=False, allow_nan=False, default=str
    )
    html = page(evaluation, charts)
    rows = _predictions(runs, yardsticks)
    # Everything is rendered before anything is written: a failure in between leaves the old report.
    chart_folder.mkdir(parents=True, exist_ok=True)
    for path, content in pictures.items():
        write_whole(path, content)
    write_whole(folder / "predictions.parquet", rows)
    write_whole(html_path, html.encode())
    write_whole(json_path, f"{text}\n".encode())
    for name in CHART_NAMES:  # a picture of an earlier evaluation must not pass for one of this
        if (path := chart_folder / f"{name}.png") not in pictures:
            path.unlink(missing_ok=True)
    return ReportPaths(json_path, html_path, tuple(pictures), evaluation)


def _predictions(runs: Sequence[EvaluatedRun], yardsticks: Sequence[EvaluatedYardstick]) -> bytes:
    """Return what every model predicted of every query row, as the bytes of a Parquet file; in
    `before` a yardstick has nulls."""
    found = {run.name: run.predictions for run in runs}
    for one in yardsticks:
        suffix = "" if one.label == runs[0].label else f":{one.label}"
        own = {"label": f"label{suffix}", "prediction": f"after{suffix}"}
        table = one.predictions
        table = table.rename_columns([own.get(name, name) for name in table.column_names])
        for name in own.values() if one.name in found else ():
            # A yardstick of another label predicts the same rows in the same order.
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
