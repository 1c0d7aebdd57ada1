"""Evaluation: adapt on each unseen task's support set, score its query set, per cold-start split.

A task of a cold split was never trained on; its query rows are predicted with the meta-parameters
("before") and after the inner loop on its support rows ("after").
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torchrec.distributed import DistributedModelParallel

from gmeta.batches.episodes import Episodes
from gmeta.batches.labels import labels_checked
from gmeta.batches.views import STORED, View
from gmeta.build import build, check_registered
from gmeta.checkpoints.loader import check_config, checkpoint_to_use, load_checkpoint
from gmeta.config import TrainConfig
from gmeta.errors import UserError
from gmeta.feeds.reader import open_reader
from gmeta.metrics.catalogue import Scoring, evaluate_split
from gmeta.parallel.ranks import Ranks, gather_to_first
from gmeta.parallel.sharding import ShardedLearner, local_learner, shard_learner
from gmeta.parallel.steps import in_step
from gmeta.parallel.stopping import Stop
from gmeta.parallel.together import no_tasks, raise_first_problem, stopping_if_wrong
from gmeta.report.runs import EvaluatedRun
from gmeta.runs.folder import RunFolder
from gmeta.tables.sharding import ShardingConfig
from metaio.format.dataset import Dataset


@dataclass(frozen=True)
class Shown:
    """What of each task an evaluation shows the model: so many draws of its support and query rows,
    the stored one first; and, beside them, no more than so many of the stored support rows.
    """

    draws: int = 1
    support_sizes: tuple[int, ...] = ()


def evaluate_run(
    root: Path,
    name: str,
    splits: Sequence[str],
    ranks: Ranks,
    shown: Shown = Shown(),
) -> EvaluatedRun | None:
    """Predict `splits` with a run's checkpoint (see checkpoint_to_use) and return them on rank 0,
    None elsewhere; without `splits` those that its config names.

    Raises:
        UserError: no run folder, no checkpoint yet, an unknown split, other draws of rows in time.
        GMetaError: the dataset is not the one that was trained on.
    """
    folder = RunFolder(root)
    config = folder.read_config()
    checkpoint = checkpoint_to_use(folder.checkpoints, config)
    if checkpoint is None:
        raise UserError(
            f"run {root} has 0 checkpoints: there is nothing to evaluate yet. "
            "Let it reach its first one"
        )
    check_config(checkpoint, config)
    check_registered(root, config.model, config.algorithm)
    dataset, learner = build(config)
    folder.check_dataset(dataset.url, dataset.fingerprint)
    check_draws(shown, dataset)
    chosen = splits_to_score(config, dataset, splits)
    # Nothing is trained from here: the tables need no state of an optimizer, nor the plan of the
    # ranks that trained, which may have had GPUs.
    outer = replace(config.outer, sparse_optimizer="sgd")
    held = replace(config, outer=outer, sharding=ShardingConfig())
    sharded = shard_learner(learner, dataset.features, held, ranks)
    progress = load_checkpoint(checkpoint, sharded, None, ranks)

    def predicted(view: View) -> pa.Table:
        """Return the rows of all chosen splits; none on the ranks but the first."""
        found = (predict_split(config, dataset, split, sharded, ranks, view) for split in chosen)
        tables = [table for table in found if table is not None]
        return pa.concat_tables(tables) if tables else pa.table({})

    drawn = [predicted(View(draw)) for draw in range(shown.draws)]
    limited = {most: predicted(View(max_support=most)) for most in shown.support_sizes}
    if ranks.rank != 0:
        return None
    return EvaluatedRun(
        name=name,
        algorithm=config.algorithm.name,
        model=config.model.name,
        loss=config.outer.loss,
        evaluation=config.evaluation,
        step=progress.step,
        predictions=pa.concat_tables(
            table.append_column("draw", pa.array([draw] * table.num_rows, pa.int32()))
            for draw, table in enumerate(drawn)
        ),
        limited=limited,
        history=folder.read_metrics(),
        config=config.to_json(),
        environment=folder.read_environment(),
        dataset=f"{config.data.path} ({dataset.fingerprint[:12]})",
        evaluated_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def check_draws(shown: Shown, dataset: Dataset) -> None:
    """Refuse to draw support and query rows anew where the ones are the past of the others.

    Raises:
        UserError: the support rows of the dataset are older than its query rows.
    """
    if shown.draws > 1 and dataset.manifest.support_is_past:
        raise UserError(
            f"--draws = {shown.draws}, but the support rows of {dataset.url} are the past of its "
            "query rows, which drawing them anew would mix. Leave --draws out"
        )


def splits_to_score(config: TrainConfig, dataset: Dataset, asked: Sequence[str]) -> list[str]:
    """Return the splits asked for, else those of the config, else all that neither training nor
    validation used.

    Raises:
        UserError: a split is unknown or has no episodes, or none is left.
    """
    chosen = list(asked or config.data.eval_splits)
    for split in chosen:
        if split not in dataset.splits:
            raise UserError(
                f"split {split!r} is not in {config.data.path}: "
                f"it has {', '.join(dataset.splits)}. Name one of them"
            )
    # A split that decided when to stop is no measure of what came out.
    used = (config.data.train_split, config.data.valid_split)
    chosen = chosen or [split for split in dataset.splits if split not in used]
    if not chosen:
        raise UserError(
            f"{config.data.path} has no split but {' and '.join(dataset.splits)}, which the run "
            "was trained or chosen by: there is nothing to score. Name one with --split, or train "
            "on data with one split more"
        )
    # Before anything is predicted: to meet it behind the other splits may take minutes.
    for split in chosen:
        if not dataset.splits[split].num_episodes:
            raise UserError(
                f"split {split!r} of {config.data.path} has 0 episodes: there is nothing to score. "
                "Name other splits with --split"
            )
    return chosen


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
    names = dict.fromkeys([*scoring.names, *filter(None, [config.run.early_stop_metric])])
    values = evaluate_split(label, after, task, scoring, list(names))
    # JSON has no NaN.
    return {name: None if np.isnan(value.value) else value.value for name, value in values.items()}


def predict_split(
    config: TrainConfig,
    dataset: Dataset,
    split: str,
    sharded: DistributedModelParallel,
    ranks: Ranks,
    view: View = STORED,
) -> pa.Table | None:
    """Return a row for each query row of the split as the view shows it on rank 0, None elsewhere.

    Its columns are split, task, support_rows, task_rows (shown rows of the task), label, before and
    after, and row_id where the dataset stores it; before and after are probabilities for BCE,
    ratings for other losses.
    """
    learner = local_learner(sharded)
    columns: list[dict[str, np.ndarray]] = []
    with open_reader(config, dataset, split, ranks.rank, ranks.world_size) as reader:
        arrange = learner.learner.arrange_to_predict
        stop, features = Stop(), dataset.features
        stored = labels_checked(reader.batches(0), config.outer.loss, dataset, split)
        seen = map(view.of, stopping_if_wrong(stored, features, stop))
        arranged = map(arrange, seen)
        for episodes, _ in in_step(arranged, arrange(no_tasks(features)), ranks, stop, sharded):
            columns.append(_predict(learner, episodes, config.outer.loss))
        if stop.agreed:
            raise_first_problem(stop, ranks)
    gathered = gather_to_first(columns, ranks)
    if gathered is None:
        return None
    # Empty batches keep the collectives of a rank's peers whole, and hold no row.
    parts = [part for of_rank in gathered for part in of_rank if len(part["task"])]
    if not parts:
        raise UserError(
            f"split {split!r} of {config.data.path} has 0 query rows: there is nothing to score. "
            "Name other splits with --split"
        )
    table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    tasks, code_N = np.unique(table["task"], return_inverse=True)
    rows_T = np.bincount(code_N, table["task_rows"], minlength=tasks.size)
    table["task_rows"] = np.rint(rows_T)[code_N].astype(np.int32)
    return pa.table({"split": pa.array([split] * len(table["task"])), **table})


def _predict(learner: ShardedLearner, episodes: Episodes, loss: str) -> dict[str, np.ndarray]:
    prediction = learner.predict(episodes)
    query_T = prediction.layout.lengths_T.cpu()
    support_T = prediction.support_lengths_T.cpu().to(torch.int32)
    # The loss works on logits, a reader on probabilities.
    shown = torch.sigmoid if loss == "bce" else torch.clone
    row_id_N = episodes.query_row_id_N.numpy()
    # Adds up to the rows of the task, also where several episodes are of one.
    share_T = (support_T + query_T) / query_T.clamp(min=1).double()
    return {
        "task": torch.repeat_interleave(episodes.task_T, query_T).numpy(),
        **({"row_id": row_id_N} if row_id_N.size else {}),
        "task_rows": torch.repeat_interleave(share_T, query_T).numpy(),
        "support_rows": torch.repeat_interleave(support_T, query_T).numpy(),
        "label": prediction.label_N.cpu().numpy(),
        "before": shown(prediction.before_N).float().cpu().numpy(),
        "after": shown(prediction.after_N).float().cpu().numpy(),
    }
