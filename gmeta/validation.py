"""The scores of whole splits while a run trains: what early stopping and tuning go by; and
prequential scores, of what a model predicts of an increment before it is trained on it.

The support rows of a returning task are older than the increment's window and its query rows are
in it, so these are the scores of a true forecast (Dawid 1984: "predict, then learn").
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gmeta.batches.labels import scored_labels
from gmeta.checkpoints.lineage import Lineage
from gmeta.config import TrainConfig
from gmeta.feeds.increment import data_of
from gmeta.metrics.catalogue import label_of
from gmeta.metrics.scores import evaluate_split
from gmeta.outer.early_stop import early_stop_of, scoring_of
from gmeta.predictions import Scored, predict_split
from gmeta.report.runs import known_rows
from gmeta.runs.folder import PREQUENTIAL_FILE, write_json
from metaio.format.dataset import Dataset


class SplitScores(NamedTuple):
    """The metrics of a split by name, and why those that are None are undefined, in a line each."""

    scores: dict[str, float | None]
    num_tasks: int
    told: list[str]


def score_split(scored: Scored, split: str) -> SplitScores:
    """Return the metrics of a split after adaptation on rank 0, none elsewhere."""
    table = predict_split(scored, split)
    if table is None:
        return SplitScores({}, 0, [])
    return scores_of(table, split, scored.config, scored.dataset)


def scores_of(table: pa.Table, split: str, config: TrainConfig, dataset: Dataset) -> SplitScores:
    """Return the metrics after adaptation of a split's predicted rows."""
    found = SplitScores({}, len(table["task"].unique()), [])
    stops_by, label_of_stop = label_of(early_stop_of(config).metric)
    for label in scored_labels(config.labels, dataset):
        rows, name_of_label = known_rows(table, label.suffix), label.suffix[1:]
        scoring = scoring_of(config, name_of_label)
        # What decides when to stop need not be what is reported.
        asked = [*scoring.names, *[stops_by][: label_of_stop == name_of_label]]
        # Candidates are sampled by gmeta evaluate alone.
        names = dict.fromkeys(name for name in asked if not scoring.is_over_candidates(name))
        known_N, after_N, task_N = (rows[name].to_numpy() for name in ("label", "after", "task"))
        for name, value in evaluate_split(known_N, after_N, task_N, scoring, list(names)).items():
            # JSON has no NaN.
            is_known = not np.isnan(value.value)
            found.scores[f"{name}{label.suffix}"] = value.value if is_known else None
            if not is_known:
                asks = scoring.threshold_of(name) is not None and scoring.loss != "bce"
                least = f", of labels from {scoring.threshold:g} on (evaluation.positive_rating)"
                told = f"{name}{label.suffix} of {split} is undefined: {value.reason}"
                found.told.append(told + least * asks)
    return found


def score_validation(
    scored: Scored, tell: Callable[[Sequence[str]], None]
) -> dict[str, float | None]:
    """Return the metrics of the validation splits on rank 0 as mean_scores does, an empty dict
    elsewhere, and tell why one is undefined.
    """
    found = {split: score_split(scored, split) for split in scored.config.data.valid_splits}
    tell([line for one in found.values() for line in one.told])
    scores = {split: one.scores for split, one in found.items()}
    return mean_scores(scores) if scored.ranks.rank == 0 else {}


def mean_scores(scores: Mapping[str, dict[str, float | None]]) -> dict[str, float | None]:
    """Return the metrics of a split; of several splits the means, undefined where one is, and
    behind them those of each, as METRIC/SPLIT.
    """
    first = next(iter(scores.values()))
    if len(scores) == 1:
        return first
    means: dict[str, float | None] = {}
    for metric in first:
        of_splits = [of_split[metric] for of_split in scores.values()]
        known = [value for value in of_splits if value is not None]
        # Not over those that have one: scores of other splits would not compare with it.
        means[metric] = sum(known) / len(known) if len(known) == len(scores) else None
    each = {f"{name}/{split}": of[name] for split, of in scores.items() for name in of}
    return means | each


def forecast(scored: Scored, lineage: Lineage) -> list[str]:
    """Score every split of the increment that is trained next, the last of `lineage`, keep the
    scores in the run folder (prequential.json) and return a line on each. Collective.
    """
    config, dataset = scored.config, scored.dataset
    # No split was trained on: each is read as it is stored. Which one is validated on stays, as the
    # keys of early stopping, whose metric is among the scores, ask for one.
    data = replace(data_of(config.data, dataset), valid_split=config.data.valid_split)
    scored = replace(scored, config=replace(config, data=data))
    splits = [name for name, split in dataset.splits.items() if split.num_episodes]
    found = {name: score_split(scored, name) for name in splits}
    if scored.ranks.rank != 0:
        return []
    kept: dict[str, Any] = {
        "increment": lineage[-1].increment,
        "fingerprint": lineage[-1].fingerprint,
        "trained_on": [one.increment for one in lineage[:-1]],
        "splits": {
            name: {"num_tasks": one.num_tasks, "scores": one.scores} for name, one in found.items()
        },
    }
    write_json(Path(config.run.dir) / PREQUENTIAL_FILE, kept)
    return [
        line
        for name, one in found.items()
        for line in (f"before training, {name}: {_told(one.scores)}", *one.told)
    ]


def _told(scores: dict[str, float | None]) -> str:
    return ", ".join(
        f"{name} {'undefined' if value is None else f'{value:.4f}'}"
        for name, value in scores.items()
    )
