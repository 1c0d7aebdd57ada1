"""The reader against the rows written, at any batch size, order, number of ranks and threads."""

import dataclasses
import itertools
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from metaio import (
    BatchReader,
    BlockEpisodes,
    Dataset,
    EpisodeRange,
    FormatError,
    TaskBatch,
    open_dataset,
    read_ranges,
)
from metaio.format.block import Block
from metaio.read.pipeline import BatchPipeline, Plan
from tests.metaio.conftest import (
    FEATURES,
    Episode,
    WriteFn,
    episodes_of_batch,
    episodes_of_rows,
    make_rows,
)
from tests.metaio.read.test_order import mix
from tests.support.refusals import catch_message
from tests.support.waiting import PATIENCE_S


def test_stored_order_gives_back_exactly_the_rows_written(write: WriteFn) -> None:
    rows = make_rows(60)
    dataset = open_dataset(write({"train": rows}, block_rows=50, shard_blocks=3))
    with BatchReader(dataset, "train", tasks_per_step=7, shuffle=False) as reader:
        read = [episode for batch in reader.batches(0) for episode in episodes_of_batch(batch)]
    assert read == episodes_of_rows(rows)


@pytest.mark.parametrize("bundle_tasks", [0, 4])
def test_every_epoch_holds_every_episode_once(write: WriteFn, bundle_tasks: int) -> None:
    rows = make_rows(90)
    path = write({"train": rows}, bundle_tasks=bundle_tasks, block_rows=80, shard_blocks=2)
    dataset, written = open_dataset(path), episodes_of_rows(rows)
    for lanes, world_size in [(1, 1), (1, 3), (4, 2), (4, 4)]:
        for window_blocks, threads in itertools.product([1, 2, None], [1, 3]):
            read = read_by_ranks(dataset, lanes, world_size, window_blocks, threads)
            case = f"{lanes} lanes, {world_size} ranks, {window_blocks=}, {threads=}"
            assert sorted(read, key=lambda episode: episode[0]) == written, case


def read_by_ranks(
    dataset: Dataset, lanes: int, world_size: int, window_blocks: int | None, threads: int
) -> list[Episode]:
    """What all ranks together read in an epoch."""
    read = []
    for rank in range(world_size):
        with BatchReader(
            dataset,
            "train",
            tasks_per_step=8,
            rank=rank,
            world_size=world_size,
            seed=3,
            lanes=lanes,
            window_blocks=window_blocks,
            threads=threads,
        ) as reader:
            read += [episode for batch in reader.batches(1) for episode in episodes_of_batch(batch)]
    return read


@pytest.mark.parametrize("bundle_tasks", [0, 3])
def test_an_id_has_one_position_within_an_episode(write: WriteFn, bundle_tasks: int) -> None:
    path = write({"train": make_rows(80)}, bundle_tasks=bundle_tasks, block_rows=60)
    dataset = open_dataset(path)
    with BatchReader(dataset, "train", tasks_per_step=16, seed=1) as reader:
        for batch in reader.batches(0):
            assert int(batch.unique_lengths_B.sum()) == batch.unique_ids_U.numel()
            bounds = [0, *batch.unique_lengths_B.cumsum(0).tolist()]
            for at in range(batch.num_tasks):
                rows = slice(int(batch.row_offsets_T1[at]), int(batch.row_offsets_T1[at + 1]))
                positions = set(batch.positions_NF[rows].flatten().tolist())
                for first, stop in itertools.pairwise(bounds):
                    used = [p for p in positions if first <= p < stop]
                    assert len({int(batch.unique_ids_U[p]) for p in used}) == len(used)


def test_a_rank_without_episodes_yields_empty_batches_of_full_shape(write: WriteFn) -> None:
    dataset = open_dataset(write({"train": make_rows(9)}))
    batches = []
    for rank in range(4):
        with BatchReader(dataset, "train", tasks_per_step=8, rank=rank, world_size=4) as reader:
            batches.append(list(reader.batches(0)))
    assert [len(own) for own in batches] == [2, 2, 2, 2]
    assert [own[1].num_tasks for own in batches] == [0, 0, 0, 1]
    assert batches[0][1].positions_NF.shape == (0, 3)
    assert batches[0][1].unique_lengths_B.tolist() == [0, 0, 0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_resumes_at_the_next_episode_at_any_size(write: WriteFn, world_size: int) -> None:
    dataset = open_dataset(write({"train": make_rows(50)}, block_rows=40))
    options = {"tasks_per_step": 6, "seed": 5, "lanes": 2, "window_blocks": 2}
    with BatchReader(dataset, "train", **options) as reader:
        whole = [set(batch.task_T.tolist()) for batch in reader.batches(2)]
        stream = reader.batches(2)
        for _ in range(3):
            next(stream)
        state = reader.state_dict()
        stream.close()
    resumed = [set() for _ in whole[3:]]
    for rank in range(world_size):
        with BatchReader(dataset, "train", rank=rank, world_size=world_size, **options) as reader:
            reader.load_state_dict(state)
            for tasks, batch in zip(resumed, reader.batches(), strict=True):
                tasks.update(batch.task_T.tolist())
            assert reader.state_dict()["epoch"] == 3
    assert resumed == whole[3:]


def test_prefetched_batches_are_read_before_they_are_asked_for(
    write: WriteFn, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset(write({"train": make_rows(50)}, block_rows=40))
    options = {"tasks_per_step": 6, "seed": 5}
    with BatchReader(dataset, "train", **options) as reader:
        whole = [[episodes_of_batch(batch) for batch in reader.batches(epoch)] for epoch in (0, 1)]
    read, read_block = threading.Event(), dataset.read_block

    def noted(split: str, block: int) -> Block:
        read.set()
        return read_block(split, block)

    monkeypatch.setattr(dataset, "read_block", noted)
    with BatchReader(dataset, "train", **options) as reader:
        reader.prefetch(0)
        assert read.wait(PATIENCE_S)
        assert reader.state_dict()["step"] == 0
        assert [episodes_of_batch(batch) for batch in reader.batches(0)] == whole[0]
        reader.prefetch(0)  # of another place than what comes next: without effect
        assert [episodes_of_batch(batch) for batch in reader.batches(1, 2)] == whole[1][2:]


def test_state_of_another_order_is_refused(write: WriteFn) -> None:
    dataset = open_dataset(write({"train": make_rows(5)}))
    with BatchReader(dataset, "train", tasks_per_step=2) as reader:
        state = reader.state_dict()
    with (
        BatchReader(dataset, "train", tasks_per_step=3) as reader,
        pytest.raises(FormatError) as caught,
    ):
        reader.load_state_dict(state)
    assert str(caught.value) == (
        "the reader's state has tasks_per_step 2, this reader has 3: the order of episodes would "
        "differ. Resume with the data and the settings of the run that was saved"
    )


def test_leased_ranges_come_in_the_order_given(write: WriteFn) -> None:
    rows = make_rows(40)
    dataset = open_dataset(write({"train": rows}, block_rows=20))
    ranges = [EpisodeRange("train", 30, 10), EpisodeRange("train", 0, 7)]
    batches = list(read_ranges(dataset, ranges, tasks_per_batch=4))
    assert [batch.num_tasks for batch in batches] == [4, 4, 2, 4, 3]
    read = [episode for batch in batches for episode in episodes_of_batch(batch)]
    written = episodes_of_rows(rows)
    assert read == written[30:40] + written[0:7]


def test_a_batch_that_is_a_whole_block_shares_its_memory(write: WriteFn) -> None:
    dataset = open_dataset(write({"train": make_rows(20)}))
    with BatchReader(dataset, "train", tasks_per_step=20) as reader:
        first, second = next(reader.batches(0)), next(reader.batches(1))
    assert first.positions_NF.data_ptr() == second.positions_NF.data_ptr()


@pytest.mark.parametrize("features", ["all", "no single", "no multi"])
@pytest.mark.parametrize(("blocks_per_step", "world_size"), [(1, 1), (3, 1), (3, 2), (4, 4)])
def test_whole_blocks_make_the_same_steps_on_any_world_size(
    write: WriteFn, blocks_per_step: int, world_size: int, features: str
) -> None:
    chosen = FEATURES
    if features != "all":
        kind = features.removeprefix("no ")
        chosen = dataclasses.replace(FEATURES, **{kind: ()})
    rows = make_rows(300, features=chosen, max_rows=30)
    dataset = open_dataset(write({"train": rows}, features=chosen, block_rows=200, shard_blocks=4))
    num_blocks = dataset.splits["train"].num_blocks
    steps = []
    for rank in range(world_size):
        with BatchReader(
            dataset,
            "train",
            tasks_per_step=8,
            rank=rank,
            world_size=world_size,
            seed=3,
            blocks_per_step=blocks_per_step,
            threads=2,
        ) as reader:
            assert reader.num_steps() == -(-num_blocks // blocks_per_step)
            steps.append([episodes_of_batch(batch) for batch in reader.batches(1)])
    read = [[episode for own in ranks for episode in own] for ranks in zip(*steps, strict=True)]
    written = episodes_of_rows(rows)
    offsets = dataset.splits["train"].episode_offsets.tolist()
    stored = [written[first:stop] for first, stop in itertools.pairwise(offsets)]
    # The definition: blocks in the order of their hash, so many a step.
    blocks = sorted(range(num_blocks), key=lambda block: mix(block ^ mix(mix(3) + 1)))
    assert read == [
        [episode for block in blocks[first : first + blocks_per_step] for episode in stored[block]]
        for first in range(0, num_blocks, blocks_per_step)
    ]


def test_a_small_budget_changes_the_memory_and_not_the_batches(write: WriteFn) -> None:
    dataset = open_dataset(write({"train": make_rows(60)}, block_rows=20))
    read = []
    for cache_bytes in (1, 1 << 30):
        with BatchReader(
            dataset, "train", tasks_per_step=8, cache_bytes=cache_bytes, threads=2
        ) as reader:
            read.append([episodes_of_batch(batch) for batch in reader.batches(0)])
    assert read[0] == read[1]


def test_pinning_happens_in_the_background(write: WriteFn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locked memory itself needs CUDA; who asks for it does not."""
    threads = []

    def pin(batch: TaskBatch) -> TaskBatch:
        threads.append(threading.current_thread())
        return batch

    monkeypatch.setattr(TaskBatch, "pin_memory", pin)
    dataset = open_dataset(write({"train": make_rows(20)}))
    with BatchReader(dataset, "train", tasks_per_step=5, pin_memory=True) as reader:
        assert len(list(reader.batches(0))) == len(threads) == 4
    assert threading.main_thread() not in threads


def one_block_plans(num_blocks: int) -> list[Plan]:
    return [[("train", BlockEpisodes(block, np.arange(1)))] for block in range(num_blocks)]


@pytest.mark.parametrize("look_ahead", [True, False])
def test_blocks_that_are_no_longer_needed_are_freed(
    write: WriteFn, monkeypatch: pytest.MonkeyPatch, look_ahead: bool
) -> None:
    dataset = open_dataset(write({"train": make_rows(400)}, block_rows=20))
    num_blocks = dataset.splits["train"].num_blocks
    read_block = dataset.read_block
    # Those of this reader: other tests' may be garbage that nobody has collected yet.
    alive: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()

    def noted(split: str, block: int) -> Block:
        alive[block] = found = read_block(split, block)
        return found

    monkeypatch.setattr(dataset, "read_block", noted)
    pipeline = BatchPipeline(dataset, threads=1, prefetch_batches=2, cache_bytes=1)
    counts = [len(alive) for _ in pipeline.run(one_block_plans(num_blocks), look_ahead)]
    pipeline.close()
    assert len(counts) == num_blocks > 100
    assert 1 <= max(counts) <= 8


def test_two_threads_read_blocks_at_once(write: WriteFn, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(write({"train": make_rows(60)}, block_rows=20))
    read, both = dataset.read_block, threading.Barrier(2, timeout=PATIENCE_S)

    def read_together(split: str, block: int) -> Block:
        both.wait()
        return read(split, block)

    monkeypatch.setattr(dataset, "read_block", read_together)
    pipeline = BatchPipeline(dataset, threads=2, prefetch_batches=2, cache_bytes=1)
    assert len(list(pipeline.run(one_block_plans(6)))) == 6
    pipeline.close()


def test_threads_that_read_one_shard_ask_for_its_footers_once(
    write: WriteFn, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset(write({"train": make_rows(60)}, block_rows=50))
    others = [threading.Thread(target=dataset.read_block, args=("train", 1)) for _ in range(2)]
    read_footers, asked = dataset._read_footers, 0

    def read_while_others_ask(*of_shard: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            for other in others:
                other.start()
            others[0].join(0.05)  # enough to ask too, were there nothing to wait for
        return read_footers(*of_shard)

    monkeypatch.setattr(dataset, "_read_footers", read_while_others_ask)
    dataset.read_block("train", 0)
    for other in others:
        other.join()
    assert asked == 1


def test_closing_while_blocks_load_is_quiet(
    write: WriteFn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = open_dataset(write({"train": make_rows(60)}, block_rows=20))
    read, reading, go_on = dataset.read_block, threading.Event(), threading.Event()

    def read_late(split: str, block: int) -> Block:
        reading.set()
        go_on.wait(PATIENCE_S)
        return read(split, block)

    monkeypatch.setattr(dataset, "read_block", read_late)
    pipeline = BatchPipeline(dataset, threads=1, prefetch_batches=4, cache_bytes=1 << 30)
    stream = pipeline.start(one_block_plans(6))
    assert reading.wait(PATIENCE_S)
    closing = threading.Thread(target=pipeline.close)
    closing.start()
    while not pipeline._pool._shutdown:
        time.sleep(0.001)
    go_on.set()
    closing.join(PATIENCE_S)
    with pytest.raises(RuntimeError, match="after shutdown"):
        next(stream)
    assert not closing.is_alive()
    assert caplog.records == []


def own_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Of readers, and begun since."""
    new = [thread for thread in threading.enumerate() if thread not in before]
    return [thread for thread in new if thread.name.startswith("metaio-")]


def test_abandoned_iterators_leave_no_threads(write: WriteFn) -> None:
    dataset = open_dataset(write({"train": make_rows(60)}, block_rows=20))
    before = set(threading.enumerate())  # other tests' may end meanwhile
    stream = read_ranges(dataset, [EpisodeRange("train", 0, 60)], tasks_per_batch=1, threads=2)
    next(stream)
    assert own_threads(before)
    del stream
    with BatchReader(dataset, "train", tasks_per_step=2, threads=2) as reader:
        next(reader.batches(0))
    assert own_threads(before) == []


def test_an_unknown_split_names_the_known_ones(write: WriteFn) -> None:
    path = write({"train": make_rows(2), "valid": make_rows(2)})
    assert catch_message(
        FormatError, BatchReader, open_dataset(path), "test", tasks_per_step=1
    ) == (f"{path} has no split test; it has train, valid. Choose one of them, or prepare it")
