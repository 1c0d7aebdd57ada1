"""Evaluation: adapt on each unseen task's support set, score its query set, per cold-start split.

A task of a cold split was never trained on; its query rows are predicted with the meta-parameters
("before") and after the inner loop on its support rows ("after").
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from gmeta.adaptation.config import PLAIN, AlgorithmConfig
from gmeta.batches.labels import scored_labels
from gmeta.batches.views import Shown, View
from gmeta.build import build, check_registered
from gmeta.checkpoints.about import read_about
from gmeta.checkpoints.choice import check_config, checkpoint_to_use
from gmeta.checkpoints.lineage import lineage_of
from gmeta.checkpoints.loader import load_checkpoint, of_first
from gmeta.config import DataConfig
from gmeta.errors import UserError
from gmeta.feeds.increment import data_of, open_named
from gmeta.fine_tuning import (
    are_too_few,
    choose_fine_tuning,
    has_rates,
    judges_of,
    predict_tuned,
    told_adapting,
)
from gmeta.losses.config import LabelsConfig
from gmeta.metrics.config import EvaluationConfig
from gmeta.parallel.ranks import Ranks
from gmeta.parallel.sharding import shard_learner
from gmeta.predictions import Scored, predict_split
from gmeta.report.evaluation import FineTuning
from gmeta.report.runs import EvaluatedRun
from gmeta.runs.adapting import read_adapting
from gmeta.runs.folder import RunFolder, step_of
from gmeta.tables.sharding import ShardingConfig
from gmeta.yardstick.candidates import Candidates
from metaio.format.dataset import Dataset
from metaio.format.translation import translated
from metaio.prepare.raw_ids import with_raw_ids
from metaio.recipes.carved import sharing_rows


def evaluate_run(
    root: Path,
    name: str,
    splits: Sequence[str],
    ranks: Ranks,
    adapting: AlgorithmConfig | None = None,
    shown: Shown = Shown(),  # noqa: B008 - frozen
    on: str = "",
    candidates: Candidates | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
    label: str = "",
    evaluation: EvaluationConfig | None = None,
) -> EvaluatedRun | None:
    """Predict `splits` with a run's checkpoint (see checkpoint_to_use) and return them on rank 0,
    None elsewhere; without `splits` those that its config names. `on` names another dataset (see
    open_named), all of whose splits are then predicted: values that the run's vocabularies do not
    hold are unknown to it.

    `adapting` and `evaluation` take the place of the config's algorithm and evaluation. Without
    the former the run adapts at the rate and steps that are best on its validation splits; a plain
    run that has none, on the other half of the tasks of the split that is predicted: by its
    predictions of the config's judged label. If `label` is not "", a plain run goes by that.
    Beside positive rows stand `candidates`, if any. `advance` hears how many of this rank's tasks
    are read, of how many about; every view and fine-tuning of one counts as a task.

    Raises:
        UserError: no run folder, no checkpoint yet, an unknown split or label.
        GMetaError: the dataset is not the one that was trained on.
        DataError: the one that `on` names has other columns.
    """
    folder = RunFolder(root)
    config = folder.read_config()
    config = own_config = replace(config, evaluation=evaluation or config.evaluation)
    checkpoint = of_first(checkpoint_of(folder), ranks)
    check_config(checkpoint, config)
    check_registered(root, config.model, config.algorithm, folder.read_environment())
    own, step = config.algorithm, step_of(checkpoint)
    # What was chosen for it on its validation splits, where these are not at hand.
    kept = read_adapting(folder, own, step) if on and adapting is None else None
    is_as_trained, adapting = adapting is None, adapting or kept or own
    dataset, learner = build(replace(config, algorithm=adapting))
    config = replace(config, labels=judged_by(label, config.labels, dataset))
    folder.check_dataset(dataset.url, dataset.fingerprint)
    # Nothing is trained from here: the tables need no state of an optimizer, nor the plan of the
    # ranks that trained, which may have had GPUs.
    outer = replace(config.outer, sparse_optimizer="sgd")
    held = replace(config, outer=outer, sharding=ShardingConfig())
    sharded = shard_learner(learner, dataset.features, held, ranks)
    progress = load_checkpoint(checkpoint, sharded, None, ranks)
    trained_on = dataset
    if on:
        dataset = translated(open_named(on), trained_on)
        config = replace(config, data=data_of(config.data, dataset))
    shown, _ = drawn_once(shown, dataset)
    chosen = splits_to_score(config.data, dataset, splits)
    judges = judges_of(config.algorithm, config.data, dataset, chosen) if is_as_trained else []
    is_few = is_as_trained and has_rates(config.algorithm) and are_too_few(config.data, dataset)
    # A meta-learned run adapts the same way whichever label is asked about.
    by = Scored(config if own.name == PLAIN else own_config, dataset, sharded, ranks)
    tunings = [choose_fine_tuning(by, each) for each in judges]

    scored = replace(by, config=config)
    drawn, limited = predict_views(scored, chosen, tunings, shown, candidates, advance)
    if ranks.rank != 0:
        return None
    labels = scored_labels(config.labels, dataset)
    return EvaluatedRun(
        name=name,
        algorithm=config.algorithm.name,
        model=config.model.name,
        loss=config.loss_of(),
        evaluation=config.evaluation,
        step=progress.step,
        predictions=with_raw_ids(
            pa.concat_tables(
                table.append_column("draw", pa.array([draw] * table.num_rows, pa.int32()))
                for draw, table in enumerate(drawn)
            ),
            dataset,
            trained_on,
        ),
        limited=limited,
        history=folder.read_metrics(),
        config=own_config.to_json(),
        environment=folder.read_environment(),
        dataset=f"{dataset.url} ({dataset.fingerprint[:12]})",
        evaluated_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        adapts_with=told_adapting(
            own, adapting, tunings, ", ".join(config.data.valid_splits) if is_few else ""
        ),
        fine_tuning=tuple(tunings),
        label=next(one.name for one in labels if one.is_judged),
        other_losses={one.name: config.loss_of(one.name) for one in labels if not one.is_judged},
    )


def predict_views(
    scored: Scored,
    splits: Sequence[str],
    tunings: Sequence[FineTuning],
    shown: Shown,
    candidates: Candidates | None,
    advance: Callable[[int, int], None],
) -> tuple[list[pa.Table], dict[int, pa.Table]]:
    """Return the rows of all splits, predicted with every draw of support and query rows, and by
    support size; none on the ranks but the first. Collective."""
    passes = (shown.draws + len(shown.support_sizes)) * max(
        [len(tuning.chosen) for tuning in tunings], default=1
    )
    num_tasks = sum(scored.dataset.splits[split].num_episodes for split in splits) * passes
    total, done = -(-num_tasks // scored.ranks.world_size), 0

    def read(num_tasks: int) -> None:
        nonlocal done
        done += num_tasks
        advance(min(done, total), total)

    def predicted(view: View) -> pa.Table:
        """Return the rows of all splits; none on the ranks but the first."""
        tables: list[pa.Table | None] = []
        for index, split in enumerate(splits):
            if tunings:
                tuning = tunings[index % len(tunings)]
                of_split = predict_tuned(scored, split, tuning, view, candidates, read)
            else:
                of_split = predict_split(scored, split, view, candidates, read)
            tables.append(of_split)
        found = [table for table in tables if table is not None]
        return pa.concat_tables(found) if found else pa.table({})

    drawn = [predicted(View(draw)) for draw in range(shown.draws)]
    limited = {most: predicted(View(max_support=most)) for most in shown.support_sizes}
    return drawn, limited


def judged_by(label: str, labels: LabelsConfig, dataset: Dataset) -> LabelsConfig:
    """Return the section with `label` as the judged one, if that is not "" and the dataset's labels
    have names.

    Raises:
        UserError: there is no such label.
    """
    names = dataset.features.labels
    if not label or not names:
        return labels
    if label not in names:
        raise UserError(
            f"label {label!r} is not in {dataset.url}: it has {', '.join(names)}. Name one of them "
            "with --label"
        )
    return replace(labels, judged=label)


def checkpoint_of(run: RunFolder) -> Path:
    """Return the checkpoint that stands for a run.

    Raises:
        UserError: it has none yet.
    """
    checkpoint = checkpoint_to_use(run.checkpoints, run.read_config().run)
    if checkpoint is None:
        raise UserError(
            f"run {run.root} has 0 checkpoints: there is nothing to evaluate yet. "
            "Let it reach its first one"
        )
    return checkpoint


def drawn_once(shown: Shown, dataset: Dataset) -> tuple[Shown, str]:
    """Return what is shown of a dataset whose protocol says which rows are support: one draw,
    whatever was asked for, and a line that tells so; "" where nothing had to change.
    """
    if shown.draws == 1 or not dataset.manifest.support_is_fixed:
        return shown, ""
    return replace(shown, draws=1), (
        f"--draws = {shown.draws}, but the protocol of {dataset.url} says which rows of a task are "
        "support, and which of them its query: one draw, intervals over tasks alone"
    )


def splits_to_score(data: DataConfig, dataset: Dataset, asked: Sequence[str]) -> list[str]:
    """Return the splits asked for, else those of the config, else all but those that training and
    validation used, what these were carved out of, and what else was carved out of that.

    Raises:
        UserError: a split is unknown or has no episodes, or none is left.
    """
    chosen = list(asked or data.eval_splits)
    for split in chosen:
        if split not in dataset.splits:
            raise UserError(
                f"split {split!r} is not in {data.path}: "
                f"it has {', '.join(dataset.splits)}. Name one of them"
            )
    # A split that decided when to stop is no measure of what came out.
    used = {data.train_split, *data.valid_splits}
    for _ in range(2):  # of `fit`: `train`, then all that was carved out of it
        used = {shared for split in used for shared in sharing_rows(split, dataset)}
    chosen = chosen or [split for split in dataset.splits if split not in used]
    if not chosen:
        raise UserError(
            f"{data.path} has no split but {' and '.join(dataset.splits)}, which the run "
            "was trained or chosen by: there is nothing to score. Name one with --split, or train "
            "on data with one split more"
        )
    # Before anything is predicted: it may take minutes to get to an empty split.
    for split in chosen:
        if not dataset.splits[split].num_episodes:
            raise UserError(
                f"split {split!r} of {data.path} has 0 episodes: there is nothing to score. "
                "Name other splits with --split"
            )
    return chosen


def told_seen(
    name: str, folder: RunFolder, own: Dataset, scored: Dataset, splits: Sequence[str]
) -> list[str]:
    """Return a line for each of these splits of `scored` that the run, on the dataset `own`, was
    trained or chosen on: what it reaches there is no measure of unseen tasks."""
    data, lineage = folder.read_config().data, lineage_of(read_about(checkpoint_of(folder)))
    if scored.fingerprint not in {own.fingerprint, *(one.fingerprint for one in lineage)}:
        return []
    trained = sharing_rows(data.train_split, scored)
    return [
        f"{split}: {name} was {'trained' if split in trained else 'chosen'} on rows of it, so its "
        "figures there flatter and say little of unseen tasks"
        for split in splits
        if split in trained or split in data.valid_splits
    ]
