"""Slices of equal cost against all slices that there are, and what a step of them holds."""

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from metaio import BatchReader, Dataset, FormatError, open_dataset
from metaio.ragged import Int32
from metaio.read.episode_lengths import EpisodeLengths
from metaio.read.episode_order import BlockEpisodes, EpisodeOrder, EpisodeSizes, OrderConfig
from metaio.read.equal_cost import TOLERANCE, TaskCost, cut_evenly
from tests.metaio.conftest import WriteFn, make_rows
from tests.support.waiting import PATIENCE_S

COST = TaskCost(2.0, 1.0)


def longest(costs: list[float], cuts: tuple[int, ...]) -> float:
    return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))


def shortest_longest(costs: list[float], world_size: int) -> float:
    """The least over all ways to cut."""
    all_cuts = itertools.combinations_with_replacement(range(len(costs) + 1), world_size - 1)
    return min(longest(costs, cuts) for cuts in all_cuts)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_no_other_slices_are_shorter(world_size: int) -> None:
    rng = np.random.default_rng(world_size)
    for num_episodes in (0, 1, 2, 7, 10):
        for _ in range(12):
            costs = rng.lognormal(0, 1.5, num_episodes)
            cuts = cut_evenly(costs, world_size).tolist()
            assert cuts == sorted(cuts)
            assert (cuts[0], cuts[-1], len(cuts)) == (0, num_episodes, world_size + 1)
            least = shortest_longest(costs.tolist(), world_size)
            found = longest(costs.tolist(), tuple(cuts[1:-1]))
            assert least - 1e-9 <= found <= least * (1 + TOLERANCE)


@pytest.mark.parametrize("cost", [0.0, 0.1, 3.0])
def test_equal_costs_give_the_numbers_of_equal_counts(cost: float) -> None:
    for num_episodes, world_size in itertools.product((0, 1, 5, 16, 1000), (1, 2, 3, 7, 64)):
        cuts = cut_evenly(np.full(num_episodes, cost), world_size)
        assert cuts.tolist() == [
            rank * num_episodes // world_size for rank in range(world_size + 1)
        ]


def test_a_long_episode_has_a_rank_to_itself() -> None:
    assert cut_evenly(np.array([1, 1, 100, 1, 1, 1]), 3).tolist() == [0, 2, 3, 6]


@pytest.fixture
def uneven(write: WriteFn) -> Dataset:
    """200 episodes of 1 to 40 rows in blocks of about 100 rows."""
    rows = make_rows(200, seed=5, max_rows=40)
    return open_dataset(write({"train": rows}, block_rows=100))


def rows_of_split(dataset: Dataset) -> list[int]:
    blocks = [dataset.read_block("train", at) for at in range(dataset.split("train").num_blocks)]
    return np.concatenate([np.diff(block.row_offsets_T1) for block in blocks]).tolist()


def steps_of(dataset: Dataset, world_size: int, **options: object) -> list[list[list[int]]]:
    """The tasks of each rank in each step."""
    found = []
    for rank in range(world_size):
        with BatchReader(
            dataset, "train", rank=rank, world_size=world_size, seed=3, **options,  # type: ignore[arg-type]
        ) as reader:  # fmt: skip
            found.append([batch.task_T.tolist() for batch in reader.batches(1)])
    return [list(step) for step in zip(*found, strict=True)]


@pytest.mark.parametrize("counted_in", [{"tasks_per_step": 24}, {"rows_per_step": 500}])
def test_a_step_holds_the_same_episodes_at_any_world_size(
    uneven: Dataset, counted_in: dict[str, int]
) -> None:
    options = {"tasks_per_step": 1, "window_blocks": 7, **counted_in}
    alone = [step for (step,) in steps_of(uneven, 1, **options)]
    assert sorted(itertools.chain(*alone)) == sorted(5000 + np.arange(200))
    for world_size in (2, 3, 4, 8):
        cut = steps_of(uneven, world_size, cost=COST, **options)
        assert [list(itertools.chain(*step)) for step in cut] == alone


def test_slices_of_a_step_are_the_shortest(uneven: Dataset) -> None:
    rows = rows_of_split(uneven)
    gained = 0
    for step in steps_of(uneven, 3, cost=COST, tasks_per_step=24):
        costs = [[2.0 + rows[task - 5000] for task in tasks] for tasks in step]
        of_step, size = list(itertools.chain(*costs)), sum(map(len, costs))
        found = max(map(sum, costs))
        assert found <= shortest_longest(of_step, 3) * (1 + TOLERANCE)
        gained += found < longest(of_step, (size // 3, 2 * size // 3))
    assert gained > 4


@pytest.mark.parametrize("bundle_tasks", [0, 4])
@pytest.mark.parametrize("window_blocks", [1, 3, 100])
@pytest.mark.parametrize("budget", [30, 100, 499, 10_000])
def test_steps_of_rows_follow_the_definition(
    budget: int, window_blocks: int, bundle_tasks: int
) -> None:
    """Steps divide the rows evenly; an episode is in the step where its first row falls, and counts
    for the budget where it has more rows."""
    rng = np.random.default_rng(budget)
    lengths = [5, 1, 7, 3, 0, 3, 8, 2, 6, 4]
    rows_of_block = [rng.integers(1, 60, length).astype(np.int32) for length in lengths]
    most = np.array([int(np.minimum(own, budget).sum()) for own in rows_of_block])
    sizes = EpisodeSizes(lambda blocks: [rows_of_block[at] for at in blocks], None, most)
    by_task = OrderConfig(1, 4, window_blocks=window_blocks)
    single = EpisodeOrder(lengths, by_task, 2, bundle_tasks)
    num_steps = max(1, int(most.sum()) // budget)
    expected: dict[int, list[tuple[int, int]]] = {}
    row = 0
    for step in range(single.num_steps):
        (part,) = single.step(step)
        expected.setdefault(row * num_steps // int(most.sum()), []).append(
            (part.block, int(part.episodes[0]))
        )
        row += min(int(rows_of_block[part.block][part.episodes[0]]), budget)
    by_rows = OrderConfig(1, 4, window_blocks=window_blocks, rows_per_step=budget)
    order = EpisodeOrder(lengths, by_rows, 2, bundle_tasks, sizes)
    found = [flat(order.step(step)) for step in range(order.num_steps)]
    assert list(expected) == list(range(num_steps))
    assert order.num_steps == num_steps
    assert found == [sorted(episodes) for episodes in expected.values()]


def flat(parts: list[BlockEpisodes]) -> list[tuple[int, int]]:
    return [(part.block, int(episode)) for part in parts for episode in part.episodes]


def test_rows_and_another_measure_of_a_step_are_refused() -> None:
    for other, value in {"blocks_per_step": 2, "lanes": 3}.items():
        with pytest.raises(ValueError) as caught:
            OrderConfig(9, rows_per_step=5, **{other: value})  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"rows_per_step is 5 and {other} is {value}: a step is counted in rows or in blocks, "
            "and in rows of one lane. Set one of them"
        )


@pytest.mark.parametrize("options", [{}, {"compact": True}], ids=["plain", "compact"])
def test_rows_are_read_from_one_column_of_any_blocks(
    write: WriteFn, options: dict[str, object]
) -> None:
    path = write({"train": make_rows(90, max_rows=30)}, block_rows=100, **options)
    dataset = open_dataset(path)
    for blocks in ([2, 0, 5], [], list(range(dataset.split("train").num_blocks))):
        read = dataset.read_num_rows("train", blocks)
        stored = [np.diff(dataset.read_block("train", at).row_offsets_T1) for at in blocks]
        assert list(map(list, read)) == list(map(list, stored))


def test_a_changed_number_of_rows_is_found(write: WriteFn) -> None:
    path = write({"train": make_rows(20, max_rows=30)})
    rows = open_dataset(path).read_num_rows("train", [0])[0]
    (file,) = Path(path).glob("train/*episodes.parquet")
    stored = file.read_bytes()
    assert stored.count(rows.tobytes()) == 1
    file.write_bytes(stored.replace(rows.tobytes(), (rows + 1).tobytes()))
    with pytest.raises(FormatError) as caught:
        open_dataset(path).read_num_rows("train", [0])
    assert str(caught.value).startswith(
        f"{file}, row group 0, column num_rows: the bytes differ from the checksum in the block "
    )


def test_what_is_read_in_the_background_is_read_once_or_says_why_not(
    uneven: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a remote dataset: one thread reads ahead, another needs its blocks."""
    rows, asked, began, goes_on = EpisodeLengths(uneven, "train"), [], Event(), Event()
    read = uneven.read_num_rows
    monkeypatch.setattr(Dataset, "is_local", False)

    def slow(self: Dataset, split: str, blocks: Sequence[int]) -> list[Int32]:
        asked.append(list(blocks))
        began.set()
        goes_on.wait(PATIENCE_S)
        if len(asked) == 2:
            raise FormatError("the disk is gone")
        return read(split, blocks)

    monkeypatch.setattr(Dataset, "read_num_rows", slow)
    with ThreadPoolExecutor(1) as pool:
        for first in (0, 3):
            began.clear(), goes_on.clear()
            rows.prefetch(range(first, first + 3))
            began.wait(PATIENCE_S)
            needed = pool.submit(rows.of_blocks, [first + 2, first])
            goes_on.set()
            found = [own_E.tolist() for own_E in needed.result()]
            assert found == [own_E.tolist() for own_E in read("train", [first + 2, first])]
    # Of the second the read ahead failed, so whoever needed the blocks read them.
    assert asked == [[0, 1, 2], [3, 4, 5], [5, 3]]


def test_no_more_rows_are_held_than_allowed(
    uneven: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metaio.read.episode_lengths.HELD_EPISODES", 30)
    rows, asked = EpisodeLengths(uneven, "train"), []
    read = Dataset.read_num_rows

    def noted(self: Dataset, split: str, blocks: Sequence[int]) -> list[Int32]:
        asked.extend(blocks)
        return read(self, split, blocks)

    monkeypatch.setattr(Dataset, "read_num_rows", noted)
    num_blocks = uneven.split("train").num_blocks
    for block in [*range(num_blocks), num_blocks - 1, 0]:
        rows.of_blocks([block])
    assert asked == [*range(num_blocks), 0]
