"""Formats numbers, and chooses the first lines of a report, alike for the page and the console."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gmeta.evaluation.report.evaluation_schema import (
    STAGES,
    BaselineFacts,
    Difference,
    Evaluation,
    GroupEvaluation,
    MetricEstimate,
    RunFacts,
    Stage,
)
from gmeta.metrics.metric_info import MetricInfo
from metaio.quantities import format_count

DASH = "\N{EM DASH}"
MINUS = "\N{MINUS SIGN}"
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Rival:
    """A model that the adapted run is compared with (a run: at its better stage)."""

    run: str
    short_name: str
    # "" of a baseline that is no run.
    stage_label: str
    estimate: MetricEstimate
    difference: Difference


@dataclass(frozen=True)
class HeadlineRow:
    """One metric of one group: the run before and after, and its rivals."""

    before: MetricEstimate
    after: MetricEstimate
    change: Difference
    rivals: tuple[Rival, ...]


def make_headline(evaluation: Evaluation, group: GroupEvaluation, metric: str) -> HeadlineRow:
    """Return the first line of a report for a group and a metric."""
    run = evaluation.runs[0].name
    rivals = [_make_run_rival(evaluation, group, metric, one) for one in evaluation.runs[1:]]
    rivals += [_make_baseline_rival(group, run, metric, one) for one in evaluation.yardsticks]
    return HeadlineRow(
        find_estimate(group, run, "before", metric),
        find_estimate(group, run, "after", metric),
        _find_difference(group, (run, "after", run, "before"), metric),
        tuple(rivals),
    )


def _make_run_rival(
    evaluation: Evaluation, group: GroupEvaluation, metric: str, other_run: RunFacts
) -> Rival:
    info = evaluation.metrics[metric]
    # Chosen on the same rows, in favour of the baseline: a win over it counts.
    stage = max(STAGES, key=lambda one: rank_estimate(group, other_run.name, one, metric, info))
    return Rival(
        other_run.name,
        other_run.name,
        other_run.stage_label(stage),
        find_estimate(group, other_run.name, stage, metric),
        _find_difference(group, (evaluation.runs[0].name, "after", other_run.name, stage), metric),
    )


def _make_baseline_rival(
    group: GroupEvaluation, run: str, metric: str, baseline: BaselineFacts
) -> Rival:
    return Rival(
        baseline.name,
        baseline.short_name,
        "",
        find_estimate(group, baseline.name, "after", metric),
        _find_difference(group, (run, "after", baseline.name, "after"), metric),
    )


def list_columns(evaluation: Evaluation) -> list[tuple[str, str, Stage]]:
    """Return (heading, name, stage) of every model whose values a table shows, the run first."""
    run, *other_runs = evaluation.runs
    columns: list[tuple[str, str, Stage]] = [
        ("before", run.name, "before"),
        ("adapted", run.name, "after"),
    ]
    for one in other_runs:
        columns += [(f"{one.name}\n{one.stage_label(stage)}", one.name, stage) for stage in STAGES]
    columns += [(one.short_name, one.name, "after") for one in evaluation.yardsticks]
    return columns


def list_notes(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return (name, line) for all that the evaluation chose, and for what is missing."""
    lines = [(run.name, run.adapts_with) for run in evaluation.runs if run.adapts_with]
    lines += [(one.name, one.told) for one in evaluation.yardsticks]
    # A note begins with the name of what it is about.
    return lines + [(head, rest) for head, _, rest in (n.partition(": ") for n in evaluation.notes)]


def rank_estimate(
    group: GroupEvaluation, run: str, stage: Stage, metric: str, info: MetricInfo
) -> float:
    """Return what a maximum is chosen by: a metric's value, negative if lower is better."""
    value = find_estimate(group, run, stage, metric).value
    # NaN compares false with everything: max would keep what comes first.
    if not math.isfinite(value):
        return -math.inf
    return value if info.higher_is_better else -value


def find_estimate(group: GroupEvaluation, run: str, stage: Stage, metric: str) -> MetricEstimate:
    """Return a metric of a model at a stage; NaN with a reason where it predicted nothing."""
    result = group.result(run, stage)
    if result:
        return result.metrics[metric]
    return MetricEstimate(*_NO_NUMBERS, 0, _explain_absence(group, run))


def _find_difference(
    group: GroupEvaluation, pair: tuple[str, Stage, str, Stage], metric: str
) -> Difference:
    comparison = group.comparison(*pair)
    if comparison:
        return comparison.metrics[metric]
    return Difference(*_NO_NUMBERS, "unknown", _explain_absence(group, pair[2]))


_NO_NUMBERS = (math.nan, math.nan, math.nan)


def _explain_absence(group: GroupEvaluation, run: str) -> str:
    return f"'{run}' was not evaluated on {group.name}"


def format_number(value: float) -> str:
    """Return four decimals."""
    # A thousandth of AUC is news, a tenth of that is not.
    return f"{value:.4f}".replace("-", MINUS) if math.isfinite(value) else DASH


def format_signed(value: float) -> str:
    """Return four decimals with a sign, none on what rounds to zero."""
    if not math.isfinite(value):
        return DASH
    text = f"{value:+.4f}".replace("-", MINUS)
    return "0.0000" if float(f"{value:.4f}") == 0 else text


def format_interval(low: float, high: float, is_difference: bool = False) -> str:
    """Return an interval in brackets, "" where there is none."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    write = format_signed if is_difference else format_number
    return f"[{write(low)}, {write(high)}]"


def describe_size(group: GroupEvaluation) -> str:
    """Return a group's tasks, query rows and support rows in words."""
    support = format_count(group.min_support_rows, "support row")
    if group.min_support_rows < group.max_support_rows:
        sizes = f"{group.min_support_rows}\N{EN DASH}{group.max_support_rows}"
        support = f"{sizes} support rows (median {group.median_support_rows:g})"
    tasks, rows = format_count(group.num_tasks, "task"), format_count(group.num_rows, "query row")
    return f"{tasks}, {rows}, {support}"


def flatten_settings(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield `section.key` and value of a nested config, as on the command line."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flatten_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def find_differing_settings(evaluation: Evaluation) -> list[tuple[str, list[str]]]:
    """Return the settings that are not the same in all runs, with their value in each."""
    configs = [dict(flatten_settings(run.config)) for run in evaluation.runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = [(key, [config.get(key, DASH) for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
