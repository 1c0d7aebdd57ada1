"""Evaluates a run on tasks it was not trained on: adapts to each support set, scores its query set.

"before" is a prediction by the meta-parameters, "after" one after the inner loop."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from gmeta.config.algorithm import PLAIN, AlgorithmConfig
from gmeta.config.evaluation import EvaluationConfig
from gmeta.config.labels import LabelsConfig
from gmeta.config.sharding import sharding_to_evaluate
from gmeta.config.train_config import DataConfig
from gmeta.data.label_checks import scored_labels
from gmeta.data.opening import data_config_for, open_by_name
from gmeta.data.support_views import EvalProtocol, SupportView
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import shard_learner
from gmeta.errors import UserError
from gmeta.evaluation.baselines.candidates import Candidates
from gmeta.evaluation.fine_tuning import (
    choose_fine_tuning,
    choose_judging_splits,
    describe_adaptation,
    has_too_few_tasks,
    has_tunable_rates,
    predict_tuned,
)
from gmeta.evaluation.predictions import EvalContext, predict_split
from gmeta.evaluation.report.evaluated_runs import EvaluatedRun
from gmeta.evaluation.report.evaluation_schema import FineTuning
from gmeta.runs.build import build, check_registered
from gmeta.runs.checkpoints.lineage import read_lineage
from gmeta.runs.checkpoints.loader import broadcast_checkpoint, load_checkpoint
from gmeta.runs.checkpoints.progress_file import read_about
from gmeta.runs.checkpoints.selected_checkpoint import check_config, checkpoint_to_use
from gmeta.runs.chosen_adaptation import read_chosen_adaptation
from gmeta.runs.run_folder import RunFolder, parse_checkpoint_step
from metaio.format.dataset import Dataset
from metaio.format.translation import translate_dataset
from metaio.prepare.episodes.raw_ids import with_raw_ids
from metaio.recipes.validation_splits import find_overlapping_splits


def evaluate_run(
    root: Path,
    name: str,
    splits: Sequence[str],
    ranks: Ranks,
    adapting: AlgorithmConfig | None = None,
    protocol: EvalProtocol = EvalProtocol(),  # noqa: B008 - frozen
    on: str = "",
    candidates: Candidates | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
    label: str = "",
    evaluation: EvaluationConfig | None = None,
) -> EvaluatedRun | None:
    """Predict `splits` (default: the config's) with a run's checkpoint, and return them on rank 0,
    None elsewhere. `on` names another dataset, all of whose splits are predicted in their place.

    `adapting` and `evaluation` replace the config's algorithm and evaluation; without `adapting`
    the run adapts at the rate and steps that are best on its validation splits (see
    choose_judging_splits). `candidates` are ranked with positive rows; `advance` gets how many of
    about how many tasks are read, each view and setting counted. Raises UserError for a missing
    run, checkpoint, split or label, GMetaError for a dataset other than the one trained on,
    DataError for other columns in `on`."""
    folder = RunFolder(root)
    config = folder.read_config()
    config = own_config = replace(config, evaluation=evaluation or config.evaluation)
    checkpoint = broadcast_checkpoint(checkpoint_of(folder), ranks)
    check_config(checkpoint, config)
    made_on = folder.read_environment()
    check_registered(root, config.model, config.algorithm, config.loss_names, made_on)
    run_algorithm, step = config.algorithm, parse_checkpoint_step(checkpoint)
    # What its validation splits chose earlier: another dataset may not have them.
    saved_adaptation = (
        read_chosen_adaptation(folder, run_algorithm, step) if on and adapting is None else None
    )
    is_as_trained, adapting = adapting is None, adapting or saved_adaptation or run_algorithm
    dataset, learner = build(replace(config, algorithm=adapting))
    config = replace(config, labels=with_judged_label(label, config.labels, dataset))
    folder.check_dataset(dataset.url, dataset.fingerprint)
    # Nothing is trained: the tables need neither the state of an optimizer nor the plan of the
    # ranks that trained, which may have had GPUs.
    outer = replace(config.outer, sparse_optimizer="sgd")
    sharding = sharding_to_evaluate(config.sharding, ranks.device.type == "cuda")
    own_folder = replace(config.run, dir=str(root))  # it may have been moved
    no_counts = replace(config.model, admission=(0, 0))
    sharding_config = replace(
        config, outer=outer, sharding=sharding, run=own_folder, model=no_counts
    )
    sharded = shard_learner(learner, dataset.features, sharding_config, ranks)
    progress = load_checkpoint(checkpoint, sharded, None, ranks)
    trained_on = dataset
    if on:
        dataset = translate_dataset(open_by_name(on), trained_on)
        config = replace(config, data=data_config_for(config.data, dataset))
    protocol, _ = limit_to_one_draw(protocol, dataset)
    chosen = choose_splits(config.data, dataset, splits)
    judging_splits: list[tuple[str, ...]] = []
    is_few = False
    if is_as_trained and learner.inner_steps:
        judging_splits = choose_judging_splits(config.algorithm, config.data, dataset, chosen)
        is_few = has_tunable_rates(config.algorithm) and has_too_few_tasks(config.data, dataset)
    # A plain run is fine-tuned for the label in question; a meta-learned run adapts in one way,
    # whichever label that is.
    tuning_config = config if run_algorithm.name == PLAIN else own_config
    tuning_context = EvalContext(tuning_config, dataset, sharded, ranks)
    tunings = [choose_fine_tuning(tuning_context, each) for each in judging_splits]
    context = replace(tuning_context, config=config)
    tables, limited = predict_views(context, chosen, tunings, protocol, candidates, advance)
    if ranks.rank != 0:
        return None
    labels = scored_labels(config.labels, dataset)
    return EvaluatedRun(
        name=name,
        algorithm=config.algorithm.name,
        model=config.model.name,
        loss=config.loss_of(),
        loss_name=config.loss_name(),
        evaluation=config.evaluation,
        step=progress.step,
        predictions=with_raw_ids(
            pa.concat_tables(
                table.append_column("draw", pa.array([draw] * table.num_rows, pa.int32()))
                for draw, table in enumerate(tables)
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
        adapts_with=describe_adaptation(
            run_algorithm, adapting, tunings, ", ".join(config.data.valid_splits) if is_few else ""
        ),
        fine_tuning=tuple(tunings),
        label=next(one.name for one in labels if one.is_judged),
        other_losses={one.name: config.loss_of(one.name) for one in labels if not one.is_judged},
    )


def predict_views(
    context: EvalContext,
    splits: Sequence[str],
    tunings: Sequence[FineTuning],
    protocol: EvalProtocol,
    candidates: Candidates | None,
    advance: Callable[[int, int], None],
) -> tuple[list[pa.Table], dict[int, pa.Table]]:
    """Return the rows of all splits by draw and by support limit, on rank 0 alone. Collective."""
    # Each setting that was chosen is one more pass over the split.
    passes = (protocol.draws + len(protocol.support_sizes)) * max(
        [len(tuning.chosen) for tuning in tunings], default=1
    )
    num_tasks = sum(context.dataset.splits[split].num_episodes for split in splits) * passes
    # The ranks' shares differ by a task at most: this rank's total is a guess.
    total, done = -(-num_tasks // context.ranks.world_size), 0

    def count_tasks(num_tasks: int) -> None:
        nonlocal done
        done += num_tasks
        advance(min(done, total), total)

    def predict_view(view: SupportView) -> pa.Table:
        tables: list[pa.Table | None] = []
        for index, split in enumerate(splits):
            if tunings:
                # One tuning for all splits, or one for each.
                tuning = tunings[index % len(tunings)]
                of_split = predict_tuned(context, split, tuning, view, candidates, count_tasks)
            else:
                of_split = predict_split(context, split, view, candidates, count_tasks)
            tables.append(of_split)
        found = [table for table in tables if table is not None]
        return pa.concat_tables(found) if found else pa.table({})

    draws, limited = protocol.views(context.dataset.features.draws_negatives)
    tables_by_draw = list(map(predict_view, draws))
    return tables_by_draw, {most: predict_view(view) for most, view in limited.items()}


def with_judged_label(label: str, labels: LabelsConfig, dataset: Dataset) -> LabelsConfig:
    """Return the section with `label` as the judged one, unless it is "" or no label has a name."""
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
    """Return the checkpoint that stands for a run. Raises UserError if it has none yet."""
    checkpoint = checkpoint_to_use(run.checkpoints, run.read_config().run)
    if checkpoint is None:
        raise UserError(
            f"run {run.root} has 0 checkpoints: there is nothing to evaluate yet. "
            "Let it reach its first one"
        )
    return checkpoint


def limit_to_one_draw(protocol: EvalProtocol, dataset: Dataset) -> tuple[EvalProtocol, str]:
    """Return the protocol with one draw, and a line on it, if the dataset fixes support rows."""
    if protocol.draws == 1 or not dataset.manifest.support_is_fixed:
        return protocol, ""
    return replace(protocol, draws=1), (
        f"--draws = {protocol.draws}, but the protocol of {dataset.url} says which rows of a task "
        "are support, and which of them its query: one draw, intervals over tasks alone"
    )


def choose_splits(data: DataConfig, dataset: Dataset, requested: Sequence[str]) -> list[str]:
    """Return the splits to score: `requested`, the config's, or all that training did not touch."""
    chosen = list(requested or data.eval_splits)
    for split in chosen:
        if split not in dataset.splits:
            raise UserError(
                f"split {split!r} is not in {data.path}: "
                f"it has {', '.join(dataset.splits)}. Name one of them"
            )
    # A split that decided when to stop says nothing about unseen tasks.
    used = {data.train_split, *data.valid_splits}
    # Twice: `fit` was carved out of `train`, and other splits were carved out of `train` too.
    for _ in range(2):
        used = {shared for split in used for shared in find_overlapping_splits(split, dataset)}
    chosen = chosen or [split for split in dataset.splits if split not in used]
    if not chosen:
        raise UserError(
            f"{data.path} has no split but {' and '.join(dataset.splits)}, which the run "
            "was trained or chosen by: there is nothing to score. Name one with --split, or train "
            "on data with one split more"
        )
    # Checked here: prediction may take minutes to get to an empty split.
    for split in chosen:
        if not dataset.splits[split].num_episodes:
            raise UserError(
                f"split {split!r} of {data.path} has 0 episodes: there is nothing to score. "
                "Name other splits with --split"
            )
    return chosen


def describe_plain_best(run: EvaluatedRun) -> str:
    """Return a line on a meta-learned run whose checkpoint is of its plain epochs, or is what it
    began with, else ""."""
    began_with = run.config["run"].get("start_from", "")
    if run.step == 0 and began_with:
        return (
            f"{run.name}: nothing was better on validation than {began_with}, with whose weights "
            "it began: it is that model"
        )
    plain_epochs = run.config["algorithm"].get("plain_epochs", 0)
    epochs = [one["epoch"] for one in run.history if "valid" in one and one["step"] == run.step]
    if run.algorithm == PLAIN or not epochs or epochs[-1] >= plain_epochs:
        return ""
    return (
        f"{run.name}: its best checkpoint, step {run.step}, is of its {plain_epochs} plain epochs: "
        f"it is a plain model that adapts, and says nothing of {run.algorithm}"
    )


def describe_trained_splits(
    name: str,
    folder: RunFolder,
    trained_dataset: Dataset,
    scored_dataset: Dataset,
    splits: Sequence[str],
) -> list[str]:
    """Return a line for each split of `scored_dataset` that the run was trained or chosen on."""
    data, lineage = folder.read_config().data, read_lineage(read_about(checkpoint_of(folder)))
    # The increments that a run was trained on, from its first on, are in its lineage.
    trained_on = {trained_dataset.fingerprint, *(one.fingerprint for one in lineage)}
    if scored_dataset.fingerprint not in trained_on:
        return []
    trained = find_overlapping_splits(data.train_split, scored_dataset)
    return [
        f"{split}: {name} was {'trained' if split in trained else 'chosen'} on rows of it, so its "
        "figures there flatter and say little of unseen tasks"
        for split in splits
        if split in trained or split in data.valid_splits
    ]
