"""Bundles: consecutive episodes of a block that keep ids of their own, so that steps are made of
them without looking a single position up.

Shape suffixes: T episodes, N rows, F single-id features, M multi-id features, V ids of all multi-id
features, B tables, U unique ids of all tables, G bundles; all of one block. P ids that a bundle
uses, T1 = T + 1, G1 = G + 1.
"""

import itertools
from dataclasses import replace

import numpy as np

from metaio.format.block import Block, Bundles, distinct_below, multi_feature_of_values, scratch
from metaio.format.features import Features
from metaio.ragged import Int32, Int64, offsets


def bundle_bounds(num_episodes: int, num_tasks: int) -> Int64:
    """Return the first episode of each bundle, then T [G1]; the last bundle may be smaller.

    >>> bundle_bounds(7, 3).tolist()
    [0, 3, 6, 7]
    """
    return np.append(np.arange(0, num_episodes, num_tasks), num_episodes)


def bundles_of(num_tasks: int, lengths_GB: Int64) -> Bundles:
    """Return the bundles of a block, given how many ids of each table they use.

    A block's ids stand table by table, and within a table bundle by bundle.
    """
    starts_BG = offsets(lengths_GB.T.ravel())[:-1].reshape(lengths_GB.T.shape)
    return Bundles(num_tasks, starts_BG.T, lengths_GB)


def bundled(block: Block, num_tasks: int) -> Block:
    """Return the block with ids of their own for every `num_tasks` episodes; as it is for 0.

    What each row holds stays the same. An id stands once for each bundle that uses it.
    """
    if not num_tasks:
        return block
    bounds_G1 = bundle_bounds(block.num_episodes, num_tasks)
    rows_G = _stretches(block.row_offsets_T1[bounds_G1])
    values_G = _stretches(block.value_offsets_T1[bounds_G1])
    used = [
        distinct_below(
            len(block.unique_ids_U), block.positions_NF[rows], block.multi_positions_V[values]
        )
        for rows, values in zip(rows_G, values_G, strict=True)
    ]
    lengths = [np.diff(np.searchsorted(used_P, block.unique_offsets_B1)) for used_P in used]
    lengths_GB = np.array(lengths, dtype=np.int64).reshape(-1, len(block.unique_offsets_B1) - 1)
    bundles = bundles_of(num_tasks, lengths_GB)
    ids_U = np.empty(lengths_GB.sum(), dtype=np.int64)
    positions_NF = np.empty_like(block.positions_NF)
    multi_V = np.empty_like(block.multi_positions_V)
    new_U = scratch(len(block.unique_ids_U))
    for index, used_P in enumerate(used):
        # Within a table its ids move by as much as the first of them.
        own_B, rows, values = lengths_GB[index], rows_G[index], values_G[index]
        new_P = np.arange(len(used_P)) + np.repeat(
            bundles.starts_GB[index] - offsets(own_B)[:-1], own_B
        )
        ids_U[new_P] = block.unique_ids_U[used_P]
        new_U[used_P] = new_P
        positions_NF[rows] = new_U[block.positions_NF[rows]]
        multi_V[values] = new_U[block.multi_positions_V[values]]
    return replace(
        block,
        positions_NF=positions_NF,
        multi_positions_V=multi_V,
        unique_ids_U=ids_U,
        unique_offsets_B1=offsets(lengths_GB.sum(axis=0)),
        bundles=bundles,
    )


def are_apart(features: Features, block: Block) -> bool:
    """Tell whether each position of a bundle is one of its own ids, in the feature's table; always
    true of a block without bundles.
    """
    if block.bundles is None:
        return True
    tables = [table.name for table in features.tables]
    table_F, table_M = (
        np.array([tables.index(feature.table) for feature in kind], dtype=np.int64)
        for kind in (features.single, features.multi)
    )
    bounds_G1 = bundle_bounds(block.num_episodes, block.bundles.num_tasks)
    rows_G = _stretches(block.row_offsets_T1[bounds_G1])
    values_G = _stretches(block.value_offsets_T1[bounds_G1])
    for index, (rows, values) in enumerate(zip(rows_G, values_G, strict=True)):
        starts_B = block.bundles.starts_GB[index].astype(np.int32)
        lengths_B = block.bundles.lengths_GB[index]
        table_V = table_M[multi_feature_of_values(block.multi_lengths_NM[rows])]
        for position, table in (
            (block.positions_NF[rows], table_F),
            (block.multi_positions_V[values], table_V),
        ):
            if not _are_within(position, starts_B[table], lengths_B[table]):
                return False
    return True


def _are_within(position: Int32, start: Int32, length: Int64) -> bool:
    # As an unsigned number, what lies before the start lies far behind the end.
    return bool(((position - start).view(np.uint32) < length.astype(np.uint32)).all())


def _stretches(offsets_G1: Int64) -> list[slice]:
    """Return where each bundle's rows (or values) stand."""
    bounds = offsets_G1.tolist()
    return [slice(first, stop) for first, stop in itertools.pairwise(bounds)]
