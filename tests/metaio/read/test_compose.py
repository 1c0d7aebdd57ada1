"""Batches of chosen episodes against the rows written, of blocks with and without bundles."""

import numpy as np
import pytest

from metaio.format.block import build_block, bundle_ids
from metaio.read.compose import compose
from tests.metaio.conftest import FEATURES, episodes_of_batch, episodes_of_rows, make_rows

NUM_EPISODES = 20
# Whole bundles of 4, cut ones, and both.
CHOICES = [
    [0, 1, 2, 3], [4, 5, 6, 7, 12, 13, 14, 15], [2, 3, 4, 5, 6, 7, 9],
    [1, 5, 6, 8, 9, 10, 11, 19], [0, 1, 2, 3, 5, 16, 17, 18, 19], list(range(NUM_EPISODES)), [],
]  # fmt: skip


@pytest.mark.parametrize("bundle_tasks", [0, 1, 4, 6])
@pytest.mark.parametrize("first", CHOICES)
@pytest.mark.parametrize("second", CHOICES)
def test_a_batch_holds_the_chosen_episodes_in_the_order_given(
    first: list[int], second: list[int], bundle_tasks: int
) -> None:
    rows = [make_rows(NUM_EPISODES, seed=seed) for seed in (0, 1)]
    parts = [
        (bundle_ids(build_block(FEATURES, own), bundle_tasks), np.array(chosen, dtype=np.int64))
        for own, chosen in zip(rows, (first, second), strict=True)
    ]
    written = [episodes_of_rows(own) for own in rows]
    wanted = [
        own[index] for own, chosen in zip(written, (first, second), strict=True) for index in chosen
    ]
    batch = compose(FEATURES, parts)
    assert episodes_of_batch(batch) == wanted
    # No id is looked up that no row holds.
    used = {*batch.positions_NF.flatten().tolist(), *batch.multi_positions_V.tolist()}
    assert used == set(range(int(batch.unique_lengths_B.sum())))
    assert len(batch.unique_ids_U) == len(used)
    for tensor in vars(batch).values():
        assert tensor.is_contiguous()


def test_whole_bundles_are_moved_and_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    block = bundle_ids(build_block(FEATURES, make_rows(NUM_EPISODES)), 4)
    wanted = episodes_of_batch(compose(FEATURES, [(block, np.arange(4, 12))]))

    def refuse(*_: object) -> None:
        raise AssertionError("an id was marked")

    monkeypatch.setattr("metaio.read.compose.find_distinct", refuse)
    assert episodes_of_batch(compose(FEATURES, [(block, np.arange(4, 12))])) == wanted
    with pytest.raises(AssertionError):
        compose(FEATURES, [(block, np.arange(4, 11))])
