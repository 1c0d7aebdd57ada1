"""The order of episodes against its definition, spelled out with lists."""

import itertools

import numpy as np
import pytest

from metaio.hashing import splitmix64
from metaio.read.episode_order import EpisodeOrder, OrderConfig

LENGTHS = [5, 1, 7, 3, 3, 8, 2, 6, 4]


def episodes_of(order: EpisodeOrder, step: int, rank: int = 0, world_size: int = 1) -> list[int]:
    starts = [0, *itertools.accumulate(LENGTHS)]
    parts = order.step(step, rank, world_size)
    return [starts[part.block] + int(episode) for part in parts for episode in part.episodes]


def mix(value: int) -> int:
    return int(splitmix64(np.uint64(value % 2**64)))


def slow_steps(config: OrderConfig, epoch: int, bundle_tasks: int = 1) -> list[list[int]]:
    """The definition: lanes of shuffled windows, dealt in rounds, cut into steps."""
    key = mix(mix(config.seed) + epoch)
    starts = [0, *itertools.accumulate(LENGTHS)]
    blocks = list(range(len(LENGTHS)))
    if config.shuffle:
        blocks.sort(key=lambda block: mix(block ^ key))
    lanes: list[list[int]] = []
    for lane in range(config.lanes):
        own, sequence = blocks[lane :: config.lanes], []
        for first in range(0, len(own), config.window_blocks):
            bundles = [
                [starts[block] + at for at in range(LENGTHS[block])][begin:][:bundle_tasks]
                for block in own[first : first + config.window_blocks]
                for begin in range(0, LENGTHS[block], bundle_tasks)
            ]
            if config.shuffle:
                bundles.sort(key=lambda bundle: mix(bundle[0] ^ key))
                # Those of fewer episodes come last, and as many as the last step lacks first.
                bundles.sort(key=lambda bundle: len(bundle) < bundle_tasks)
            window = [episode for bundle in bundles for episode in bundle]
            lacking = -len(sequence) % bundle_tasks if config.shuffle else 0
            for _ in range(lacking):
                window.insert(0, window.pop())
            sequence += window
        lanes.append(sequence)
    quotas = [
        config.tasks_per_step // config.lanes + (lane < config.tasks_per_step % config.lanes)
        for lane in range(config.lanes)
    ]
    dealt: list[tuple[int, int]] = []
    while any(lanes):
        for lane, quota in enumerate(quotas):
            dealt += [(lane, episode) for episode in lanes[lane][:quota]]
            lanes[lane] = lanes[lane][quota:]
    steps = []
    for first in range(0, len(dealt), config.tasks_per_step):
        step = dealt[first : first + config.tasks_per_step]
        ordered = sorted(step) if config.shuffle else sorted(step, key=lambda pair: pair[0])
        steps.append([episode for _, episode in ordered])
    if config.drop_last and len(steps[-1]) < config.tasks_per_step:
        steps.pop()
    return steps


@pytest.mark.parametrize("bundle_tasks", [0, 2, 3])
@pytest.mark.parametrize("window_blocks", [1, 2, 100])
@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
@pytest.mark.parametrize(("shuffle", "drop_last"), [(True, False), (True, True), (False, False)])
def test_steps_follow_the_definition(
    lanes: int, window_blocks: int, shuffle: bool, drop_last: bool, bundle_tasks: int
) -> None:
    for tasks_per_step in (4, 5, 11, 39, 100):
        config = OrderConfig(tasks_per_step, 7, shuffle, lanes, window_blocks, drop_last)
        order = EpisodeOrder(LENGTHS, config, epoch=2, bundle_tasks=bundle_tasks)
        found = [episodes_of(order, step) for step in range(order.num_steps)]
        assert found == slow_steps(config, epoch=2, bundle_tasks=bundle_tasks or 1)


def test_of_a_window_few_bundles_are_cut() -> None:
    """Though blocks end with bundles of fewer episodes, which would shift all that follow."""
    lengths, bundle_tasks = [67, 64, 33, 95, 128, 50, 64, 77], 8
    order = EpisodeOrder(lengths, OrderConfig(16, window_blocks=4), 0, bundle_tasks)
    cut: list[tuple[int, int]] = []
    for step in range(order.num_steps):
        for part in order.step(step):
            bundles, counts = np.unique(part.episodes // bundle_tasks, return_counts=True)
            sizes = np.minimum(bundle_tasks, lengths[part.block] - bundles * bundle_tasks)
            cut += [(part.block, int(bundle)) for bundle in bundles[counts < sizes]]
    # Of each of two windows its last step begins, and the next one ends, in the midst of a bundle.
    assert len(set(cut)) <= 4
    assert order.num_steps == -(-sum(lengths) // 16)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_a_step_is_the_same_at_any_world_size(world_size: int) -> None:
    order = EpisodeOrder(LENGTHS, OrderConfig(6, seed=1, lanes=2, window_blocks=2))
    for step in range(order.num_steps):
        slices = [episodes_of(order, step, rank, world_size) for rank in range(world_size)]
        assert list(itertools.chain(*slices)) == episodes_of(order, step)
        assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_with_a_lane_a_rank_no_two_ranks_read_the_same_block_until_a_lane_runs_out() -> None:
    lengths = [4] * 8
    order = EpisodeOrder(lengths, OrderConfig(4, lanes=4, window_blocks=1))
    read: list[set[int]] = [set() for _ in range(4)]
    for step, rank in itertools.product(range(order.num_steps), range(4)):
        read[rank] |= {part.block for part in order.step(step, rank, 4)}
    assert [len(blocks) for blocks in read] == [2, 2, 2, 2]
    assert len(set().union(*read)) == 8


def test_epochs_and_seeds_give_other_orders() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return episodes_of(EpisodeOrder(LENGTHS, OrderConfig(10, seed=seed), epoch), 0)

    assert first(0, 0) == first(0, 0)
    assert len({tuple(first(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_a_full_window_is_an_even_shuffle() -> None:
    # Each of 39 episodes is among the first 13 of an epoch a third of the time: 400 draws, 6 sigma.
    counts = np.zeros(sum(LENGTHS))
    for epoch in range(400):
        counts[episodes_of(EpisodeOrder(LENGTHS, OrderConfig(13), epoch), 0)] += 1
    assert np.abs(counts - 400 / 3).max() < 6 * np.sqrt(400 * 2 / 9)


def test_no_blocks_mean_no_steps() -> None:
    assert EpisodeOrder([], OrderConfig(4)).num_steps == 0
