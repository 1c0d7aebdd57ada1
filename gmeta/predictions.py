"""What a learner predicts of a split's query rows, all ranks together, by a view of its tasks."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torchrec.distributed import DistributedModelParallel

from gmeta.batches.episodes import Episodes, with_query_items
from gmeta.batches.labels import labels_checked
from gmeta.batches.views import STORED, View
from gmeta.config import TrainConfig
from gmeta.errors import UserError
from gmeta.feeds.reader import open_reader
from gmeta.parallel.ranks import Ranks, gather_to_first
from gmeta.parallel.sharding import ShardedLearner, local_learner
from gmeta.parallel.steps import in_step
from gmeta.parallel.stopping import Stop
from gmeta.parallel.together import no_tasks, raise_first_problem, stopping_if_wrong
from metaio.format.dataset import Dataset
from metaio.prepare.raw_ids import item_place
from metaio.read.batch import TaskBatch

Columns: TypeAlias = dict[str, npt.NDArray[Any]]


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
    after, row_id where the dataset stores it, and item (the row of its table) where its schema
    names one; before and after are probabilities for BCE,
    ratings for other losses.
    """
    with open_reader(config, dataset, split, ranks.rank, ranks.world_size) as reader:
        stop = Stop()
        stored = labels_checked(reader.batches(0), config.outer.loss, dataset, split)
        batches = map(view.of, stopping_if_wrong(stored, dataset.features, stop))
        columns = predict_all(batches, config, dataset, sharded, ranks, stop)
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


def predict_all(
    batches: Iterator[TaskBatch],
    config: TrainConfig,
    dataset: Dataset,
    sharded: DistributedModelParallel,
    ranks: Ranks,
    stop: Stop,
) -> list[Columns]:
    """Return the columns of each of this rank's batches, of the query rows alone. Collective."""
    learner = local_learner(sharded)
    item = item_place(dataset)

    def arrange(batch: TaskBatch) -> Episodes:
        episodes = learner.learner.arrange_to_predict(batch)
        return episodes if item is None else with_query_items(episodes, batch, item)

    idle = arrange(no_tasks(dataset.features))
    steps = in_step(map(arrange, batches), idle, ranks, stop, sharded)
    return [_predict(learner, episodes, config.outer.loss) for episodes, _ in steps]


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


def _predict(learner: ShardedLearner, episodes: Episodes, loss: str) -> Columns:
    prediction = learner.predict(episodes)
    query_T = prediction.layout.lengths_T.cpu()
    support_T = prediction.support_lengths_T.cpu().to(torch.int32)
    # The loss works on logits, a reader on probabilities.
    shown = torch.sigmoid if loss == "bce" else torch.clone
    row_id_N, item_N = episodes.query_row_id_N.numpy(), episodes.query_item_N.numpy()
    # Adds up to the rows of the task, also where several episodes are of one.
    share_T = (support_T + query_T) / query_T.clamp(min=1).double()
    return {
        "task": torch.repeat_interleave(episodes.task_T, query_T).numpy(),
        **({"row_id": row_id_N} if row_id_N.size else {}),
        **({"item": item_N} if item_N.size else {}),
        "task_rows": torch.repeat_interleave(share_T, query_T).numpy(),
        "support_rows": torch.repeat_interleave(support_T, query_T).numpy(),
        "label": prediction.label_N.cpu().numpy(),
        "before": shown(prediction.before_N).float().cpu().numpy(),
        "after": shown(prediction.after_N).float().cpu().numpy(),
    }
