"""Labels that a loss is not defined for are refused: ratings that are taken for clicks would train
to the end, and mean nothing.

Shape suffixes: N rows.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from gmeta.adaptation.losses import labels_taken_N
from gmeta.config import TrainConfig
from gmeta.errors import ConfigError
from metaio.format.dataset import Dataset
from metaio.read.batch import TaskBatch


def check_first_labels(config: TrainConfig, dataset: Dataset) -> None:
    """Check the first block of the training split: what is wrong with all labels is told before
    any rank starts or any folder is made. A launcher looks before it starts the job's own service,
    whose store lies in the run folder; rank 0 again, as nothing looked for torchrun's ranks, nor
    for a caller of train(). What only a later block shows is for `labels_checked`.

    Raises:
        ConfigError: a label is none that the loss takes.
        FormatError: the block is damaged.
    """
    split, loss = config.data.train_split, config.outer.loss
    label_N = dataset.read_block(split, 0).label_N
    wrong_N = label_N[~labels_taken_N(loss, label_N)]
    if wrong_N.size:
        raise ConfigError(
            f'outer.loss = "{loss}", but label column {dataset.label} of split {split} holds '
            f"{wrong_N[0]:g}: {_remedy(loss)}"
        )


def labels_checked(
    batches: Iterable[TaskBatch], loss: str, dataset: Dataset, split: str
) -> Iterator[TaskBatch]:
    """Yield the same batches, each checked before it is given out.

    Raises:
        ConfigError: a label is none that the loss takes; its row and task are named.
    """
    for batch in batches:
        taken_N = labels_taken_N(loss, batch.label_N.numpy())
        if not taken_N.all():
            row = int(np.argmin(taken_N))
            episode = int(torch.searchsorted(batch.row_offsets_T1, row, right=True)) - 1
            raise ConfigError(
                f'outer.loss = "{loss}", but row {row - int(batch.row_offsets_T1[episode])} of '
                f"task {int(batch.task_T[episode])} in split {split} has label "
                f"{batch.label_N[row].item():g} (column {dataset.label}): {_remedy(loss)}"
            )
        yield batch


def _remedy(loss: str) -> str:
    if loss == "bce":
        return (
            'bce takes 0 to 1. Set outer.loss = "mse" or "huber" for ratings, or give the label a '
            "threshold in the schema and prepare again"
        )
    return f"{loss} takes finite numbers. Mend the column and prepare again"
