import itertools

import pytest

from gmeta.antdt.order import ShardOrder


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 16, 17, 99, 100, 101, 1000, 4097])
def test_every_shard_has_exactly_one_position(num_shards: int) -> None:
    order = ShardOrder(num_shards, seed=3, epoch=1, shuffle=True)
    indices = [order.index_of(position) for position in range(num_shards)]
    assert sorted(indices) == list(range(num_shards))
    assert [order.position_of(index) for index in indices] == list(range(num_shards))


def test_seed_and_epoch_each_give_another_order() -> None:
    orders = [
        tuple(map(ShardOrder(50, seed, epoch, True).index_of, range(50)))
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert len(set(orders)) == 3


def test_without_shuffle_the_order_is_that_of_storage() -> None:
    order = ShardOrder(10, seed=3, epoch=1, shuffle=False)
    assert [order.index_of(p) for p in range(10)] == list(range(10))


def test_the_order_named_feistel_v1_never_changes() -> None:
    order = ShardOrder(12, seed=7, epoch=2, shuffle=True)
    assert [order.index_of(p) for p in range(12)] == FROZEN_ORDER


def test_neighbouring_positions_lie_far_apart() -> None:
    """A permutation that only shifts would leave distances of 1; uniform ones average n/3."""
    order = ShardOrder(10_000, seed=5, epoch=0, shuffle=True)
    indices = [order.index_of(p) for p in range(10_000)]
    mean = sum(abs(a - b) for a, b in itertools.pairwise(indices)) / 9_999
    assert 3_000 < mean < 3_700


FROZEN_ORDER = [1, 7, 9, 4, 3, 5, 11, 6, 8, 2, 0, 10]
