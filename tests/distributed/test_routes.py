"""Which rank is asked for which row: the vectorised bookkeeping against one id at a time."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gmeta.distributed.exchange.planning import LookupRequest, Routes, Shard

WIDTH = 8
TABLE_WISE, ROW_WISE, COLUMN_WISE = range(3)


def random_shards(rng: random.Random, num_tables: int, world_size: int) -> list[Shard]:
    """A plan: each table on one rank, its rows dealt out, or its columns."""
    shards = []
    for table in range(num_tables):
        num_rows, kind = rng.randint(1, 40), rng.choice((TABLE_WISE, ROW_WISE, COLUMN_WISE))
        if kind == TABLE_WISE:
            shards.append(Shard(kind, table, 0, WIDTH, 0, num_rows, rng.randrange(world_size)))
        elif kind == ROW_WISE:
            block = -(-num_rows // world_size)  # the last ranks may have no rows, as TorchRec's
            for rank in range(world_size):
                first = min(rank * block, num_rows)
                rows = min(block, num_rows - first)
                shards.append(Shard(kind, table, 0, WIDTH, first, rows, rank))
        else:
            half = WIDTH // 2
            shards += [
                Shard(kind, table, first, half, 0, num_rows, rng.randrange(world_size))
                for first in (0, half)
            ]
    return shards


def random_ids(rng: random.Random, shards: Sequence[Shard], table: int) -> list[int]:
    num_rows = max(s.first_row + s.num_rows for s in shards if s.table == table)
    return rng.sample(range(num_rows), rng.randint(0, num_rows))


def ask(routes: Routes, ids_B: list[list[int]]) -> LookupRequest:
    flat = [number for ids in ids_B for number in ids]
    lengths_B = torch.tensor([len(ids) for ids in ids_B], dtype=torch.int64)
    return routes.make_request(torch.tensor(flat, dtype=torch.int64), lengths_B)


def answered_ids(routes: Routes, asked: LookupRequest) -> list[tuple[Shard, list[int]]]:
    """What each shard is asked for, as rows of the whole table."""
    ends_Y = np.cumsum(asked.counts_Y)
    rows = asked.row_of_shard.tolist()
    return [
        (shard, [shard.first_row + row for row in rows[end - count : end]])
        for shard, count, end in zip(routes.shards, asked.counts_Y, ends_Y, strict=True)
    ]


def fetched_rows(
    routes: Routes, asked: LookupRequest, ids_B: list[list[int]]
) -> list[tuple[int, int]]:
    """(table, row): whole ones in the order of the wire, then those put together from parts."""
    answered = answered_ids(routes, asked)
    whole = [(s.table, row) for s, ids in answered if s.num_columns == WIDTH for row in ids]
    return whole + [(table, row) for table in routes.cut_tables for row in ids_B[table]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(12))
def test_every_shard_is_asked_for_its_own_ids(world_size: int, seed: int) -> None:
    rng = random.Random(seed)
    num_tables = rng.randint(1, 5)
    shards = random_shards(rng, num_tables, world_size)
    ids_B = [random_ids(rng, shards, table) for table in range(num_tables)]
    for rank in range(world_size):
        routes = Routes(shards, rank, world_size)
        answered = answered_ids(routes, ask(routes, ids_B))
        for shard, ids in answered:
            held = range(shard.first_row, shard.first_row + shard.num_rows)
            assert sorted(ids) == sorted(set(ids_B[shard.table]) & set(held))
        # Every id of a step is asked for once for each of its parts.
        assert sum(s.num_columns * len(ids) for s, ids in answered) == WIDTH * sum(map(len, ids_B))
        # Answers stand peer by peer, this rank's own last.
        ranks = [shard.rank for shard, _ in answered]
        others = [peer for peer in range(world_size) if peer != rank]
        assert ranks == sorted(ranks, key=[*others, rank].index)
        assert ranks.count(rank) == routes.num_local


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(12))
def test_places_lead_every_id_to_its_own_row(world_size: int, seed: int) -> None:
    rng = random.Random(100 + seed)
    num_tables = rng.randint(1, 5)
    shards = random_shards(rng, num_tables, world_size)
    ids_B = [random_ids(rng, shards, table) for table in range(num_tables)]
    for rank in range(world_size):
        routes = Routes(shards, rank, world_size)
        asked = ask(routes, ids_B)
        fetched = fetched_rows(routes, asked, ids_B)
        wanted = [(table, number) for table, ids in enumerate(ids_B) for number in ids]
        if asked.place_U is None or asked.id_U is None:
            assert fetched == wanted
            continue
        assert [fetched[place] for place in asked.place_U.tolist()] == wanted
        assert [wanted[index] for index in asked.id_U.tolist()] == fetched


def test_rows_of_small_shards_travel_as_half_as_many_bytes() -> None:
    small, large = (
        Routes([Shard(TABLE_WISE, 0, 0, WIDTH, 0, rows, 0)], 1, 2) for rows in (2**31 - 1, 2**31)
    )
    assert ask(small, [[0, 7]]).row_of_shard.dtype == torch.int32
    assert ask(large, [[0, 2**31 - 1]]).row_of_shard.tolist() == [0, 2**31 - 1]


def test_ids_that_do_not_travel_are_not_made_smaller() -> None:
    shards = [Shard(TABLE_WISE, 0, 0, WIDTH, 0, 9, 0)]
    ids_U = torch.tensor([0, 7])
    asked = Routes(shards, 0, 1).make_request(ids_U, torch.tensor([2]))
    assert asked.row_of_shard.data_ptr() == ids_U.data_ptr()


def test_a_step_without_ids_asks_for_nothing() -> None:
    shards = random_shards(random.Random(5), 3, 2)
    asked = ask(Routes(shards, 0, 2), [[], [], []])
    assert asked.counts_Y.sum() == 0
    assert asked.row_of_shard.numel() == 0
