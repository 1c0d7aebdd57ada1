"""Augmentation: what training changes about its batches, so that cold tasks and ids are no
surprise.

Shape suffixes: T tasks, N rows, F single-id or pooled features, V values, B tables, U unique
ids"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from gmeta.config.inputs import AugmentConfig
from gmeta.data.hash_rng import (
    ID_STREAM,
    SHARE_STREAM,
    draw_for_rows,
    draw_uniform,
    mix_key,
    reorder_rows,
)
from gmeta.data.row_groups import find_groups, order_groups
from metaio.format.block import merge_unknown_ids
from metaio.format.features import OOV_ROW, Features
from metaio.hashing import splitmix64
from metaio.ragged import find_firsts, offsets, owners
from metaio.read.batch import TaskBatch


# Every choice is a pure function of the seed and of its epoch, task and row, or step, table and id:
# the same at any number of ranks and after a resume. Evaluation sees the data as stored.
def augment_batches(
    batches: Iterable[TaskBatch],
    config: AugmentConfig,
    features: Features,
    seed: int,
    epoch: int,
    first_step: int,
) -> Iterator[TaskBatch]:
    """Return the augmented batches of an epoch's steps, from `first_step` on."""
    for step, batch in enumerate(batches, start=first_step):
        yield augment_batch(batch, config, features, seed, epoch, step)


def augment_batch(
    batch: TaskBatch, config: AugmentConfig, features: Features, seed: int, epoch: int, step: int
) -> TaskBatch:
    """Return the augmented batch of one step of an epoch."""
    if config.resplit_support:
        shares = config.min_support_share, config.max_support_share
        batch = resplit(batch, *shares, mix_key(seed, epoch), features.draws_negatives)
    if config.oov_dropout > 0.0:
        dropped_B = np.array(
            [not config.oov_tables or table.name in config.oov_tables for table in features.tables]
        )
        batch = drop_ids(batch, config.oov_dropout, dropped_B, mix_key(seed, epoch, step))
    return batch


def check_augment(config: AugmentConfig, features: Features) -> None:
    """Raise ValueError for shares the wrong way round, or a table that the dataset lacks."""
    if config.min_support_share > config.max_support_share > 0.0:
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


def resplit(
    batch: TaskBatch, min_share: float, max_share: float, key: int, in_groups: bool = False
) -> TaskBatch:
    """Return the batch with every episode's rows permuted, and a share of them, drawn uniformly
    from [min_share, max_share], as its support; max_share 0: as many of them as before;
    `in_groups`: groups of find_groups, kept whole."""
    # `key` and the task's id decide: an episode is split alike whatever it shares the batch with.
    # With two groups or more it keeps at least one on each side.
    rows_T, stored_T = np.diff(batch.row_offsets_T1.numpy()), batch.support_lengths_T.numpy()
    task_N = owners(rows_T)
    sizes = np.bincount(find_groups(batch)) if in_groups else np.ones_like(task_N)
    firsts = offsets(sizes)[:-1]
    tasks = task_N[firsts]
    groups_T = np.bincount(tasks, minlength=batch.num_tasks)
    task_T = splitmix64(batch.task_T.numpy().astype(np.uint64))
    share_T = min_share + (max_share - min_share) * draw_uniform(task_T, key, SHARE_STREAM)
    in_support_T = np.rint(share_T * groups_T).astype(np.int64)
    in_support_T = np.clip(in_support_T, 1, np.maximum(groups_T - 1, 1))
    if max_share == 0.0:
        was_support_N = find_firsts(rows_T, stored_T)
        in_support_T = np.bincount(tasks[was_support_N[firsts]], minlength=batch.num_tasks)

    draws = draw_for_rows(batch.task_T.numpy(), offsets(groups_T), key)
    order_N, support_T = order_groups(firsts, sizes, tasks, draws, in_support_T)
    # An episode of a single group has one side alone, and it stays what it was.
    support_T = np.where(groups_T > 1, support_T, stored_T)
    return reorder_rows(batch, order_N, support_T)


def drop_ids(
    batch: TaskBatch, rate: float, dropped_B: npt.NDArray[np.bool_], key: int
) -> TaskBatch:
    """Return the batch with each id of the chosen tables made the unknown id with chance `rate`."""
    table_U = owners(batch.unique_lengths_B.numpy())
    ids_U = batch.unique_ids_U.numpy()
    # Mixed before the table is added: id 7 of table 1 must not share the fate of id 8 of table 0.
    named_U = splitmix64(ids_U.astype(np.uint64)) + table_U.astype(np.uint64)
    is_oov_U = dropped_B[table_U] & (
        (draw_uniform(named_U, key, ID_STREAM) < rate) | (ids_U == OOV_ROW)
    )
    # All dropped ids of a table share its unknown id's position: no episode sees an id at two.
    kept_U, kept_B, position_U = merge_unknown_ids(ids_U, is_oov_U, table_U, len(dropped_B))
    return batch.with_ids(*map(torch.from_numpy, (kept_U, kept_B, position_U)))
