"""Finds what a reader must not miss: a run worse after adapting, or below the best baseline."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gmeta.evaluation.report.evaluation_schema import Caution, Comparison, GroupEvaluation
from gmeta.evaluation.report.headline import (
    find_estimate,
    format_interval,
    format_signed,
    rank_value,
)
from gmeta.metrics.metric_info import MetricInfo


def find_cautions(
    group: GroupEvaluation,
    run: str,
    baselines: Mapping[str, str],
    infos: Mapping[str, MetricInfo],
    label: str,
) -> list[Caution]:
    """Return what is wrong with the adapted run in a group; `baselines` have names and words."""
    itself = group.comparison(run, "after", run, "before")
    found = [(run, _list_worse(itself, infos), "adapting makes it worse")]
    best = {name: _find_best(group, baselines, name, info) for name, info in infos.items()}
    for name, words in baselines.items():
        mine = {metric: info for metric, info in infos.items() if best[metric] == name}
        worse = _list_worse(group.comparison(run, "after", name, "after"), mine)
        found.append((name, worse, f"it is below {words}, the best baseline"))
    cautions = []
    for minus_run, worse, what in found:
        if worse:
            told = [
                infos[metric].label + difference * (minus_run != run)
                for metric, difference in worse.items()
            ]
            text = f"{group.name}: {what}, by {', '.join(told)}{label and f' of {label}'}"
            cautions.append(Caution(group.name, minus_run, tuple(worse), text, label))
    return cautions


def _list_worse(comparison: Comparison | None, infos: Mapping[str, MetricInfo]) -> dict[str, str]:
    """Return the metrics of which a run is worse, each with the difference and its interval."""
    differences = comparison.metrics if comparison else {}
    return {
        name: f" {format_signed(one.value)} {format_interval(one.low, one.high, True)}"
        for name, one in differences.items()
        if name in infos and one.verdict == "worse"
    }


def _find_best(
    group: GroupEvaluation, baselines: Mapping[str, str], metric: str, info: MetricInfo
) -> str:
    sign = 1.0 if info.higher_is_better else -1.0
    values = {
        name: rank_value(sign * find_estimate(group, name, "after", metric).value)
        for name in baselines
    }
    return max(values, key=lambda name: values[name], default="")


def add_next_command(
    cautions: Sequence[Caution], config: Mapping[str, Any], has_statistics: bool
) -> list[Caution]:
    """Return the cautions, the last of which ends with the command to try next."""
    if not cautions:
        return []
    keys = {name: config.get(name, {}) for name in ("run", "model", "item_features")}
    folder = keys["run"].get("dir", "RUN")
    of_run, untried = shlex.quote(f"{folder}/config.json"), ""
    if has_statistics and not keys["item_features"].get("columns"):
        untried = """'item_features.columns=["*"]' support_features.task=true"""
    elif has_statistics and keys["model"].get("name") in ("melu", "din"):
        untried = "" if keys["model"].get("linear_start") else "model.linear_start=true"
    own = shlex.quote(f"run.dir={folder}-2")
    command = f"train {of_run} {untried} {own}" if untried else f"tune {of_run} --with-plain"
    *others, last = cautions
    return [*others, replace(last, text=f"{last.text}.\nTo try next: gmeta {command}")]
