"""Shows the report on a terminal: every metric by group, with verdicts in place of intervals."""

from typing import TypeVar

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gmeta.evaluation.report.cautions import TO_TRY_NEXT
from gmeta.evaluation.report.evaluation_schema import (
    Difference,
    Evaluation,
    GroupEvaluation,
    Verdict,
)
from gmeta.evaluation.report.headline import (
    DASH,
    describe_size,
    find_estimate,
    format_number,
    format_signed,
    list_columns,
    list_notes,
    make_headline,
)
from gmeta.evaluation.report.verdict import judge_groups
from gmeta.metrics.metric_info import MetricInfo

Item = TypeVar("Item")

# Other verdicts are dim.
STYLES: dict[Verdict, str] = {"better": "green", "worse": "red"}
KIND_STYLES = {"good": "bold green", "bad": "bold red"}
UP, DOWN = "\N{UPWARDS ARROW}", "\N{DOWNWARDS ARROW}"
# Fixed widths, so that the tables of all groups line up; four differences fill 80 columns.
METRIC_WIDTH, VALUE_WIDTH, NAMED_WIDTH, VERDICT_WIDTH = 19, 7, 10, 14
VALUES_A_TABLE, DIFFERENCES_A_TABLE = 6, 4
# Of tables of labels that are not judged.
LABEL_GROUP_WIDTH, LABEL_DIFFERENCES_A_TABLE = 17, 3


def make_console_table(evaluation: Evaluation) -> RenderableType:
    """Return the tables of each group, what the evaluation chose, a legend, and cautions in red."""
    run = evaluation.runs[0]
    of_label = f", label {evaluation.label}" if evaluation.label else ""
    parts: list[RenderableType] = [Text(f"{run.name}, step {run.step:,}{of_label}", style="bold")]
    parts += [
        Text(one.sentence, style=KIND_STYLES.get(one.kind, "bold"))
        for one in judge_groups(evaluation)
    ]
    for group in evaluation.groups:
        parts += [
            Text(""),
            Text.assemble((group.name, "bold"), f": {describe_size(group)}"),
            *_make_value_tables(evaluation, group),
            *_make_difference_tables(evaluation, group),
        ]
    for other in evaluation.labels:
        parts += [Text(""), *_make_label_tables(evaluation.select_label(other))]
    parts.append(Text(""))
    parts += [Text.assemble((f"{name}: ", "bold"), line) for name, line in list_notes(evaluation)]
    parts.append(Text(_format_legend(evaluation), style="dim"))
    # Each line by itself: one with a command is not folded, so that it can be copied.
    parts += [
        Text(line, style="bold red", no_wrap=TO_TRY_NEXT in line)
        for one in evaluation.cautions
        for line in one.text.split("\n")
    ]
    return Stack(*parts)


def _make_value_tables(evaluation: Evaluation, group: GroupEvaluation) -> list[Table]:
    columns = list_columns(evaluation)
    tables = []
    for chosen in _split_into_tables(columns, VALUES_A_TABLE):
        table = _make_table(evaluation, "")
        for heading, *_ in chosen:
            width = NAMED_WIDTH if "\n" in heading else VALUE_WIDTH
            table.add_column(heading, justify="right", width=width, overflow="fold")
        for name, info in evaluation.metrics.items():
            values = [
                format_number(find_estimate(group, run, stage, name).value)
                for _, run, stage in chosen
            ]
            table.add_row(_format_metric(info), *values)
        tables.append(table)
    return tables


def _make_difference_tables(evaluation: Evaluation, group: GroupEvaluation) -> list[Table]:
    lines = {name: make_headline(evaluation, group, name) for name in evaluation.metrics}
    rivals = next(iter(lines.values())).rivals
    headings = ["before", *(rival.short_name for rival in rivals)]
    tables = []
    for chosen in _split_into_tables(list(enumerate(headings)), DIFFERENCES_A_TABLE):
        table = _make_table(evaluation, "adapted minus")
        for _, heading in chosen:
            table.add_column(heading, justify="right", width=VERDICT_WIDTH, overflow="fold")
        for name, info in evaluation.metrics.items():
            line = lines[name]
            differences = [line.change, *(rival.difference for rival in line.rivals)]
            table.add_row(
                _format_metric(info), *(_format_verdict(differences[index]) for index, _ in chosen)
            )
        tables.append(table)
    return tables


def _make_label_tables(evaluation: Evaluation) -> list[RenderableType]:
    info = evaluation.metrics[evaluation.headline]
    tables: list[RenderableType] = [
        Text.assemble((f"label {evaluation.label}", "bold"), f", {_format_metric(info)}")
    ]
    lines = [make_headline(evaluation, group, evaluation.headline) for group in evaluation.groups]
    headings = ["minus before", *(f"minus {rival.short_name}" for rival in lines[0].rivals)]
    chosen = list(enumerate(headings))
    for part in _split_into_tables(chosen, LABEL_DIFFERENCES_A_TABLE):
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
        table.add_column("", width=LABEL_GROUP_WIDTH, overflow="fold")
        is_first = part[0] == chosen[0]
        for heading in ("before", "adapted") if is_first else ():
            table.add_column(heading, justify="right", width=VALUE_WIDTH)
        for _, heading in part:
            table.add_column(heading, justify="right", width=VERDICT_WIDTH, overflow="fold")
        for group, line in zip(evaluation.groups, lines, strict=True):
            values = [line.before, line.after] if is_first else []
            differences = [line.change, *(rival.difference for rival in line.rivals)]
            table.add_row(
                group.name,
                *(format_number(one.value) for one in values),
                *(_format_verdict(differences[index]) for index, _ in part),
            )
        tables.append(table)
    return tables


def _split_into_tables(items: list[Item], most: int) -> list[list[Item]]:
    return [items[first : first + most] for first in range(0, len(items), most)]


def _make_table(evaluation: Evaluation, title: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    longest = max(len(_format_metric(info)) for info in evaluation.metrics.values())
    table.add_column(title, width=max(METRIC_WIDTH, longest), no_wrap=True)
    return table


def _format_metric(info: MetricInfo) -> Text:
    return Text(f"{info.label} {UP if info.higher_is_better else DOWN}")


def _format_verdict(difference: Difference) -> Text:
    word = "?" if difference.verdict == "unknown" else difference.verdict
    return Text(
        f"{format_signed(difference.value)} {word:6}", style=STYLES.get(difference.verdict, "dim")
    )


def _format_legend(evaluation: Evaluation) -> str:
    lines = [
        f"{UP} higher is better, {DOWN} lower is better. better, worse: the "
        f"{evaluation.interval.level_percent:g} % interval over tasks excludes 0; "
        "noise: it does not."
    ]
    visible_differences = [
        make_headline(evaluation, group, m)
        for group in evaluation.groups
        for m in evaluation.metrics
    ]
    for other in map(evaluation.select_label, evaluation.labels):
        visible_differences += [
            make_headline(other, group, other.headline) for group in other.groups
        ]
    differences = [line.change for line in visible_differences]
    differences += [rival.difference for line in visible_differences for rival in line.rivals]
    if any(one.verdict == "unknown" for one in differences):
        lines.append(f"?, {DASH}: there is no such interval, or value; the report says why.")
    if evaluation.interval.draws > 1:
        lines.append(
            f"Means over {evaluation.interval.draws} draws of each task's support and query rows; "
            "the intervals cover tasks and draws."
        )
    if len(evaluation.runs) > 1:
        lines.append("A baseline is compared at its better stage, metric by metric.")
    return "\n".join(lines)
