"""How a run adapts at its best: the inner rate and steps that validation chooses, among the same
few for plain and meta-learned runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torchrec.distributed import DistributedModelParallel

from gmeta.adaptation.algorithms.algorithm import fixed_rates
from gmeta.adaptation.algorithms.registry import find_algorithm
from gmeta.adaptation.config import PLAIN, AlgorithmConfig
from gmeta.batches.labels import labels_checked
from gmeta.batches.views import View
from gmeta.config import DataConfig
from gmeta.learner import MetaLearner
from gmeta.metrics.catalogue import loss_metric
from gmeta.metrics.scores import evaluate_split
from gmeta.outer.early_stop import scoring_of
from gmeta.parallel.ranks import value_of_first
from gmeta.parallel.sharded_learner import local_learner
from gmeta.parallel.together import by_all
from gmeta.predictions import Columns, Scored, gathered, predict_along, predict_split
from gmeta.report.evaluation import FineTuning
from gmeta.yardstick.candidates import Candidates
from gmeta.yardstick.finetune import best_of, half_of, try_all
from metaio.counted import counted
from metaio.format.dataset import Dataset
from metaio.read.batch import TaskBatch
from metaio.read.reader import EpisodeRange, RangeReader

# Fewer choose by chance: 7 tasks chose a rate of 1 and 10 steps, with which the logloss of 15
# others rose from .70 to .80.
FEWEST_TASKS = 20


def has_rates(config: AlgorithmConfig) -> bool:
    """Tell whether there are a rate and steps to choose."""
    algorithm = find_algorithm(config.name)
    return algorithm.takes_steps and algorithm.rates is fixed_rates


def are_too_few(data: DataConfig, dataset: Dataset) -> bool:
    """Tell whether the validation splits have too few tasks to choose by, or there are none."""
    splits = data.valid_splits
    return sum(dataset.splits[split].num_episodes for split in splits) < FEWEST_TASKS


def judges_of(
    algorithm: AlgorithmConfig, data: DataConfig, dataset: Dataset, scored: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return the splits that choose rate and steps together: the validation splits, for all splits
    that are scored. Where these are too few, each half of the tasks of a scored split judges for
    the other, but only for a plain run, which never saw an inner step; training tasks cannot, whose
    labels the model has seen (docs/evaluation.md). None where there is nothing to choose.
    """
    if not has_rates(algorithm):
        return []
    if not are_too_few(data, dataset):
        return [data.valid_splits]
    return [(split,) for split in scored] if algorithm.name == PLAIN else []


def adapt_with(algorithm: AlgorithmConfig, sharded: DistributedModelParallel) -> None:
    """Let the model, whose parameters stay, adapt as `algorithm` says from here on."""
    inner = local_learner(sharded)
    own = inner.learner
    inner.learner = MetaLearner(
        own.model,
        algorithm,
        own.objectives,
        own.tables,
        statistics=own.statistics,
        items=own.items,
        projections=own.projections,
    )
    # What an encoder or a generator has learned is the run's, too, on the device where it is.
    pairs = ((inner.learner.encoder, own.encoder), (inner.learner.generator, own.generator))
    for part, learned in pairs:
        if part is not None and learned is not None:
            part.load_state_dict(learned.state_dict(), assign=True)


def choose_fine_tuning(scored: Scored, splits: Sequence[str]) -> FineTuning:
    """Return the inner rate and steps by which a run adapts best to tasks of some splits, by
    the mean over these: one setting, or, where they are not the validation splits, one for each
    half of the tasks, the best of the other half. Collective."""
    config, ranks = scored.config, scored.ranks
    # Not AUC: it does not notice outputs that run away, as they do where the rate is too high.
    metric = loss_metric(config.loss_of())
    is_halved = are_too_few(config.data, scored.dataset)
    most = config.evaluation.tuning_tasks * (1 + is_halved)
    read = [tuning_batches(scored, split, most) for split in splits]
    errors: dict[tuple[float, int], list[float]] = {}  # of all tasks, then of each half

    def errors_of(columns: list[Columns]) -> list[float]:
        """Return the error of all tasks, then of each half; nothing on the ranks but the first."""
        table = gathered(columns, ranks)
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

    def errors_along(rate: float, steps: Sequence[int]) -> list[float]:
        """Return the error after each of these numbers of steps."""
        algorithm = replace(config.algorithm, inner_lr=rate, inner_steps=max(steps))
        adapt_with(algorithm, scored.sharded)
        along = [predict_along(batches, steps, scored) for _, batches in read]
        for num_steps, of_splits in zip(steps, zip(*along, strict=True), strict=True):
            by_split = [errors_of(columns) for columns in of_splits]
            means = [float(np.mean(same)) for same in zip(*by_split, strict=True)]
            errors[rate, num_steps] = value_of_first(means, ranks)
        return [errors[rate, num_steps][0] for num_steps in steps]

    own = config.algorithm.inner_lr, config.algorithm.inner_steps
    tried = try_all(errors_along, own)
    told, num_tasks = ", ".join(splits), sum(num_tasks for num_tasks, _ in read)
    if not is_halved:
        return FineTuning(told, num_tasks, metric, (best_of(tried),), tried)
    # First what the second half chose, for the tasks of the first.
    by_half = [
        best_of([replace(one, value=errors[one.inner_lr, one.inner_steps][half]) for one in tried])
        for half in (2, 1)
    ]
    return FineTuning(told, num_tasks, metric, tuple(by_half), tried)


def tuning_batches(scored: Scored, split: str, most: int) -> tuple[int, list[TaskBatch]]:
    """Return how many episodes of a split judge, `most` unless it has fewer, and this rank's share
    of them. Collective."""
    config, dataset, ranks = scored.config, scored.dataset, scored.ranks
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
            stored = labels_checked(reader.batches(groups), scored.kinds, dataset, split)
            batches.extend(stored)

    by_all(read, ranks)
    return len(episodes), batches


def predict_tuned(
    scored: Scored,
    split: str,
    tuning: FineTuning,
    view: View,
    candidates: Candidates | None,
    advance: Callable[[int], None],
) -> pa.Table | None:
    """Return what predict_split does, each task adapted with what was chosen for it. Collective."""
    tables = []
    for setting in tuning.chosen:
        algorithm = replace(
            scored.config.algorithm, inner_lr=setting.inner_lr, inner_steps=setting.inner_steps
        )
        adapt_with(algorithm, scored.sharded)
        tables.append(predict_split(scored, split, view, candidates, advance))
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
    """Return the indices of `most` episodes of a split, ascending; all of a smaller one."""
    num_episodes = dataset.splits[split].num_episodes
    size = min(num_episodes, most)
    return np.sort(np.random.default_rng(0).choice(num_episodes, size, replace=False))


def told_adapting(
    own: AlgorithmConfig,
    adapting: AlgorithmConfig,
    tunings: Sequence[FineTuning],
    few: str = "",
) -> str:
    """Return a line on an inner loop that is not the config's, "" where it is; `few` names the
    validation splits that are too few to choose one."""
    if tunings:
        each = [
            " and ".join(f"{one.inner_lr:g} x {one.inner_steps}" for one in tuning.chosen)
            + f" on {counted(tuning.num_tasks, 'task')} of {tuning.split}"
            for tuning in tunings
        ]
        halves = ""
        if len(tunings[0].chosen) > 1:
            why = f"fewer than {FEWEST_TASKS} tasks in {few}" if few else "no data.valid_split"
            halves = f"; {why}, so each half of the tasks has what is best for the other half"
        is_plain = own.name == PLAIN
        trained = "" if is_plain else f" (its config: {own.inner_lr:g} x {own.inner_steps})"
        return (
            f"{'fine-tuned' if is_plain else 'adapts'} with the inner_lr x inner_steps of the best "
            f"{tunings[0].metric} of {counted(len(tunings[0].tried), 'setting')}: "
            f"{', '.join(each)}{halves}{trained}"
        )
    was, now = vars(own), vars(adapting)
    changed = [
        f"{key} = {now[key]} (its config: {was[key]})" for key in now if now[key] != was[key]
    ]
    if few and not changed:
        return (
            f"adapts as its config says: fewer than {FEWEST_TASKS} tasks in {few} choose no "
            "inner_lr x inner_steps"
        )
    return f"adapts with {', '.join(changed)}" if changed else ""
