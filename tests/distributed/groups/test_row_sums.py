"""Copies of rows get the sums of what all bring, the same bits everywhere, by the fewest messages,
which is what a plan says that they cost."""

from typing import Any

import numpy as np
import pytest
import torch

from gmeta.config.sharding import ShardingConfig
from gmeta.config.train_config import OuterConfig
from gmeta.distributed.groups.costs import TouchedCounts, bytes_between_groups
from gmeta.distributed.groups.row_sums import sum_rows
from gmeta.distributed.groups.row_union import RowUnion, UnionRequest
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.transport.narrow_transport import NarrowTransport
from tests.distributed.harness import on_ranks

RANKS, WIDTHS = 3, (4, 7)
DTYPES = {
    "float32": (None, 1e-5),
    "bfloat16": (torch.bfloat16, 0.1),
    "float16": (torch.float16, 0.01),
}


def rows_of(rank: int) -> list[np.ndarray]:
    """Distinct rows of two groups of tables, in no order; one rank has none of the second."""
    rng = np.random.default_rng(rank)
    first, second = rng.permutation(50)[:20], rng.permutation(9)[:5]
    return [first, second[: 0 if rank == 1 else 5]]


def values_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(rows.size, width, generator=generator)
        for rows, width in zip(rows_of(rank), WIDTHS, strict=True)
    ]


def sums(ranks: Ranks) -> dict[str, list[Any]]:
    found = {}
    for name, (dtype, _) in DTYPES.items():
        unions = UnionRequest(ranks.transport, rows_of(ranks.rank)).unions()
        wire = NarrowTransport(ranks.transport, dtype)
        totals = sum_rows(unions, values_of(ranks.rank), wire, 8.0)
        found[name] = [
            (one.row_U, one.num_U, total) for one, total in zip(unions, totals, strict=True)
        ]
    return found


@pytest.mark.distributed
def test_all_ranks_get_the_same_sums() -> None:
    results = on_ranks(RANKS, sums)
    for name, (_, tolerance) in DTYPES.items():
        for place, width in enumerate(WIDTHS):
            slow: dict[int, torch.Tensor] = {}
            num: dict[int, int] = {}
            for rank in range(RANKS):
                for row, values in zip(rows_of(rank)[place], values_of(rank)[place], strict=True):
                    slow[int(row)] = slow.get(int(row), torch.zeros(width)) + values
                    num[int(row)] = num.get(int(row), 0) + 1
            for result in results:
                row_U, num_U, total_UD = result[name][place]
                assert row_U.tolist() == sorted(slow)
                assert num_U.tolist() == [num[row] for row in sorted(slow)]
                expected = torch.stack([slow[row] for row in sorted(slow)])
                torch.testing.assert_close(total_UD, expected, rtol=0, atol=tolerance)
                assert torch.equal(total_UD, results[0][name][place][2])


@pytest.mark.parametrize("num_groups", [2, 3, 8])
def test_a_row_is_sent_once_to_be_added_and_once_to_be_known(num_groups: int) -> None:
    rng = np.random.default_rng(num_groups)
    rows_W = [np.flatnonzero(rng.random(1000) < 0.3) for _ in range(num_groups)]
    unions = [RowUnion.of(rows_W, own) for own in range(num_groups)]
    touched = np.zeros(1000, np.int64)
    for rows in rows_W:
        touched[rows] += 1
    fewest = int((touched[touched > 0] - 1 + num_groups - 1).sum())
    sent = sum(sum(map(len, one.send_W)) + (num_groups - 1) * len(one.summed) for one in unions)
    assert sent == fewest
    # Nobody adds up more than others, but for chance: no link carries more.
    added = [len(one.summed) for one in unions]
    assert max(added) < 1.4 * min(added)
    # The plan's figure, of groups of one rank.
    counts = TouchedCounts(
        {"t": float(np.mean([rows.size for rows in rows_W]))}, {"t": float((touched > 0).sum())}
    )
    told = bytes_between_groups(
        counts, {"t": (1000, 16)}, ShardingConfig(groups=num_groups), OuterConfig(), 1
    )
    id_bytes = (num_groups - 1) * sum(rows.size for rows in rows_W) * 4
    assert told * num_groups == pytest.approx(fewest * 16 * 4 + id_bytes)
