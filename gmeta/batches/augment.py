"""What training changes about its batches so that cold tasks and cold ids hold no surprise.

Every choice is a pure function of the seed and of what it is about (epoch, task, row; step, table,
id), so it is the same at any number of ranks and after a resume. Evaluation sees the data as
stored.

Shape suffixes: T episodes, N rows, V ids of all multi-id features, B tables, U unique ids.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from gmeta.batches.config import AugmentConfig
from metaio.format.block import with_one_unknown
from metaio.format.features import OOV_ROW, Features
from metaio.hashing import UInt64, splitmix64, unit_interval
from metaio.ragged import Int64, offsets, owners, places, ragged_indices, row_sums
from metaio.read.batch import TaskBatch

# What keeps the random streams of different purposes apart.
_SHARE_STREAM, _ROW_STREAM, _ID_STREAM = 1, 2, 3


def augmented(
    batches: Iterable[TaskBatch],
    config: AugmentConfig,
    features: Features,
    seed: int,
    epoch: int,
    first_step: int,
) -> Iterator[TaskBatch]:
    """Return the batches of an epoch's steps from `first_step` on, as training takes them."""
    for step, batch in enumerate(batches, start=first_step):
        yield augmented_batch(batch, config, features, seed, epoch, step)


def augmented_batch(
    batch: TaskBatch, config: AugmentConfig, features: Features, seed: int, epoch: int, step: int
) -> TaskBatch:
    """Return the batch of one step of an epoch as training takes it."""
    if config.resplit_support:
        shares = config.min_support_share, config.max_support_share
        batch = resplit(batch, *shares, mixed_key(seed, epoch))
    if config.oov_dropout > 0.0:
        dropped_B = np.array(
            [not config.oov_tables or table.name in config.oov_tables for table in features.tables]
        )
        batch = drop_ids(batch, config.oov_dropout, dropped_B, mixed_key(seed, epoch, step))
    return batch


def check_augment(config: AugmentConfig, features: Features) -> None:
    """Raise ValueError for shares the wrong way round, or a table that the dataset lacks."""
    if config.min_support_share > config.max_support_share:
        raise ValueError(
            f"augment.min_support_share = {config.min_support_share} is above "
            f"augment.max_support_share = {config.max_support_share}: a share between them is "
            "drawn. Swap them"
        )
    known = [table.name for table in features.tables]
    for name in config.oov_tables:
        if name not in known:
            raise ValueError(
                f"augment.oov_tables names {name!r}, which is no table of the dataset: "
                f"it has {', '.join(known)}. Name some of them, or [] for all"
            )


def resplit(batch: TaskBatch, min_share: float, max_share: float, key: int) -> TaskBatch:
    """Permute the rows of every episode and draw how many of them come first, as its support.

    The share is uniform in [min_share, max_share]. An episode of two rows or more keeps at least
    one on each side; one of a single row stays as it is. `key` and the task's id decide, so an
    episode is split the same way whatever it shares the batch with.
    """
    rows_T = np.diff(batch.row_offsets_T1.numpy())
    task_T = splitmix64(batch.task_T.numpy().astype(np.uint64))
    share_T = min_share + (max_share - min_share) * _uniform(task_T, key, _SHARE_STREAM)
    support_T = np.clip(np.rint(share_T * rows_T).astype(np.int64), 1, np.maximum(rows_T - 1, 1))
    # Of a single row neither side can be given up; it stays what it was.
    support_T = np.where(rows_T > 1, support_T, batch.support_lengths_T.numpy())

    draw_N = row_draws(batch.task_T.numpy(), batch.row_offsets_T1.numpy(), key)
    order_N = np.lexsort((draw_N, owners(rows_T)))
    return rearranged(batch, order_N, support_T)


def row_draws(task_T: Int64, row_offsets_T1: Int64, key: int) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each row [N], by `key`, its task and its place in the episode:
    in the order of these numbers the rows of an episode are shuffled.
    """
    rows_T = np.diff(row_offsets_T1)
    within_N = places(rows_T)
    # Tasks are mixed before row numbers are added: row 1 of task 7 must not draw as row 0 of 8.
    names_N = np.repeat(splitmix64(task_T.astype(np.uint64)), rows_T) + within_N.astype(np.uint64)
    return _uniform(names_N, key, _ROW_STREAM)


def drop_ids(
    batch: TaskBatch, rate: float, dropped_B: npt.NDArray[np.bool_], key: int
) -> TaskBatch:
    """Make each id of the chosen tables the unknown id with chance `rate`, in the whole batch.

    `key`, the table and the id decide. All dropped ids of a table share one position with the
    unknown id, if the batch holds it, because an episode must not see an id at two positions.
    """
    table_U = owners(batch.unique_lengths_B.numpy())
    ids_U = batch.unique_ids_U.numpy()
    # Mixed before the table is added: id 7 of table 1 must not share the fate of id 8 of table 0.
    named_U = splitmix64(ids_U.astype(np.uint64)) + table_U.astype(np.uint64)
    is_oov_U = dropped_B[table_U] & (
        (_uniform(named_U, key, _ID_STREAM) < rate) | (ids_U == OOV_ROW)
    )
    kept_U, kept_B, position_U = with_one_unknown(ids_U, is_oov_U, table_U, len(dropped_B))
    return replace(
        batch,
        unique_ids_U=torch.from_numpy(kept_U),
        unique_lengths_B=torch.from_numpy(kept_B),
        positions_NF=torch.from_numpy(position_U[batch.positions_NF.numpy()]),
        multi_positions_V=torch.from_numpy(position_U[batch.multi_positions_V.numpy()]),
    )


def rearranged(batch: TaskBatch, order_N: Int64, support_T: Int64) -> TaskBatch:
    """Return the batch with these of its rows, in this order, which keeps every episode's rows
    together; so many of each episode's first ones are its support.
    """
    rows_T = np.diff(batch.row_offsets_T1.numpy())
    kept_T = np.bincount(owners(rows_T)[order_N], minlength=len(rows_T))
    values_N = row_sums(batch.multi_lengths_NM.numpy())
    order_V = ragged_indices(offsets(values_N)[order_N], values_N[order_N])
    rows = torch.from_numpy(order_N)
    return replace(
        batch,
        row_offsets_T1=torch.from_numpy(offsets(kept_T)),
        support_lengths_T=torch.from_numpy(support_T),
        label_N=batch.label_N[rows],
        dense_NK=batch.dense_NK[rows],
        positions_NF=batch.positions_NF[rows],
        multi_positions_V=batch.multi_positions_V[torch.from_numpy(order_V)],
        multi_lengths_NM=batch.multi_lengths_NM[rows],
        row_id_N=batch.row_id_N[rows] if batch.row_id_N.numel() else batch.row_id_N,
        weight_N=batch.weight_N[rows] if batch.weight_N.numel() else batch.weight_N,
    )


def _uniform(names: UInt64, key: int, stream: int) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each name: its hash under the key."""
    return unit_interval(splitmix64(names ^ splitmix64(np.uint64(mixed_key(key, stream)))))


def mixed_key(*parts: int) -> int:
    """Return one number of 64 bits, mixed of several."""
    mixed = np.zeros(1, dtype=np.uint64)
    for part in parts:
        mixed = splitmix64(mixed + np.uint64(part % 2**64))
    return int(mixed[0])
