"""Evaluation: adapt on each unseen task's support set, score its query set, per cold-start split.

A task of a cold split was never trained on; its query rows are predicted with the meta-parameters
("before") and after the inner loop on its support rows ("after").
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torchrec.distributed import DistributedModelParallel

from gmeta.adaptation.algorithms.algorithm import TableSizes
from gmeta.adaptation.config import PLAIN, AlgorithmConfig
from gmeta.batches.labels import kinds_of, labels_checked, scored_labels
from gmeta.batches.views import Shown, View
from gmeta.build import build, check_registered
from gmeta.checkpoints.loader import check_config, checkpoint_to_use, load_checkpoint
from gmeta.config import DataConfig, TrainConfig
from gmeta.errors import UserError
from gmeta.feeds.increment import open_named
from gmeta.learner import MetaLearner
from gmeta.metrics.catalogue import loss_metric
from gmeta.metrics.scores import evaluate_split
from gmeta.outer.early_stop import scoring_of
from gmeta.parallel.ranks import Ranks, value_of_first
from gmeta.parallel.sharding import local_learner, shard_learner
from gmeta.parallel.stopping import Stop
from gmeta.parallel.together import by_all
from gmeta.predictions import gathered, predict_all, predict_split
from gmeta.report.evaluation import FineTuning
from gmeta.report.runs import EvaluatedRun
from gmeta.runs.folder import RunFolder
from gmeta.tables.sharding import ShardingConfig
from gmeta.yardstick.candidates import Candidates
from gmeta.yardstick.finetune import TUNING_TASKS, best_of, half_of, try_all
from metaio.counted import counted
from metaio.format.dataset import Dataset
from metaio.format.translation import translated
from metaio.prepare.raw_ids import with_raw_ids
from metaio.read.batch import TaskBatch
from metaio.read.reader import EpisodeRange, RangeReader


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
) -> EvaluatedRun | None:
    """Predict `splits` with a run's checkpoint (see checkpoint_to_use) and return them on rank 0,
    None elsewhere; without `splits` those that its config names. `on` names another dataset (see
    open_named), of which all splits are predicted then: values that the run's vocabularies do not
    hold are unknown to it.

    `adapting` takes the place of the config's algorithm. Without it a plain run is fine-tuned at
    the rate and steps that are best on its validation split, or else on the other half of the tasks
    of the split that is predicted: by its predictions of the judged label, which is `label` in
    place of the config's, if that is not "". Beside positive rows stand `candidates`, if any.
    `advance` hears how many of this rank's tasks are read, of how many about; every view and
    fine-tuning of one counts as a task.

    Raises:
        UserError: no run folder, no checkpoint yet, an unknown split or label.
        GMetaError: the dataset is not the one that was trained on.
        DataError: the one that `on` names has other columns.
    """
    folder = RunFolder(root)
    config = own_config = folder.read_config()
    checkpoint = checkpoint_of(folder)
    check_config(checkpoint, config)
    check_registered(root, config.model, config.algorithm, folder.read_environment())
    own, adapting = config.algorithm, adapting or config.algorithm
    dataset, learner = build(replace(config, algorithm=adapting))
    config = judged_by(label, config, dataset)
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
    chosen = splits_to_score(config, dataset, splits)
    tunings: list[FineTuning] = []
    if own.name == PLAIN and adapting == own:
        # Without a validation split each half of a split's tasks judges for the other: training
        # tasks cannot, whose labels the model has seen (docs/evaluation.md).
        judges = [config.data.valid_splits] if config.data.valid_splits else [(s,) for s in chosen]
        tunings = [choose_fine_tuning(config, dataset, each, sharded, ranks) for each in judges]

    passes = (shown.draws + len(shown.support_sizes)) * max(
        [len(tuning.chosen) for tuning in tunings], default=1
    )
    num_tasks = sum(dataset.splits[split].num_episodes for split in chosen) * passes
    total, done = -(-num_tasks // ranks.world_size), 0

    def read(num_tasks: int) -> None:
        nonlocal done
        done += num_tasks
        advance(min(done, total), total)

    def predicted(view: View) -> pa.Table:
        """Return the rows of all chosen splits; none on the ranks but the first."""
        tables: list[pa.Table | None] = []
        for index, split in enumerate(chosen):
            if tunings:
                tuning = tunings[index % len(tunings)]
                of_split = predict_tuned(
                    config, dataset, split, tuning, sharded, ranks, view, candidates, read
                )
            else:
                of_split = predict_split(
                    config, dataset, split, sharded, ranks, view, candidates, read
                )
            tables.append(of_split)
        found = [table for table in tables if table is not None]
        return pa.concat_tables(found) if found else pa.table({})

    drawn = [predicted(View(draw)) for draw in range(shown.draws)]
    limited = {most: predicted(View(max_support=most)) for most in shown.support_sizes}
    if ranks.rank != 0:
        return None
    labels = scored_labels(config, dataset)
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
        adapts_with=told_adapting(own, adapting, tunings),
        fine_tuning=tuple(tunings),
        label=next(one.name for one in labels if one.is_judged),
        other_losses={one.name: config.loss_of(one.name) for one in labels if not one.is_judged},
    )


def judged_by(label: str, config: TrainConfig, dataset: Dataset) -> TrainConfig:
    """Return the config with `label` as the judged one, if that is not "" and the dataset's labels
    have names.

    Raises:
        UserError: there is no such label.
    """
    names = dataset.features.labels
    if not label or not names:
        return config
    if label not in names:
        raise UserError(
            f"label {label!r} is not in {dataset.url}: it has {', '.join(names)}. Name one of them "
            "with --label"
        )
    return replace(config, labels=replace(config.labels, judged=label))


def data_of(data: DataConfig, dataset: Dataset) -> DataConfig:
    """Return the keys of a run's data for another dataset, whose splits it neither trained nor
    validated on."""
    return replace(
        data, path=dataset.url, increment="", train_split="", valid_split="", eval_splits=()
    )


def checkpoint_of(run: RunFolder) -> Path:
    """Return the checkpoint that stands for a run.

    Raises:
        UserError: it has none yet.
    """
    checkpoint = checkpoint_to_use(run.checkpoints, run.read_config())
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


def adapt_with(
    algorithm: AlgorithmConfig,
    config: TrainConfig,
    dataset: Dataset,
    sharded: DistributedModelParallel,
) -> None:
    """Let the model, whose parameters stay, adapt as `algorithm` says from here on."""
    inner = local_learner(sharded)
    tables = TableSizes(len(dataset.features.tables), config.model.embedding_dim)
    inner.learner = MetaLearner(
        inner.learner.model,
        algorithm,
        inner.learner.objectives,
        tables,
        statistics=inner.learner.statistics,
        items=inner.learner.items,
        projections=inner.learner.projections,
    )


def choose_fine_tuning(
    config: TrainConfig,
    dataset: Dataset,
    splits: Sequence[str],
    sharded: DistributedModelParallel,
    ranks: Ranks,
) -> FineTuning:
    """Return the inner rate and steps by which a plain run adapts best to tasks of some splits, by
    the mean over these: one setting, or, where they are not the validation splits, one for each
    half of the tasks, the best of the other half. Collective."""
    # Not AUC: it does not see outputs that run away, as those of a rate do that is too high.
    metric = loss_metric(config.loss_of())
    is_halved = tuple(splits) != config.data.valid_splits
    most = TUNING_TASKS * (1 + is_halved)
    read = [tuning_batches(config, dataset, split, most, ranks) for split in splits]
    errors: dict[tuple[float, int], list[float]] = {}  # of all tasks, then of each half

    def errors_of(batches: Sequence[TaskBatch]) -> list[float]:
        """Return the error of all tasks, then of each half; nothing on the ranks but the first."""
        table = gathered(predict_all(iter(batches), config, dataset, sharded, ranks, Stop()), ranks)
        if table is None:
            return []
        known_N = ~np.isnan(table["label"])
        table = {name: column[known_N] for name, column in table.items()}
        found, second_N = [], half_of(table["task"])
        scoring = scoring_of(config)
        for kept_N in (np.ones(len(second_N), np.bool_), second_N == 0, second_N == 1):
            label, after, task = (table[name][kept_N] for name in ("label", "after", "task"))
            found.append(evaluate_split(label, after, task, scoring, [metric])[metric].value)
        return found

    def error(rate: float, steps: int) -> float:
        algorithm = replace(config.algorithm, inner_lr=rate, inner_steps=steps)
        adapt_with(algorithm, config, dataset, sharded)
        of_splits = [errors_of(batches) for _, batches in read]
        means = [float(np.mean(same)) for same in zip(*of_splits, strict=True)]
        errors[rate, steps] = value_of_first(means, ranks)
        return errors[rate, steps][0]

    own = config.algorithm.inner_lr, config.algorithm.inner_steps
    tried = try_all(error, own)
    told, num_tasks = ", ".join(splits), sum(num_tasks for num_tasks, _ in read)
    if not is_halved:
        return FineTuning(told, num_tasks, metric, (best_of(tried),), tried)
    # First what the second half chose, for the tasks of the first.
    by_half = [
        best_of([replace(one, value=errors[one.inner_lr, one.inner_steps][half]) for one in tried])
        for half in (2, 1)
    ]
    return FineTuning(told, num_tasks, metric, tuple(by_half), tried)


def tuning_batches(
    config: TrainConfig, dataset: Dataset, split: str, most: int, ranks: Ranks
) -> tuple[int, list[TaskBatch]]:
    """Return how many episodes of a split judge, `most` unless it has fewer, and this rank's share
    of them. Collective."""
    episodes = tuning_episodes(dataset, split, most)
    mine = np.array_split(episodes, ranks.world_size)[ranks.rank]
    size = max(1, config.data.tasks_per_step // ranks.world_size)
    groups = [
        [EpisodeRange(split, int(one), 1) for one in mine[first : first + size]]
        for first in range(0, len(mine), size)
    ]
    batches: list[TaskBatch] = []

    def read() -> None:
        with RangeReader(dataset, threads=config.data.threads) as reader:
            stored = labels_checked(
                reader.batches(groups), kinds_of(config, dataset), dataset, split
            )
            batches.extend(stored)

    by_all(read, ranks)
    return len(episodes), batches


def predict_tuned(
    config: TrainConfig,
    dataset: Dataset,
    split: str,
    tuning: FineTuning,
    sharded: DistributedModelParallel,
    ranks: Ranks,
    view: View,
    candidates: Candidates | None,
    advance: Callable[[int], None],
) -> pa.Table | None:
    """Return what predict_split does, each task adapted with what was chosen for it. Collective."""
    tables = []
    for setting in tuning.chosen:
        algorithm = replace(
            config.algorithm, inner_lr=setting.inner_lr, inner_steps=setting.inner_steps
        )
        adapt_with(algorithm, config, dataset, sharded)
        tables.append(
            predict_split(config, dataset, split, sharded, ranks, view, candidates, advance)
        )
    first, last = tables[0], tables[-1]
    if first is None or last is None:
        return None
    # Both hold the same rows in the same order.
    in_last_N = half_of(first["task"].to_numpy()) == len(tables) - 1
    # `after` of every label, and the places that follow from it.
    for name in [one for one in first.column_names if one.startswith("after")]:
        chosen_N = np.where(in_last_N, last[name].to_numpy(), first[name].to_numpy())
        first = first.set_column(first.column_names.index(name), name, pa.array(chosen_N))
    return first


def tuning_episodes(dataset: Dataset, split: str, most: int) -> npt.NDArray[np.int64]:
    """Return the indices of `most` episodes of a split, ascending: of a small one all."""
    num_episodes = dataset.splits[split].num_episodes
    size = min(num_episodes, most)
    return np.sort(np.random.default_rng(0).choice(num_episodes, size, replace=False))


def told_adapting(
    own: AlgorithmConfig, adapting: AlgorithmConfig, tunings: Sequence[FineTuning]
) -> str:
    """Return a line on an inner loop that is not the config's, "" where it is."""
    if tunings:
        each = [
            " and ".join(f"{one.inner_lr:g} x {one.inner_steps}" for one in tuning.chosen)
            + f" on {counted(tuning.num_tasks, 'task')} of {tuning.split}"
            for tuning in tunings
        ]
        halves = ""
        if len(tunings[0].chosen) > 1:
            halves = "; no data.valid_split, so each half of the tasks has what is best for the "
            halves += "other half"
        return (
            f"fine-tuned with the inner_lr x inner_steps of the best {tunings[0].metric} of "
            f"{counted(len(tunings[0].tried), 'setting')}: {', '.join(each)}{halves}"
        )
    was, now = vars(own), vars(adapting)
    changed = [
        f"{key} = {now[key]} (its config: {was[key]})" for key in now if now[key] != was[key]
    ]
    return f"adapts with {', '.join(changed)}" if changed else ""


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
    used = (config.data.train_split, *config.data.valid_splits)
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
