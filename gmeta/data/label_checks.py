"""The labels of a dataset's rows: which of them predictions are scored by, and a check that refuses
those for which a loss is not defined.

Shape suffixes: T tasks, N rows, L labels"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gmeta.config.labels import LabelsConfig
from gmeta.errors import ConfigError
from gmeta.losses.row_losses import defined_labels_N
from gmeta.metrics.scored_label import ScoredLabel
from metaio.format.dataset import Dataset
from metaio.read.batch import TaskBatch


def scored_labels(config: LabelsConfig, dataset: Dataset) -> list[ScoredLabel]:
    """Return the labels that predictions are scored by, in the dataset's order, then those of the
    entire space, each given the label that it takes place among."""
    names = dataset.features.labels
    headline = config.judged_index(names)
    labels = [ScoredLabel(name, at == headline, at) for at, name in enumerate(names or ("",))]
    conditional = [
        ScoredLabel(f"{name}|{among}", False, names.index(name), names.index(among))
        for name, among in config.entire_space.items()
    ]
    return labels + conditional


def check_first_labels(split: str, kinds: Sequence[str], dataset: Dataset) -> None:
    """Check the training split's first block. Raises ConfigError: a loss does not take it."""
    # Ratings taken for clicks would train to the end, and mean nothing. A launcher calls this
    # before the job's service makes its store in the run folder, rank 0 again for torchrun and
    # callers of train(); `check_labels` sees the later blocks.
    label_N = dataset.read_block(split, 0).label_N
    defined_NL = _defined_NL(kinds, label_N, dataset)
    for at, loss in enumerate(kinds):
        wrong_N = label_N.reshape(defined_NL.shape)[~defined_NL[:, at], at]
        if wrong_N.size:
            raise ConfigError(
                f"{_describe_loss(loss, at, dataset)}, but label column {_column(at, dataset)} of "
                f"split {split} holds {wrong_N[0]:g}: {_remedy(loss)}"
            )


def check_labels(
    batches: Iterable[TaskBatch], kinds: Sequence[str], dataset: Dataset, split: str
) -> Iterator[TaskBatch]:
    """Yield the same batches, checked. Raises ConfigError: a loss does not take a row's label."""
    for batch in batches:
        defined_NL = _defined_NL(kinds, batch.label_N.numpy(), dataset)
        if not defined_NL.all():
            # argmin of truth values: the first label that is not defined.
            row, at = divmod(int(np.argmin(defined_NL)), len(kinds))
            episode = int(torch.searchsorted(batch.row_offsets_T1, row, right=True)) - 1
            raise ConfigError(
                f"{_describe_loss(kinds[at], at, dataset)}, but row "
                f"{row - int(batch.row_offsets_T1[episode])} of task {int(batch.task_T[episode])} "
                f"in split {split} has label {batch.label_N[row].flatten()[at].item():g} (column "
                f"{_column(at, dataset)}): {_remedy(kinds[at])}"
            )
        yield batch


def _defined_NL(
    kinds: Sequence[str], label_N: npt.NDArray[np.float32], dataset: Dataset
) -> npt.NDArray[np.bool_]:
    label_NL = label_N.reshape(len(label_N), len(kinds))
    columns = [defined_labels_N(kind, label_NL[:, at]) for at, kind in enumerate(kinds)]
    defined_NL = np.stack(columns, axis=1)
    # A label with a name may be NaN: it is not known for that row.
    return defined_NL | np.isnan(label_NL) if dataset.features.labels else defined_NL


def _describe_loss(loss: str, at: int, dataset: Dataset) -> str:
    names = dataset.features.labels
    return f'outer.loss = "{loss}"' if not names else f'the loss of label {names[at]} is "{loss}"'


def _column(at: int, dataset: Dataset) -> str:
    return dataset.label.split(", ")[at]


def _remedy(loss: str) -> str:
    if loss == "bce":
        return (
            'bce takes 0 to 1. Set outer.loss = "mse" or "huber" for ratings, or give the label a '
            "threshold in the schema and prepare again"
        )
    if loss == "softmax":
        return (
            "softmax takes numbers from 0 on, as it shares 1 among the rows of a task. Set "
            'outer.loss = "pairwise", or mend the column and prepare again'
        )
    return f"{loss} takes finite numbers. Mend the column and prepare again"
