"""Chooses the inner rate and steps on validation tasks, among the same few for every run."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gmeta.adaptation.algorithms.algorithm import fixed_rates
from gmeta.adaptation.algorithms.registry import find_algorithm
from gmeta.config.algorithm import PLAIN, AlgorithmConfig
from gmeta.config.train_config import DataConfig
from gmeta.data.label_checks import check_labels
from gmeta.data.support_views import SupportView
from gmeta.distributed.collective_errors import run_on_all
from gmeta.distributed.ranks import broadcast_value
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.evaluation.baselines.candidates import Candidates
from gmeta.evaluation.baselines.tuning_grid import assign_halves, choose_best, try_settings
from gmeta.evaluation.predictions import (
    Columns,
    EvalContext,
    gather_columns,
    predict_at_steps,
    predict_split,
)
from gmeta.evaluation.report.evaluation_schema import FineTuning
from gmeta.learner import MetaLearner
from gmeta.metrics.scores import evaluate_split
from gmeta.runs.early_stop import make_scoring
from metaio.format.dataset import Dataset
from metaio.quantities import format_count
from metaio.read.batch import TaskBatch
from metaio.read.reader import EpisodeRange, RangeReader

# Fewer tasks choose by chance: 7 tasks chose a rate of 1 and 10 steps, with which the logloss of 15
# others rose from .70 to .80.
FEWEST_TASKS = 20


def has_tunable_rates(config: AlgorithmConfig) -> bool:
    """Return whether there are a rate and steps to choose."""
    algorithm = find_algorithm(config.name)
    return algorithm.takes_steps and algorithm.rates is fixed_rates


def has_too_few_tasks(data: DataConfig, dataset: Dataset) -> bool:
    """Return whether the validation splits have too few tasks to choose by, or there are none."""
    splits = data.valid_splits
    return sum(dataset.splits[split].num_episodes for split in splits) < FEWEST_TASKS


def choose_judging_splits(
    algorithm: AlgorithmConfig, data: DataConfig, dataset: Dataset, splits: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return the splits that choose each setting; [] where there is none to choose."""
    if not has_tunable_rates(algorithm):
        return []
    # The validation splits choose one setting for all splits that are scored.
    if not has_too_few_tasks(data, dataset):
        return [data.valid_splits]
    # Each half of the tasks then chooses for the other. Only a plain run, which never saw an inner
    # step, needs that. Training tasks cannot choose: the model has seen their labels
    # (docs/evaluation.md).
    return [(split,) for split in splits] if algorithm.name == PLAIN else []


def adapt_with(algorithm: AlgorithmConfig, sharded: DistributedLearner) -> None:
    """Have the model, whose parameters stay, adapt as `algorithm` says from here on."""
    inner = sharded.local
    own = inner.learner
    inner.learner = MetaLearner(
        own.model,
        algorithm,
        own.objectives,
        own.tables,
        statistics=own.statistics,
        items=own.items,
        neighbours=own.neighbours,
        projections=own.projections,
        events=own.events,
        event_columns=own.event_columns,
    )
    # A trained encoder or generator belongs to the run too, on the device where it is.
    pairs = ((inner.learner.encoder, own.encoder), (inner.learner.generator, own.generator))
    for part, learned in pairs:
        if part is not None and learned is not None:
            part.load_state_dict(learned.state_dict(), assign=True)


def choose_fine_tuning(context: EvalContext, splits: Sequence[str]) -> FineTuning:
    """Return the best inner rate and steps on some splits, or those of each half. Collective."""
    config, ranks = context.config, context.ranks
    metric = make_scoring(config).measure
    is_halved = has_too_few_tasks(config.data, context.dataset)
    # A half of the tasks judges as many as a validation split would.
    most = config.evaluation.tuning_tasks * (1 + is_halved)
    batches_by_split = [read_tuning_batches(context, split, most) for split in splits]
    # By rate and steps: of all tasks, then of each half.
    errors: dict[tuple[float, int], list[float]] = {}

    def measure_errors(columns: list[Columns]) -> list[float]:
        """Return the error of all tasks, then of each half; nothing except on rank 0."""
        table = gather_columns(columns, ranks)
        if table is None:
            return []
        known_N = ~np.isnan(table["label"])
        table = {name: column[known_N] for name, column in table.items()}
        found, second_N = [], assign_halves(table["task"])
        scoring = make_scoring(config)
        for kept_N in (np.ones(len(second_N), np.bool_), second_N == 0, second_N == 1):
            label, after, task = (table[name][kept_N] for name in ("label", "after", "task"))
            found.append(evaluate_split(label, after, task, scoring, [metric])[metric].value)
        return found

    def measure_errors_by_steps(rate: float, steps: Sequence[int]) -> list[float]:
        """Return the error after each of these numbers of steps."""
        algorithm = replace(config.algorithm, inner_lr=rate, inner_steps=max(steps))
        adapt_with(algorithm, context.sharded)
        along = [predict_at_steps(batches, steps, context) for _, batches in batches_by_split]
        for num_steps, of_splits in zip(steps, zip(*along, strict=True), strict=True):
            by_split = [measure_errors(columns) for columns in of_splits]
            means = [float(np.mean(same)) for same in zip(*by_split, strict=True)]
            errors[rate, num_steps] = broadcast_value(means, ranks)
        return [errors[rate, num_steps][0] for num_steps in steps]

    own = config.algorithm.inner_lr, config.algorithm.inner_steps
    settings = try_settings(measure_errors_by_steps, own)
    split_names, num_tasks = ", ".join(splits), sum(num_tasks for num_tasks, _ in batches_by_split)
    if not is_halved:
        return FineTuning(split_names, num_tasks, metric, (choose_best(settings),), settings)
    # The second half's choice first: it is for the tasks of the first.
    by_half = [
        choose_best(
            [replace(one, value=errors[one.inner_lr, one.inner_steps][half]) for one in settings]
        )
        for half in (2, 1)
    ]
    return FineTuning(split_names, num_tasks, metric, tuple(by_half), settings)


def read_tuning_batches(context: EvalContext, split: str, most: int) -> tuple[int, list[TaskBatch]]:
    """Return how many episodes of a split judge, and this rank's share of them. Collective."""
    config, dataset, ranks = context.config, context.dataset, context.ranks
    episodes = choose_tuning_episodes(dataset, split, most)
    own_episodes = np.array_split(episodes, ranks.world_size)[ranks.rank]
    size = max(1, config.data.tasks_per_step // ranks.world_size)
    groups = [
        [EpisodeRange(split, int(one), 1) for one in own_episodes[first : first + size]]
        for first in range(0, len(own_episodes), size)
    ]
    batches: list[TaskBatch] = []

    def read_groups() -> None:
        with RangeReader(dataset, threads=config.data.threads) as reader:
            stored = check_labels(reader.batches(groups), context.kinds, dataset, split)
            batches.extend(stored)

    # An error of one rank is raised on all: the others would wait in a collective.
    run_on_all(read_groups, ranks)
    return len(episodes), batches


def predict_tuned(
    context: EvalContext,
    split: str,
    tuning: FineTuning,
    view: SupportView,
    candidates: Candidates | None,
    advance: Callable[[int], None],
) -> pa.Table | None:
    """Return what predict_split does, each task adapted with the setting for it. Collective."""
    tables = []
    for setting in tuning.chosen:
        algorithm = replace(
            context.config.algorithm, inner_lr=setting.inner_lr, inner_steps=setting.inner_steps
        )
        adapt_with(algorithm, context.sharded)
        tables.append(predict_split(context, split, view, candidates, advance))
    first, last = tables[0], tables[-1]
    if first is None or last is None:
        return None
    # Both tables hold the same rows in the same order.
    in_last_N = assign_halves(first["task"].to_numpy()) == len(tables) - 1
    # Also the places among candidates, which follow from the predictions after adapting.
    for name in [one for one in first.column_names if one.startswith("after")]:
        chosen_N = np.where(in_last_N, last[name].to_numpy(), first[name].to_numpy())
        first = first.set_column(first.column_names.index(name), name, pa.array(chosen_N))
    return first


def choose_tuning_episodes(dataset: Dataset, split: str, most: int) -> npt.NDArray[np.int64]:
    """Return the indices of `most` episodes of a split, ascending; all of a smaller one."""
    num_episodes = dataset.splits[split].num_episodes
    size = min(num_episodes, most)
    # A fixed seed: all runs are tuned on the same tasks.
    return np.sort(np.random.default_rng(0).choice(num_episodes, size, replace=False))


def describe_adaptation(
    run_algorithm: AlgorithmConfig,
    adapting: AlgorithmConfig,
    tunings: Sequence[FineTuning],
    few: str = "",
) -> str:
    """Return a line on an inner loop unlike the config's, else ""; `few`: splits with few tasks."""
    if tunings:
        each = [
            " and ".join(f"{one.inner_lr:g} x {one.inner_steps}" for one in tuning.chosen)
            + f" on {format_count(tuning.num_tasks, 'task')} of {tuning.split}"
            for tuning in tunings
        ]
        halves = ""
        if len(tunings[0].chosen) > 1:
            why = f"fewer than {FEWEST_TASKS} tasks in {few}" if few else "no data.valid_split"
            halves = f"; {why}, so each half of the tasks has what is best for the other half"
        is_plain = run_algorithm.name == PLAIN
        own = f"{run_algorithm.inner_lr:g} x {run_algorithm.inner_steps}"
        trained = "" if is_plain else f" (its config: {own})"
        return (
            f"{'fine-tuned' if is_plain else 'adapts'} with the inner_lr x inner_steps of the best "
            f"{tunings[0].metric} of {format_count(len(tunings[0].tried), 'setting')}: "
            f"{', '.join(each)}{halves}{trained}"
        )
    was, now = vars(run_algorithm), vars(adapting)
    changed = [
        f"{key} = {now[key]} (its config: {was[key]})" for key in now if now[key] != was[key]
    ]
    if few and not changed:
        return (
            f"adapts as its config says: fewer than {FEWEST_TASKS} tasks in {few} choose no "
            "inner_lr x inner_steps"
        )
    return f"adapts with {', '.join(changed)}" if changed else ""
