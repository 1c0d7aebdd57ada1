"""Finds what a reader must not miss: a run worse after adapting, or below the best baseline."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gmeta.evaluation.report.evaluation_schema import Caution, GroupEvaluation, Stage
from gmeta.evaluation.report.headline import format_interval, format_signed, rank_estimate
from gmeta.metrics.metric_info import MetricInfo

# Stands between the last caution and a command.
TO_TRY_NEXT = "To try next: "


def find_cautions(
    group: GroupEvaluation,
    run: str,
    baselines: Mapping[str, str],
    infos: Mapping[str, MetricInfo],
    label: str,
) -> list[Caution]:
    """Return what is wrong with the adapted run in a group; `baselines` have names and words."""
    best = {
        metric: max(
            baselines, key=lambda one: rank_estimate(group, one, "after", metric, info), default=""
        )
        for metric, info in infos.items()
    }
    # A baseline is told by those metrics that it is the best by.
    rivals: list[tuple[str, Stage, str]] = [(run, "before", "adapting makes it worse")]
    rivals += [
        (name, "after", f"it is below {words}, the best baseline")
        for name, words in baselines.items()
    ]
    cautions = []
    for minus_run, stage, what in rivals:
        comparison = group.comparison(run, "after", minus_run, stage)
        worse = {}
        for name, one in (comparison.metrics if comparison else {}).items():
            if one.verdict == "worse" and minus_run in (run, best[name]):
                size = f" {format_signed(one.value)} {format_interval(one.low, one.high, True)}"
                worse[name] = infos[name].label + ("" if minus_run == run else size)
        if worse:
            of_label = f" of {label}" if label else ""
            text = f"{group.name}: {what}, by {', '.join(worse.values())}{of_label}"
            cautions.append(Caution(group.name, minus_run, tuple(worse), text, label))
    return cautions


def add_next_command(
    cautions: Sequence[Caution], config: Mapping[str, Any], has_statistics: bool
) -> list[Caution]:
    """Return the cautions, the last of which ends with the command to try next."""
    if not cautions:
        return []
    model, untried = config.get("model", {}), ""
    if has_statistics and not config.get("item_features", {}).get("columns"):
        untried = """'item_features.columns=["*"]' support_features.task=true"""
    elif has_statistics and model.get("name") in ("melu", "din"):
        untried = "" if model.get("linear_start") else "model.linear_start=true"
    folder = config.get("run", {}).get("dir", "RUN")
    of_run = shlex.quote(f"{folder}/config.json")
    own = shlex.quote(f"run.dir={folder}-2")
    command = f"train {of_run} {untried} {own}" if untried else f"tune {of_run} --with-plain"
    *others, last = cautions
    return [*others, replace(last, text=f"{last.text}.\n{TO_TRY_NEXT}gmeta {command}")]
