"""Predicts the query rows of a split, all ranks together, as a view shows its tasks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from gmeta.config.train_config import TrainConfig
from gmeta.data.episodes import Episodes, with_known_items, with_query_items, with_sampled
from gmeta.data.item_catalogue import ItemCatalogue
from gmeta.data.label_checks import check_labels, scored_labels
from gmeta.data.reader import open_reader
from gmeta.data.support_views import STORED, SupportView
from gmeta.distributed.collective_errors import raise_first_problem
from gmeta.distributed.ranks import Ranks, gather_values, wait_for_hosts
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.distributed.steps import batch_without_tasks, iterate_steps, stop_on_error
from gmeta.distributed.stopping import Stop
from gmeta.errors import UserError
from gmeta.evaluation.baselines.block_rows import add_event_lists, pack_rows, unpack_block
from gmeta.evaluation.baselines.candidates import (
    Candidates,
    RowsWithCandidates,
    rank_among_candidates_N2,
)
from gmeta.evaluation.item_vectors import ALL_ITEMS, ItemVectors, fetch_item_vectors
from gmeta.evaluation.report.evaluated_runs import PLACES
from gmeta.learner import QueryPrediction
from gmeta.metrics.scored_label import ScoredLabel
from gmeta_models.dot import Dot
from metaio.format.block import Rows, build_block
from metaio.format.dataset import Dataset
from metaio.prepare.episodes.raw_ids import find_item_feature
from metaio.ragged import owners
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose

Columns: TypeAlias = dict[str, npt.NDArray[Any]]
# A batch, and which of its rows are sampled candidates: empty where there are none.
BatchWithCandidates: TypeAlias = tuple[TaskBatch, npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class EvalContext:
    """A model that the ranks hold, and the data that it is scored on."""

    config: TrainConfig
    dataset: Dataset
    sharded: DistributedLearner
    ranks: Ranks
    items: ItemVectors | None = None  # of all items, while these weights stay

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the loss of each label."""
        return self.config.labels.loss_kinds(self.config.outer.loss, self.dataset.features.labels)


def predict_split(
    context: EvalContext,
    split: str,
    view: SupportView = STORED,
    candidates: Candidates | None = None,
    advance: Callable[[int], None] = lambda num_tasks: None,
) -> pa.Table | None:
    """Return a row for each query row of the split as the view shows it, on rank 0; None elsewhere.

    Columns: split, task, support_rows, task_rows (rows of the task in the view), label, before and
    after (probabilities for BCE, ratings for other losses), row_id where the dataset stores it, and
    item (the row of its table) where the schema names one. With several labels these are the judged
    one's, with `label:NAME`, ... of each other; an unknown label is NaN. `advance` gets the tasks
    of each batch that is read."""
    config, dataset, ranks = context.config, context.dataset, context.ranks
    if config.evaluation.ranks_all and context.items is None:
        context = replace(context, items=_fetch_items(context))
    reads = config.data, config.run.seed, dataset, split
    with open_reader(*reads, ranks.rank, ranks.world_size) as reader:
        stop = Stop()
        stored = check_labels(reader.batches(0), context.kinds, dataset, split)
        batches = map(view.of, _count_tasks(stop_on_error(stored, dataset.features, stop), advance))
        if candidates is None:
            none = np.zeros(0, np.bool_)
            with_candidates: Iterator[BatchWithCandidates] = ((batch, none) for batch in batches)
        else:
            with_candidates = _with_candidates(candidates, dataset, batches, view)
        columns = _predict_batches(with_candidates, context, stop)
        # A rank whose data failed took part with empty batches: now its error is raised on all.
        if stop.is_agreed:
            raise_first_problem(stop, ranks)
    table = gather_columns(columns, ranks)
    if table is None:
        return None
    if not len(table["task"]):
        raise UserError(
            f"split {split!r} of {config.data.path} has 0 query rows: there is nothing to score. "
            "Name other splits with --split"
        )
    return pa.table({"split": pa.array([split] * len(table["task"])), **table})


def _fetch_items(context: EvalContext) -> ItemVectors:
    """Return the vectors of all items. Raises UserError: the model has none. Collective."""
    learner = context.sharded.local.learner
    item, columns = find_item_feature(context.dataset), learner.event_columns
    if columns is None or not isinstance(learner.model, Dot) or item != columns.target[0]:
        raise UserError(
            f"evaluation.candidates = {ALL_ITEMS} ranks among all items, by the vectors of users "
            'and items: model.name = "dot" is needed, and [item] in the schema must name the first '
            "column of [events]. Set them, or sample candidates"
        )
    catalogue = ItemCatalogue.of(context.dataset, columns)
    return fetch_item_vectors(context.sharded, context.dataset, catalogue)


def _count_tasks(
    batches: Iterator[TaskBatch], advance: Callable[[int], None]
) -> Iterator[TaskBatch]:
    for batch in batches:
        advance(batch.num_tasks)
        yield batch


def predict_at_steps(
    batches: Iterable[TaskBatch], steps: Sequence[int], context: EvalContext
) -> list[list[Columns]]:
    """Return this rank's columns after each of these rising numbers of steps. Collective."""
    learner = context.sharded.local
    labels = scored_labels(context.config.labels, context.dataset)
    collate = learner.learner.collate_to_predict
    idle = collate(batch_without_tasks(context.dataset.features))
    prepared_steps = iterate_steps(
        map(collate, batches), idle, context.ranks, Stop(), context.sharded
    )
    # One inner loop with the most steps gives the predictions after all smaller numbers of steps.
    by_batch = [
        [_make_columns(one, context, each, labels) for one in learner.predict_along(each, steps)]
        for each, _ in prepared_steps
    ]
    return [[of_steps[place] for of_steps in by_batch] for place in range(len(steps))]


def _predict_batches(
    batches: Iterator[BatchWithCandidates], context: EvalContext, stop: Stop
) -> list[Columns]:
    """Return the columns of this rank's batches, without sampled rows. Collective."""
    learner, dataset = context.sharded.local, context.dataset
    item = find_item_feature(dataset)

    def collate(listed: BatchWithCandidates) -> Episodes:
        batch, is_sampled_N = listed
        episodes = learner.learner.collate_to_predict(batch)
        if len(is_sampled_N):
            episodes = with_sampled(episodes, batch, torch.from_numpy(is_sampled_N))
        if context.items is not None:
            episodes = with_known_items(episodes, batch)
        return episodes if item is None else with_query_items(episodes, batch, item)

    idle = collate((batch_without_tasks(dataset.features), np.zeros(0, np.bool_)))
    steps = iterate_steps(map(collate, batches), idle, context.ranks, stop, context.sharded)
    labels = scored_labels(context.config.labels, dataset)
    return [
        _make_columns(learner.predict(episodes), context, episodes, labels) for episodes, _ in steps
    ]


def _with_candidates(
    candidates: Candidates, dataset: Dataset, batches: Iterable[TaskBatch], view: SupportView
) -> Iterator[BatchWithCandidates]:
    """Yield batches with sampled rows, and which rows these are; one batch may become several."""
    for batch in batches:
        rows, first = unpack_block(batch.map(torch.Tensor.numpy)), 0  # type: ignore[arg-type]
        if not batch.num_tasks:
            # A rank whose data failed takes part with such batches.
            yield batch, np.zeros(0, np.bool_)
        for listed in candidates.add_candidates(rows, view):
            stop = first + len(listed.rows.task_T)
            raw = _with_stored_columns(batch.tasks(first, stop), listed)
            block, first = build_block(dataset.features, raw), stop
            yield (
                compose(dataset.features, [(block, np.arange(block.num_episodes))]),
                listed.is_sampled_N,
            )


def _with_stored_columns(batch: TaskBatch, listed: RowsWithCandidates) -> Rows:
    """Return the listed rows of these tasks with the row ids, weights and events that are stored
    with the rows that they were made of."""
    # Counted from the first row of the batch that the tasks are part of.
    source_N = listed.source_N - listed.source_N.min(initial=0)
    of_rows = batch.row_id_N.numpy(), batch.weight_N.numpy(), batch.events_before_N.numpy()
    row_id_N, weight_N, before_N = (own[source_N] if len(own) else own for own in of_rows)
    raw = replace(pack_rows(listed.rows, row_id_N), weight_N=weight_N)
    if not len(batch.num_events_T):
        return raw
    ids_VM = batch.unique_ids_U[batch.event_positions.to(torch.int64)].numpy()
    raw = add_event_lists(raw, ids_VM, batch.num_events_T.numpy())
    numbers = batch.event_numbers.numpy()
    return replace(raw, event_numbers=numbers, events_before_N=before_N)


def gather_columns(columns: list[Columns], ranks: Ranks) -> Columns | None:
    """Return the columns of all ranks' batches as one on rank 0, None elsewhere."""
    by_rank = gather_values(columns, ranks)
    if by_rank is None:
        return None
    # Empty batches exist for the collectives of other ranks, and hold no row.
    parts = [part for of_rank in by_rank for part in of_rank if len(part["task"])]
    if not parts:
        return {"task": np.zeros(0, np.int64)}
    table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    tasks, code_N = np.unique(table["task"], return_inverse=True)
    # A task may have several episodes, on several ranks: its rows are the sum of its query rows'
    # shares.
    rows_T = np.bincount(code_N, table["task_rows"], minlength=tasks.size)
    # A sum of shares is not exactly a whole number.
    table["task_rows"] = np.rint(rows_T)[code_N].astype(np.int32)
    return table


def _make_columns(
    prediction: QueryPrediction,
    context: EvalContext,
    episodes: Episodes,
    labels: Sequence[ScoredLabel],
) -> Columns:
    wait_for_hosts(context.ranks)
    objectives = context.sharded.local.learner.objectives
    sampled_N = episodes.query_sampled_N.numpy()
    query_T = prediction.layout.lengths_T.cpu().numpy()
    task_N = owners(query_T)
    stored_N = ~sampled_N if sampled_N.size else np.ones(len(task_N), np.bool_)
    query_T = np.bincount(task_N[stored_N], minlength=len(query_T))
    support_T = prediction.support_lengths_T.cpu().numpy().astype(np.int32)
    # The loss works on logits, a reader on probabilities.
    to_predictions = objectives.outer.predictions
    outputs = [to_predictions(one).float() for one in (prediction.before_N, prediction.after_N)]
    label_NL, before_NL, after_NL = (
        values.cpu().numpy().reshape(len(task_N), objectives.num_labels)
        for values in (prediction.label_N, *outputs)
    )
    # Each query row carries an equal share of its episode's rows: the sum over a task is then
    # right, of however many episodes it has.
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
    if context.items is not None:
        assert prediction.users_ND is not None
        assert episodes.query_known is not None
        known = episodes.query_known[0].numpy(), episodes.query_known[1].numpy()
        item_N = episodes.query_item_N.numpy()
        places = [
            context.items.rank_N2(user_ND.cpu().float(), item_N, known)
            for user_ND in prediction.users_ND
        ]
        of_rows = np.concatenate(places, axis=1)
        of_rows[columns["label"] <= 0] = -1  # only positive rows are ranked
        columns |= dict(zip(PLACES, of_rows.T, strict=True))
    elif sampled_N.size:
        (judged,) = (label for label in labels if label.is_judged)
        scores = judged.prediction_N(before_NL), judged.prediction_N(after_NL)
        places = [rank_among_candidates_N2(score_N, sampled_N) for score_N in scores]
        columns |= dict(zip(PLACES, np.concatenate(places, axis=1).T, strict=True))
    return columns
