"""What a learner predicts of a split's query rows, all ranks together, by a view of its tasks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torchrec.distributed import DistributedModelParallel

from gmeta.batches.episodes import Episodes, with_query_items, with_sampled
from gmeta.batches.labels import labels_checked, scored_labels
from gmeta.batches.views import STORED, View
from gmeta.config import TrainConfig
from gmeta.errors import UserError
from gmeta.feeds.reader import open_reader
from gmeta.learner import QueryPrediction
from gmeta.metrics.labels import ScoredLabel
from gmeta.parallel.ranks import Ranks, before_device, gather_to_first
from gmeta.parallel.sharded_learner import local_learner
from gmeta.parallel.steps import in_step
from gmeta.parallel.stopping import Stop
from gmeta.parallel.together import no_tasks, raise_first_problem, stopping_if_wrong
from gmeta.report.runs import PLACES
from gmeta.yardstick.candidates import Candidates, places_N2
from gmeta.yardstick.reading import raw_rows, rows_of
from metaio.format.block import build_block
from metaio.format.dataset import Dataset
from metaio.prepare.raw_ids import item_place
from metaio.ragged import owners
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose

Columns: TypeAlias = dict[str, npt.NDArray[Any]]
# A batch, and which of its rows are sampled candidates: empty where there are none.
Listed: TypeAlias = tuple[TaskBatch, npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class Scored:
    """A model as the ranks hold it, and the data that it is scored on."""

    config: TrainConfig
    dataset: Dataset
    sharded: DistributedModelParallel
    ranks: Ranks

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the loss of each label."""
        return self.config.labels.kinds(self.config.outer.loss, self.dataset.features.labels)


def predict_split(
    scored: Scored,
    split: str,
    view: View = STORED,
    candidates: Candidates | None = None,
    advance: Callable[[int], None] = lambda num_tasks: None,
) -> pa.Table | None:
    """Return a row for each query row of the split as the view shows it on rank 0, None elsewhere.

    Its columns are split, task, support_rows, task_rows (shown rows of the task), label, before and
    after, row_id where the dataset stores it, and item (the row of its table) where its schema
    names one; before and after are probabilities for BCE, ratings for other losses. Where there are
    several labels, these are of the judged one, and `label:NAME`, ... of each other one of
    scored_labels; a label that is not known is NaN. `advance` is called with the tasks of each
    batch that is read.
    """
    config, dataset, ranks = scored.config, scored.dataset, scored.ranks
    reads = config.data, config.run.seed, dataset, split
    with open_reader(*reads, ranks.rank, ranks.world_size) as reader:
        stop = Stop()
        stored = labels_checked(reader.batches(0), scored.kinds, dataset, split)
        batches = map(view.of, _told(stopping_if_wrong(stored, dataset.features, stop), advance))
        if candidates is None:
            none = np.zeros(0, np.bool_)
            listed: Iterator[Listed] = ((batch, none) for batch in batches)
        else:
            listed = _listed(candidates, dataset, batches, view)
        columns = _predict_listed(listed, scored, stop)
        if stop.agreed:
            raise_first_problem(stop, ranks)
    table = gathered(columns, ranks)
    if table is None:
        return None
    if not len(table["task"]):
        raise UserError(
            f"split {split!r} of {config.data.path} has 0 query rows: there is nothing to score. "
            "Name other splits with --split"
        )
    return pa.table({"split": pa.array([split] * len(table["task"])), **table})


def _told(batches: Iterator[TaskBatch], advance: Callable[[int], None]) -> Iterator[TaskBatch]:
    for batch in batches:
        advance(batch.num_tasks)
        yield batch


def predict_along(
    batches: Iterable[TaskBatch], steps: Sequence[int], scored: Scored
) -> list[list[Columns]]:
    """Return, for each of these ascending numbers of inner steps, the columns of each of this
    rank's batches. Collective."""
    learner, labels = (
        local_learner(scored.sharded),
        scored_labels(scored.config.labels, scored.dataset),
    )
    arrange = learner.learner.arrange_to_predict
    idle = arrange(no_tasks(scored.dataset.features))
    taken = in_step(map(arrange, batches), idle, scored.ranks, Stop(), scored.sharded)
    by_batch = [
        [_columns(one, scored, each, labels) for one in learner.predict_along(each, steps)]
        for each, _ in taken
    ]
    return [[of_steps[place] for of_steps in by_batch] for place in range(len(steps))]


def _predict_listed(batches: Iterator[Listed], scored: Scored, stop: Stop) -> list[Columns]:
    """Return the columns of each of this rank's batches, for their query rows alone; where
    candidates are sampled, for the rows beside which they stand. Collective."""
    learner, dataset = local_learner(scored.sharded), scored.dataset
    item = item_place(dataset)

    def arrange(listed: Listed) -> Episodes:
        batch, is_sampled_N = listed
        episodes = learner.learner.arrange_to_predict(batch)
        if len(is_sampled_N):
            episodes = with_sampled(episodes, batch, torch.from_numpy(is_sampled_N))
        return episodes if item is None else with_query_items(episodes, batch, item)

    idle = arrange((no_tasks(dataset.features), np.zeros(0, np.bool_)))
    steps = in_step(map(arrange, batches), idle, scored.ranks, stop, scored.sharded)
    labels = scored_labels(scored.config.labels, dataset)
    return [_columns(learner.predict(episodes), scored, episodes, labels) for episodes, _ in steps]


def _listed(
    candidates: Candidates, dataset: Dataset, batches: Iterable[TaskBatch], view: View
) -> Iterator[Listed]:
    """Yield batches with sampled rows, and which rows these are; one batch may become several.

    A batch without episodes stays: a rank whose data failed takes part with such.
    """
    for batch in batches:
        rows = rows_of(batch.map(torch.Tensor.numpy))  # type: ignore[arg-type]
        if not batch.num_tasks:
            yield batch, np.zeros(0, np.bool_)
        for listed in candidates.parts(rows, view):
            row_id_N, weight_N = (
                of_row_N[listed.source_M] if len(of_row_N) else of_row_N
                for of_row_N in (batch.row_id_N.numpy(), batch.weight_N.numpy())
            )
            rows_M = replace(raw_rows(listed.rows, row_id_N), weight_N=weight_N)
            block = build_block(dataset.features, rows_M)
            yield (
                compose(dataset.features, [(block, np.arange(block.num_episodes))]),
                listed.is_sampled_M,
            )


def gathered(columns: list[Columns], ranks: Ranks) -> Columns | None:
    """Return the columns of all ranks' batches as one on rank 0, None elsewhere."""
    gathered = gather_to_first(columns, ranks)
    if gathered is None:
        return None
    # Empty batches keep the collectives of a rank's peers whole, and hold no row.
    parts = [part for of_rank in gathered for part in of_rank if len(part["task"])]
    if not parts:
        return {"task": np.zeros(0, np.int64)}
    table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    tasks, code_N = np.unique(table["task"], return_inverse=True)
    rows_T = np.bincount(code_N, table["task_rows"], minlength=tasks.size)
    table["task_rows"] = np.rint(rows_T)[code_N].astype(np.int32)
    return table


def _columns(
    prediction: QueryPrediction,
    scored: Scored,
    episodes: Episodes,
    labels: Sequence[ScoredLabel],
) -> Columns:
    """Return a batch's columns. Collective."""
    before_device(scored.ranks)
    objectives = local_learner(scored.sharded).learner.objectives
    sampled_N = episodes.query_sampled_N.numpy()
    query_T = prediction.layout.lengths_T.cpu().numpy()
    task_N = owners(query_T)
    stored_N = ~sampled_N if sampled_N.size else np.ones(len(task_N), np.bool_)
    query_T = np.bincount(task_N[stored_N], minlength=len(query_T))
    support_T = prediction.support_lengths_T.cpu().numpy().astype(np.int32)
    # The loss works on logits, a reader on probabilities.
    shown = objectives.outer.predictions
    outputs = shown(prediction.before_N).float(), shown(prediction.after_N).float()
    label_NL, before_NL, after_NL = (
        values.cpu().numpy().reshape(len(task_N), objectives.num_labels)
        for values in (prediction.label_N, *outputs)
    )
    # Adds up to the rows of the task, also where several episodes are of one.
    share_T = (support_T + query_T) / np.maximum(query_T, 1).astype(np.float64)
    columns = {
        "task": np.repeat(episodes.task_T.numpy(), query_T),
        "task_rows": np.repeat(share_T, query_T),
        "support_rows": np.repeat(support_T, query_T),
    }
    for label in labels:
        columns[f"label{label.suffix}"] = label.label_N(label_NL[stored_N])
        columns[f"before{label.suffix}"] = label.prediction_N(before_NL[stored_N])
        columns[f"after{label.suffix}"] = label.prediction_N(after_NL[stored_N])
    for name, of_row_N in (("row_id", episodes.query_row_id_N), ("item", episodes.query_item_N)):
        if of_row_N.numel():
            columns[name] = of_row_N.numpy()[stored_N]
    if sampled_N.size:
        (judged,) = (label for label in labels if label.is_judged)
        scores = judged.prediction_N(before_NL), judged.prediction_N(after_NL)
        places = [places_N2(score_N, sampled_N) for score_N in scores]
        columns |= dict(zip(PLACES, np.concatenate(places, axis=1).T, strict=True))
    return columns
