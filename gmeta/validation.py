"""The scores of whole splits while a run trains: what early stopping and tuning go by."""

import numpy as np
from torchrec.distributed import DistributedModelParallel

from gmeta.config import TrainConfig
from gmeta.metrics.catalogue import Scoring, evaluate_split
from gmeta.parallel.ranks import Ranks
from gmeta.predictions import predict_split
from metaio.format.dataset import Dataset


def score_split(
    config: TrainConfig,
    dataset: Dataset,
    split: str,
    sharded: DistributedModelParallel,
    ranks: Ranks,
) -> dict[str, float | None]:
    """Return the metrics of a split after adaptation on rank 0, an empty dict elsewhere; an
    undefined metric is None.
    """
    table = predict_split(config, dataset, split, sharded, ranks)
    if table is None:
        return {}
    label, after, task = (table[name].to_numpy() for name in ("label", "after", "task"))
    scoring = Scoring(config.outer.loss, config.evaluation)
    # What decides when to stop need not be what is reported.
    asked = [*scoring.names, *filter(None, [config.run.early_stop_metric])]
    # Candidates are sampled by gmeta evaluate alone.
    names = dict.fromkeys(name for name in asked if not scoring.is_over_candidates(name))
    values = evaluate_split(label, after, task, scoring, list(names))
    # JSON has no NaN.
    return {name: None if np.isnan(value.value) else value.value for name, value in values.items()}


def score_validation(
    config: TrainConfig, dataset: Dataset, sharded: DistributedModelParallel, ranks: Ranks
) -> dict[str, float | None]:
    """Return the metrics of the validation split on rank 0, an empty dict elsewhere. Of several
    splits the means, undefined where one is, and behind them as METRIC/SPLIT those of each.
    """
    splits = config.data.valid_splits
    scores = {split: score_split(config, dataset, split, sharded, ranks) for split in splits}
    first = scores[splits[0]]
    if len(splits) == 1 or ranks.rank != 0:
        return first
    means: dict[str, float | None] = {}
    for metric in first:
        of_splits = [of_split[metric] for of_split in scores.values()]
        known = [value for value in of_splits if value is not None]
        # Not over those that have one: scores of other splits would not compare with it.
        means[metric] = sum(known) / len(known) if len(known) == len(splits) else None
    each = {f"{name}/{split}": of[name] for split, of in scores.items() for name in of}
    return means | each
