"""Episodes of any shape in memory, for benchmarks of the training step: no files, no reader."""

from collections.abc import Sequence

import torch

from metaio.format.features import Features, FeatureSpec, TableSpec
from metaio.read.batch import TaskBatch

# A prime: it spreads the frequent ids over the whole table.
SPREAD = 1_000_003

# F single-id features, T tasks, R rows of a task (support and query), U unique ids


def single_id_features(
    num_features: int, rows_per_table: int | Sequence[int], num_dense: int = 0
) -> Features:
    """One table a feature, all of one size or each of its own."""
    names = [f"f{index}" for index in range(num_features)]
    rows = [rows_per_table] * num_features if isinstance(rows_per_table, int) else rows_per_table
    return Features(
        tables=tuple(TableSpec(name, size) for name, size in zip(names, rows, strict=True)),
        single=tuple(FeatureSpec(name, name) for name in names),
        multi=(),
        dense=tuple(f"d{index}" for index in range(num_dense)),
    )


def random_batch(
    features: Features,
    support_lengths_T: torch.Tensor,
    query_lengths_T: torch.Tensor,
    seed: int,
    skew: float = 1.0,
) -> TaskBatch:
    """Ids spread over a table as after hashing; each table's ids are unique and sorted.

    With skew 1 every id is as frequent; above it the share s of the ids that are most frequent has
    the share s ** (1 / skew) of the rows."""
    generator = torch.Generator().manual_seed(seed)
    rows_T = support_lengths_T + query_lengths_T
    num_rows = int(rows_T.sum())
    unique_ids, lengths, positions, first = [], [], [], 0
    for table in features.tables:
        if skew == 1.0:
            ids_N = torch.randint(0, table.num_rows, (num_rows,), generator=generator)
        else:
            # The inverse of the distribution that the docstring gives.
            rank_N = (torch.rand(num_rows, generator=generator) ** skew * table.num_rows).long()
            ids_N = rank_N * SPREAD % table.num_rows
        unique, inverse = torch.unique(ids_N, return_inverse=True)
        unique_ids.append(unique)
        lengths.append(unique.numel())
        # Into the ids of all tables, one after the other.
        positions.append(inverse + first)
        first += unique.numel()
    return TaskBatch(
        task_T=torch.arange(rows_T.numel()),
        row_offsets_T1=torch.cat([torch.zeros(1, dtype=torch.int64), rows_T.cumsum(0)]),
        support_lengths_T=support_lengths_T,
        label_N=torch.randint(0, 2, (num_rows,), generator=generator).float(),
        dense_NK=torch.randn(num_rows, len(features.dense), generator=generator),
        unique_ids_U=torch.cat(unique_ids),
        unique_lengths_B=torch.tensor(lengths),
        positions_NF=torch.stack(positions, dim=1).to(torch.int32),
        multi_positions_V=torch.zeros(0, dtype=torch.int32),
        multi_lengths_NM=torch.zeros(num_rows, 0, dtype=torch.int32),
    )


def even_sizes(num_tasks: int, rows: int) -> torch.Tensor:
    """The same number of rows for every task: [T]."""
    return torch.full((num_tasks,), rows, dtype=torch.int64)


def ragged_sizes(num_tasks: int, rows: int, seed: int) -> torch.Tensor:
    """Between half and one and a half times `rows`, with the mean near `rows`: [T]."""
    generator = torch.Generator().manual_seed(seed)
    low, high = max(1, rows // 2), rows + rows // 2
    return torch.randint(low, high + 1, (num_tasks,), generator=generator)
