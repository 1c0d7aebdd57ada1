"""The report for the terminal: every metric by group, with verdicts in place of intervals."""

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gmeta.metrics.catalogue import MetricInfo
from gmeta.report.evaluation import Difference, Evaluation, Group, Verdict
from gmeta.report.wording import Line, line_of, number, signed, size_of

STYLES: dict[Verdict, str] = {
    "better": "green",
    "worse": "red",
    "noise": "dim",
    "same": "dim",
    "unknown": "dim",
}
UP, DOWN = "\N{UPWARDS ARROW}", "\N{DOWNWARDS ARROW}"
# Fixed, so that the tables of all groups line up; with one baseline they fill 80 columns.
METRIC_WIDTH, VALUE_WIDTH, VERDICT_WIDTH, RIVAL_WIDTH = 20, 7, 15, 11


def console_table(evaluation: Evaluation) -> RenderableType:
    """Return a heading, a table for each group, and how to read them."""
    run = evaluation.runs[0]
    parts: list[RenderableType] = [Text(f"{run.name}, step {run.step:,}", style="bold")]
    for group in evaluation.groups:
        parts += [
            Text(""),
            Text.assemble((group.name, "bold"), f": {size_of(group)}"),
            _table(evaluation, group),
        ]
    return Stack(*parts, Text(""), Text(_legend(evaluation), style="dim"))


def _table(evaluation: Evaluation, group: Group) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    longest = max(len(_metric(info)) for info in evaluation.metrics.values())
    table.add_column("", width=max(METRIC_WIDTH, longest), no_wrap=True)
    table.add_column("before", justify="right", width=VALUE_WIDTH)
    table.add_column("adapted", justify="right", width=VALUE_WIDTH)
    table.add_column("change", justify="right", width=VERDICT_WIDTH)
    for baseline in evaluation.runs[1:]:
        table.add_column(baseline.name, justify="right", width=RIVAL_WIDTH, overflow="fold")
        table.add_column("adapted vs it", justify="right", width=VERDICT_WIDTH)
    for name, info in evaluation.metrics.items():
        table.add_row(_metric(info), *_cells(line_of(evaluation, group, name)))
    return table


def _cells(line: Line) -> list[Text]:
    cells = [
        Text(number(line.before.value)),
        Text(number(line.after.value), "bold"),
        _verdict(line.change),
    ]
    for rival in line.rivals:
        cells += [Text(number(rival.estimate.value)), _verdict(rival.difference)]
    return cells


def _metric(info: MetricInfo) -> Text:
    return Text(f"{info.label} {UP if info.higher_is_better else DOWN}")


def _verdict(difference: Difference) -> Text:
    return Text(
        f"{signed(difference.value)} {difference.verdict:7}",
        style=STYLES.get(difference.verdict, "dim"),
    )


def _legend(evaluation: Evaluation) -> str:
    lines = [
        f"{UP} higher is better, {DOWN} lower is better. better, worse: the "
        f"{evaluation.interval.level_percent:g} % interval over tasks excludes 0; "
        "noise: it does not.",
    ]
    shown = [
        line_of(evaluation, group, m) for group in evaluation.groups for m in evaluation.metrics
    ]
    differences = [line.change for line in shown]
    differences += [rival.difference for line in shown for rival in line.rivals]
    if any(one.verdict == "unknown" for one in differences):
        lines.append("unknown: there is no such interval; the report says why.")
    if len(evaluation.runs) > 1:
        lines.append(
            "A baseline stands at the better of as trained and fine-tuned, metric by metric."
        )
    return "\n".join(lines)
