"""Converts stored blocks to plain rows, and rows to what blocks are built from.
Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, K
dense columns, U unique ids"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gmeta.evaluation.baselines import episode_rows
from metaio.format.block import Block, Rows, find_features_of_values
from metaio.format.dataset import Dataset
from metaio.format.features import Features
from metaio.ragged import Int64, offsets, owners, ragged_indices, sum_rows

# A row's older events are left out of its baselines' inputs.
NEWEST_EVENTS = 20


def read_rows(dataset: Dataset, split: str) -> Iterator[episode_rows.EpisodeRows]:
    """Yield the rows of a split, a stored block at a time."""
    for block in range(dataset.split(split).num_blocks):
        yield unpack_block(dataset.read_block(split, block), dataset.features)


def sample_rows(dataset: Dataset, split: str, max_rows: int, seed: int) -> episode_rows.EpisodeRows:
    """Return the episodes of a split, or a sample of tasks with about `max_rows` rows."""
    share = max_rows / max(dataset.split(split).num_rows, 1)

    def read_share(share: float) -> episode_rows.EpisodeRows:
        return episode_rows.concatenate_episodes(
            episode_rows.sample_share(rows, share, seed) for rows in read_rows(dataset, split)
        )

    return episode_rows.sample_until_some(read_share, share)


def unpack_block(block: Block, features: Features | None = None) -> episode_rows.EpisodeRows:
    """Return a decoded block's rows, with the ids themselves in place of positions; given the
    dataset's features, its events are told from the rows' lists."""
    lengths_NM = block.multi_lengths_NM
    num_multi = lengths_NM.shape[1] if features is None else len(features.multi)
    feature_V = find_features_of_values(lengths_NM)
    ids_V = block.unique_ids_U[block.multi_positions_V]
    columns = [ids_V[feature_V == index] for index in range(lengths_NM.shape[1])]
    rows = episode_rows.EpisodeRows(
        task_T=block.task_T,
        row_offsets_T1=block.row_offsets_T1,
        support_lengths_T=block.support_lengths_T,
        label_N=block.label_N.astype(np.float64),
        ids_NF=block.unique_ids_U[block.positions_NF],
        multi=tuple(
            episode_rows.IdLists(columns[index], offsets(lengths_NM[:, index]))
            for index in range(num_multi)
        ),
        dense_NK=block.dense_NK,
    )
    if features is None or not features.events:
        return rows
    before_N = block.events_before_N.astype(np.int64)
    most = min(NEWEST_EVENTS, features.event_longest or NEWEST_EVENTS)
    number_N = np.minimum(before_N, most)
    first_N = offsets(block.num_events_T)[rows.episode_N] + before_N - number_N
    known_V, offsets_N1 = ragged_indices(first_N, number_N), offsets(number_N)
    known = (episode_rows.IdLists(values[known_V], offsets_N1) for values in columns[num_multi:])
    return replace(rows, known_events=tuple(known))


def pack_rows(rows: episode_rows.EpisodeRows, row_id_N: Int64) -> Rows:
    """Return rows as a block is built from them, with these row ids, or none."""
    lengths_NM = np.zeros((rows.num_rows, len(rows.multi)), np.int32)
    row_V, feature_V, ids_V = [], [], []
    for feature, lists in enumerate(rows.multi):
        lengths_NM[:, feature] = np.diff(lists.offsets_N1)
        row_V.append(lists.row_V)
        feature_V.append(np.full(len(lists.ids_V), feature))
        ids_V.append(lists.ids_V)
    none = np.zeros(0, np.int64)
    # Row by row, feature by feature; the sort is stable, so lists keep their order.
    order_V = np.lexsort((np.concatenate([none, *feature_V]), np.concatenate([none, *row_V])))
    return Rows(
        task_T=rows.task_T,
        row_lengths_T=np.diff(rows.row_offsets_T1),
        support_lengths_T=rows.support_lengths_T,
        label_N=rows.label_N.astype(np.float32),
        dense_NK=rows.dense_NK,
        ids_NF=rows.ids_NF,
        multi_ids_V=np.concatenate([none, *ids_V])[order_V],
        multi_lengths_NM=lengths_NM,
        row_id_N=row_id_N,
    )


def add_event_lists(rows: Rows, ids_VM: Int64, num_events_T: Int64) -> Rows:
    """Return rows with their episodes' events, whose ids [events, columns] stand one episode after
    another, as lists of each first row."""
    first_T = offsets(rows.row_lengths_T)[:-1]
    lengths_NM = np.zeros((len(rows.label_N), ids_VM.shape[1]), np.int32)
    lengths_NM[first_T] = num_events_T[:, None]
    # Behind the row's own lists, column by column.
    place_V = np.repeat(offsets(sum_rows(rows.multi_lengths_NM))[first_T + 1], num_events_T)
    order_V = np.argsort(np.tile(owners(num_events_T), ids_VM.shape[1]), kind="stable")
    ids_V, places_V = ids_VM.T.ravel()[order_V], np.tile(place_V, ids_VM.shape[1])[order_V]
    return replace(
        rows,
        multi_ids_V=np.insert(rows.multi_ids_V, places_V, ids_V),
        multi_lengths_NM=np.concatenate([rows.multi_lengths_NM, lengths_NM], axis=1),
        num_events_T=num_events_T,
    )
