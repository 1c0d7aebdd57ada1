"""Scores of splits while a run trains: for early stopping, tuning, and before training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gmeta.config.train_config import TrainConfig
from gmeta.data.label_checks import scored_labels
from gmeta.data.opening import data_config_for
from gmeta.evaluation.predictions import EvalContext, predict_split
from gmeta.evaluation.report.evaluated_runs import AFTER_PLACES, drop_unknown_rows
from gmeta.metrics.catalogue import label_of
from gmeta.metrics.scores import evaluate_split
from gmeta.runs.checkpoints.lineage import Lineage
from gmeta.runs.early_stop import make_early_stop, make_scoring
from gmeta.runs.run_folder import PREQUENTIAL_FILE, write_json
from metaio.format.dataset import Dataset
from metaio.prepare.schema.schema_file import list_weighed_labels
from metaio.quantities import format_count
from metaio.stream.chain import count_waiting


class SplitScores(NamedTuple):
    """The metrics of a split by name, and for each that is None a line on why it is undefined."""

    scores: dict[str, float | None]
    num_tasks: int
    notes: list[str]


def score_split(context: EvalContext, split: str) -> SplitScores:
    """Return the metrics of a split after adaptation on rank 0, none elsewhere."""
    table = predict_split(context, split)
    if table is None:
        return SplitScores({}, 0, [])
    return score_predictions(table, split, context.config, context.dataset)


def score_predictions(
    table: pa.Table, split: str, config: TrainConfig, dataset: Dataset
) -> SplitScores:
    """Return the metrics after adaptation of a split's predicted rows."""
    found = SplitScores({}, len(table["task"].unique()), [])
    stops_by, label_of_stop = label_of(make_early_stop(config).metric)
    for label in scored_labels(config.labels, dataset):
        rows, name_of_label = drop_unknown_rows(table, label.suffix), label.suffix[1:]
        scoring = make_scoring(config, name_of_label)
        # Early stopping may go by a metric that is not reported.
        metric_names = [*scoring.names, *[stops_by][: label_of_stop == name_of_label]]
        # Only gmeta evaluate samples candidates; all items need no sample.
        ranks_all = config.evaluation.ranks_all
        names = dict.fromkeys(
            name for name in metric_names if ranks_all or not scoring.is_over_candidates(name)
        )
        known_N, after_N, task_N = (rows[name].to_numpy() for name in ("label", "after", "task"))
        places_N2 = None
        if AFTER_PLACES[0] in rows.column_names:
            places_N2 = np.stack([rows[name].to_numpy() for name in AFTER_PLACES], axis=1)
        arrays = known_N, after_N, task_N
        for name, value in evaluate_split(*arrays, scoring, list(names), places_N2).items():
            # JSON has no NaN.
            is_known = not np.isnan(value.value)
            found.scores[f"{name}{label.suffix}"] = value.value if is_known else None
            if not is_known:
                has_threshold = scoring.threshold_of(name) is not None and scoring.loss != "bce"
                least = f", of labels from {scoring.threshold:g} on (evaluation.positive_rating)"
                message = f"{name}{label.suffix} of {split} is undefined: {value.reason}"
                found.notes.append(message + least * has_threshold)
    return found


def score_validation(
    context: EvalContext, show_lines: Callable[[Sequence[str]], None]
) -> dict[str, float | None]:
    """Return the metrics of the validation splits (see average_scores) on rank 0, {} elsewhere."""
    found = {split: score_split(context, split) for split in context.config.data.valid_splits}
    show_lines([line for one in found.values() for line in one.notes])
    scores = {split: one.scores for split, one in found.items()}
    return average_scores(scores) if context.ranks.rank == 0 else {}


def average_scores(scores: Mapping[str, dict[str, float | None]]) -> dict[str, float | None]:
    """Return the metrics of a split; of several their means, with METRIC/SPLIT of each."""
    first = next(iter(scores.values()))
    if len(scores) == 1:
        return first
    # A mean is None where a split has None.
    means: dict[str, float | None] = {}
    for metric in first:
        of_splits = [of_split[metric] for of_split in scores.values()]
        known = [value for value in of_splits if value is not None]
        # Not over the splits that have one: scores of fewer splits would not compare with it.
        means[metric] = sum(known) / len(known) if len(known) == len(scores) else None
    each = {f"{name}/{split}": of[name] for split, of in scores.items() for name in of}
    return means | each


def score_before_training(context: EvalContext, lineage: Lineage) -> list[str]:
    """Score every split of the increment to train next; return a line on each. Collective."""
    config, dataset = context.config, context.dataset
    # No split was trained on: each is read as it is stored. The validation split stays, as early
    # stopping's keys, whose metric is among the scores, need one.
    data = replace(data_config_for(config.data, dataset), valid_split=config.data.valid_split)
    context = replace(context, config=replace(config, data=data))
    splits = [name for name, split in dataset.splits.items() if split.num_episodes]
    if list_weighed_labels(dataset.manifest):
        splits.remove(config.data.train_split)  # whose labels are not final
    # Support rows of a returning task are older than the window and its query rows lie in it: a
    # forecast.
    found = {name: score_split(context, name) for name in splits}
    if context.ranks.rank != 0:
        return []
    waiting = {name: count_waiting(dataset, name) for name in splits}
    # Prequential scores (Dawid 1984: "predict, then learn").
    report: dict[str, Any] = {
        "increment": lineage[-1].increment,
        "fingerprint": lineage[-1].fingerprint,
        "trained_on": [one.increment for one in lineage[:-1]],
        "splits": {
            name: {"num_tasks": one.num_tasks, "scores": one.scores, "waiting": waiting[name]}
            for name, one in found.items()
        },
    }
    write_json(Path(config.run.dir) / PREQUENTIAL_FILE, report)
    return [
        line
        for name, one in found.items()
        for line in (
            f"before training, {name}: {_format_scores(one.scores, waiting[name])}",
            *one.notes,
        )
    ]


def _format_scores(scores: dict[str, float | None], num_waiting: int) -> str:
    waiting = f"; {format_count(num_waiting, 'row')} waiting for a label" if num_waiting else ""
    text = ", ".join(
        f"{name} {'undefined' if value is None else f'{value:.4f}'}"
        for name, value in scores.items()
    )
    return text + waiting
