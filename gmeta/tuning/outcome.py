"""Shows the outcome of a study: a table, results as JSON, the best config and a few lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmeta.errors import GMetaError
from gmeta.runs.early_stop import EarlyStop
from gmeta.tuning.config_toml import format_config
from gmeta.tuning.search_space import Dimension, Space
from gmeta.tuning.study import Study, Trial
from metaio.quantities import format_count


def describe_trial(study: Study, trial: Trial, space: Space, metric: str) -> str:
    """Return a line on a trial that ended: its score, its values, and the best score so far."""
    if trial.state == "failed":
        return f"trial {trial.number}: failed: {trial.note}"
    best = study.best_trial()
    texts = "" if trial.score is None else f" {metric} {format_score(trial.score)}"
    if best is not None:
        texts += f" (best {format_score(best.score)}, trial {best.number})"
    names = zip(shorten_keys(space), space, strict=True)
    values = " ".join(f"{name}={format_value(trial.values.get(each.key))}" for name, each in names)
    return f"trial {trial.number}: {trial.state}{texts}  {values}"


def check_any_complete(study: Study, folder: Path) -> Trial:
    """Return the best trial. Raises GMetaError where no trial is complete."""
    best = study.best_trial()
    if best is None:
        ranked = [trial for trial in study.rank_trials() if trial.state != "interrupted"]
        note = next((trial.note for trial in ranked if trial.note), "it was pruned")
        raise GMetaError(
            f"0 of {format_count(len(ranked), 'trial')} in {folder} came to an end; the first: "
            f"{note}. Correct the config or narrow --space, and choose another --study"
        )
    return best


def format_results(study: Study, decides: EarlyStop, **more: Any) -> str:
    """Return all trials as JSON, the best first, with the score of every validation, and `more`."""
    trials = [vars(trial) for trial in study.rank_trials()]
    return json.dumps({"metric": decides.metric, "trials": trials, **more}, indent=2)


@dataclass(frozen=True)
class TunedSide:
    """A study that ended: of the config, or of plain training beside it."""

    name: str
    study: Study
    space: Space
    config: Path

    @property
    def scores(self) -> dict[int, float]:
        """Return the scores of the complete trials by their numbers, the best first."""
        whole = (one for one in self.study.rank_trials() if one.state == "complete")
        return {one.number: one.score for one in whole if one.score is not None}

    @property
    def score(self) -> float:
        """Return the score of the best trial."""
        return next(iter(self.scores.values()))


def choose_side(
    sides: Sequence[TunedSide], trees: float | None, splits: str, decides: EarlyStop
) -> tuple[Path, str]:
    """Return the config to train, and a line on what it gains over the others."""
    sign = -1.0 if decides.higher_is_better else 1.0
    first, *others = sorted(sides, key=lambda side: sign * side.score)
    rivals = {"boosted trees": trees, **{f"{one.name} training": one.score for one in others}}
    rivals["the config as it was"] = first.study.score_of_base()
    gains = _describe_gains(first.score, rivals, decides)
    score = f"{decides.metric} {format_score(first.score)} on {splits}"
    return first.config, f"to train: gmeta train {first.config}   {score}{gains}"


def _describe_gains(score: float, others: Mapping[str, float | None], decides: EarlyStop) -> str:
    """Return how much better or worse a score is than those of others by name, None left out."""
    texts = [""]
    for name, other in others.items():
        if other is not None:
            gain = (score - other) * (1.0 if decides.higher_is_better else -1.0)
            size, place = format_score(abs(gain)), "better" if gain > 0 else "worse"
            how = f"{size} {place} than" if float(size) else "level with"
            texts.append(f"{how} {name} ({format_score(other)})")
    return ", ".join(texts)


def format_best_config(study: Study, best: Trial, split: str, metric: str, path: Path) -> str:
    """Return the config of the best trial, to be written at `path`."""
    adapts = f"{best.note}\n" if best.note else ""
    header = (
        f"Found by `gmeta tune`: {metric} {format_score(best.score)} on split {split!r}, "
        f"trial {best.number} ({describe_counts(study)}).\n"
        f"{adapts}The score chose the settings, so it flatters them a little.\n"
        f"gmeta train {path}"
    )
    return format_config(study.config(best.values), header, set(best.values))


def describe_counts(study: Study) -> str:
    """Return how many trials ended in which way."""
    states = [trial.state for trial in study.trials()]
    kinds = [kind for kind in ("complete", "pruned", "failed") if kind in states]
    return ", ".join(f"{states.count(kind)} {kind}" for kind in kinds)


def describe_edges(space: Space, best: Trial) -> list[str]:
    """Return a line for each range at whose end the best value lies."""
    edges = [(each.key, each.find_edge(best.values[each.key])) for each in space]
    return [
        # A better value may lie beyond the end.
        f"{key} = {best.values[key]:g} is at the {edge} end of its range: widen it with --space"
        for key, edge in edges
        if edge
    ]


def shorten_keys(space: Sequence[Dimension]) -> list[str]:
    """Return each key without its section, except where two sections have the same name, or the
    name alone says nothing."""
    short = [dimension.key.partition(".")[2] for dimension in space]
    return [
        name if short.count(name) == 1 and name != "column" else dimension.key
        for name, dimension in zip(short, space, strict=True)
    ]


def format_score(score: float | None) -> str:
    """Return a score as text for a table."""
    if score is None:
        return ""
    # A run that diverges may have a score of 30 digits.
    return f"{score:.4f}" if abs(score) < 1e5 else f"{score:.1e}"


def format_value(value: Any) -> str:
    """Return a value of a config as text for a table."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
