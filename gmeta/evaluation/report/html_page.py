"""Renders the report as one HTML page that loads nothing from the network, from page.html."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from gmeta.evaluation.report import headline as headlines
from gmeta.evaluation.report.cautions import TO_TRY_NEXT
from gmeta.evaluation.report.chart_files import Chart, Panel, render_svg
from gmeta.evaluation.report.charts import make_label_charts
from gmeta.evaluation.report.evaluation_schema import (
    STAGES,
    Comparison,
    Difference,
    Evaluation,
    GroupEvaluation,
    MetricEstimate,
    RunFacts,
)
from gmeta.evaluation.report.verdict import (
    MAX_LISTED_GROUPS,
    judge_all,
    judge_groups,
    limit_groups,
    make_tiles,
)
from gmeta.metrics.metric_info import MetricInfo
from gmeta.platform.pages.templates import load_template

FILTERS = {"number": headlines.format_number, "signed": headlines.format_signed}


@dataclass(frozen=True)
class TableRow:
    """A row of a group's table: the estimates of a run at a stage, or differences of two."""

    label: str
    estimates: dict[str, MetricEstimate] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)


def render_page(evaluation: Evaluation, charts: Sequence[Chart]) -> str:
    """Return the page as HTML."""
    # The last caution ends with what to try next, which stands with the verdict.
    texts = [one.text.partition(f".\n{TO_TRY_NEXT}") for one in evaluation.cautions]
    cautions = [text for text, *_ in texts]
    next_command = texts[-1][2] if texts else ""
    verdicts, drawn = judge_groups(evaluation), limit_groups(evaluation)
    if summary := judge_all(verdicts):
        names = {group.name for group in drawn.groups}
        verdicts = [summary, *(one for one in verdicts if one.group in names)]
    return load_template("gmeta.evaluation.report", "page.html", FILTERS).render(
        evaluation=evaluation,
        run=evaluation.runs[0],
        rivals=[*evaluation.runs[1:], *evaluation.yardsticks],
        verdicts=verdicts,
        drawn=limit_groups,
        tiles=[(one.value, one.name, one.detail, one.kind) for one in make_tiles(evaluation)],
        next=next_command,
        cautions=cautions,
        told=headlines.list_notes(evaluation),
        facts=_list_facts(evaluation),
        headline=evaluation.metrics[evaluation.headline],
        charts=[draw_panels(chart) for chart in charts],
        notes=_list_notes(evaluation, charts),
        labels=[
            (one, list(map(draw_panels, make_label_charts(one))))
            for one in map(evaluation.select_label, evaluation.labels)
        ],
        infos=_collect_infos(evaluation),
        headlines_of=_list_headlines,
        table_of=_make_rows,
        settings=headlines.find_differing_settings(evaluation) if len(evaluation.runs) > 1 else [],
        between=headlines.format_interval,
        size_of=headlines.describe_size,
        flattened=headlines.flatten_settings,
    )


def draw_panels(chart: Chart) -> tuple[Chart, list[tuple[Panel, Markup]]]:
    """Return a chart with the drawing of each of its panels."""
    # Markup: drawn here, so it needs no escaping.
    pictures = [Markup(render_svg(chart, index)) for index in range(len(chart.panels))]
    return chart, list(zip(chart.panels, pictures, strict=True))


def _collect_infos(evaluation: Evaluation) -> dict[str, MetricInfo]:
    """Return the infos of all metrics, each as it reads for the first label that has it."""
    infos: dict[str, MetricInfo] = {}
    for one in (evaluation, *map(evaluation.select_label, evaluation.labels)):
        infos |= {name: info for name, info in one.metrics.items() if name not in infos}
    return infos


def _list_headlines(evaluation: Evaluation) -> list[tuple[GroupEvaluation, headlines.HeadlineRow]]:
    return [
        (group, headlines.make_headline(evaluation, group, evaluation.headline))
        for group in limit_groups(evaluation, MAX_LISTED_GROUPS).groups
    ]


def _list_facts(evaluation: Evaluation) -> list[tuple[str, str]]:
    run = evaluation.runs[0]
    facts = [
        ("dataset", run.dataset or headlines.NOT_RECORDED),
        ("algorithm", run.algorithm),
        ("model", run.model),
        *([("label", evaluation.label)] if evaluation.label else []),
        ("loss", evaluation.loss),
        ("checkpoint step", f"{run.step:,}"),
        ("evaluated", run.evaluated_at or headlines.NOT_RECORDED),
    ]
    if run.samples_per_s > 0:
        facts.append(("training speed, median", f"{run.samples_per_s:,.0f} samples/s"))
    if run.data_wait_share >= 0:
        facts.append(("waiting for data, median", f"{run.data_wait_share:.1%} of the time"))
    rivals = [one.name for one in evaluation.runs[1:]]
    rivals += [one.name for one in evaluation.yardsticks]
    return [*facts, ("compared with", ", ".join(rivals) or "no baseline")]


def _list_notes(evaluation: Evaluation, charts: Sequence[Chart]) -> list[str]:
    """Return a line for each picture that a reader may look for and that is not there."""
    chart_names = {chart.name for chart in charts}
    notes = []
    if (num_drawn := len(limit_groups(evaluation).groups)) < len(evaluation.groups):
        notes.append(
            f"Pictures and all metrics are of {num_drawn} of {len(evaluation.groups)} groups, the "
            f"table of up to {MAX_LISTED_GROUPS}, the worst among them; evaluation.json has all."
        )
    if "learning_curve" not in chart_names:
        notes.append("No learning curve: the run logged no steps.")
    if "support_size" not in chart_names:
        notes.append(
            "No picture against support size: the tasks of a group have equally large support sets."
        )
    return notes


def _make_rows(evaluation: Evaluation, group: GroupEvaluation) -> list[TableRow]:
    run = evaluation.runs[0]
    rows: list[TableRow] = []
    for one in evaluation.runs:
        results = [result for result in group.results if result.run == one.name]
        rows += [
            TableRow(f"{one.name}, {one.stage_label(item.stage)}", item.metrics) for item in results
        ]
        rows += _make_difference_rows(group, run, one)
    for baseline in evaluation.yardsticks:
        result = group.result(baseline.name, "after")
        rows += [TableRow(baseline.name, result.metrics)] if result else []
        label = f"{run.name}, {run.stage_label('after')}, minus {baseline.name}"
        comparison = group.comparison(run.name, "after", baseline.name, "after")
        rows += _collect_differences([(label, comparison)])
    return rows


def _make_difference_rows(group: GroupEvaluation, run: RunFacts, one: RunFacts) -> list[TableRow]:
    adapted = f"{run.name}, {run.stage_label('after')}"
    own = group.comparison(one.name, "after", one.name, "before")
    rows = [(f"{one.stage_label('after')} minus {one.stage_label('before')}", own)]
    if one is not run:
        for stage in STAGES:
            label = f"{adapted}, minus {one.name}, {one.stage_label(stage)}"
            rows.append((label, group.comparison(run.name, "after", one.name, stage)))
    return _collect_differences(rows)


def _collect_differences(rows: Sequence[tuple[str, Comparison | None]]) -> list[TableRow]:
    return [
        TableRow(label, differences=comparison.metrics) for label, comparison in rows if comparison
    ]
