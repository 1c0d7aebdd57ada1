"""What an exported model is worth on a prepared dataset that it may never have seen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.errors import UserError
from gmeta.metrics.scores import evaluate_split
from gmeta.serving.channel.gate_predictions import predict_gate, to_optional_values
from gmeta.serving.channel.model_version import is_delta, read_version
from gmeta.serving.model_loader import load
from metaio.format.dataset import Dataset


def score_model(model: Path, dataset: Dataset, splits: Sequence[str] = ()) -> dict[str, Any]:
    """Return an exported model's scores on `splits` of a dataset (none: all with tasks), formed as
    `gmeta train`'s of its next increment; an undefined metric is None: JSON has no NaN."""
    if is_delta(model):
        raise UserError(
            f"{model} is a delta, which predicts nothing alone. Score a version that is full, or "
            "an export"
        )
    served = load(model)
    scoring = served.config.judged_scoring
    # Metrics over candidates rank among sampled items, which a split does not hold.
    names = [name for name in scoring.names if not scoring.is_over_candidates(name)]
    chosen = splits or [name for name, split in dataset.splits.items() if split.num_episodes]
    scores = {}
    for split in chosen:
        rows = predict_gate(served, model, dataset, split)
        values = evaluate_split(rows.label_N, rows.prediction_N, rows.task_N, scoring, names)
        finite = to_optional_values(values)
        scores[split] = {"num_tasks": len(np.unique(rows.task_N)), "scores": finite}
    place = dataset.manifest.stream
    return {
        "increment": None if place is None else place.increment,
        "fingerprint": dataset.fingerprint,
        "model": read_version(model).checksum,
        "splits": scores,
    }
