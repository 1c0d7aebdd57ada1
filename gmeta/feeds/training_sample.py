"""A bounded sample of the training split's episodes, for what is fitted to them at once."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from gmeta.data.features.regression import Regression
from gmeta.data.label_checks import check_labels
from gmeta.distributed.collective_errors import run_on_first
from gmeta.distributed.ranks import Ranks, broadcast_value
from gmeta.feeds.batch_request import BatchSettings
from metaio.format.dataset import Dataset
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose

MOST_ROWS = 500_000  # of support and query


def fit_to_sample(
    fit: Callable[[Iterable[TaskBatch]], Regression],
    settings: BatchSettings,
    dataset: Dataset,
    ranks: Ranks,
) -> Regression:
    """Return what rank 0 fits to the sample, on all ranks. Collective. Raises ConfigError: a loss
    does not take a label."""
    found: list[Regression] = []
    # By one rank for all: it is the same, to the bit, on any number of ranks.
    run_on_first(lambda: found.append(fit(_iterate_sample(settings, dataset))), ranks)
    (fitted,) = broadcast_value(found, ranks)
    return fitted


def _iterate_sample(settings: BatchSettings, dataset: Dataset) -> Iterator[TaskBatch]:
    split, num_rows = dataset.split(settings.split), 0
    random = np.random.default_rng(0)  # neighbours of a stream or a log by time are alike
    for block in random.permutation(split.num_blocks).tolist():
        stored = dataset.read_block(split.name, block)
        mixed_E = random.permutation(stored.num_episodes)
        rows_E = np.diff(stored.row_offsets_T1)[mixed_E]
        number = int(np.searchsorted(rows_E.cumsum(), MOST_ROWS - num_rows)) + 1
        batch = compose(dataset.features, [(stored, np.sort(mixed_E[:number]))])
        yield from check_labels([batch], settings.kinds, dataset, split.name)
        num_rows += int(rows_E[:number].sum())
        if num_rows >= MOST_ROWS:
            return
