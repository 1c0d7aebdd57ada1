"""Memory that is given out again: what nobody can see any more, and no more than said."""

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch

from metaio import BatchReader, open_dataset
from metaio.read.array_pool import ArrayPool
from metaio.read.compose import compose
from tests.metaio.conftest import WriteFn, make_rows


def address(array: np.ndarray) -> int:
    """Where an array begins."""
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.float32])
@pytest.mark.parametrize("shape", [(7,), (0,), (5, 2), (0, 3), (4, 0)])
def test_arrays_have_the_shape_and_type_asked_for(shape: tuple[int, ...], kind: Any) -> None:
    array = ArrayPool(1).allocate("column", shape, kind)
    assert (array.shape, array.dtype) == (shape, kind)
    assert array.flags.writeable


@pytest.mark.parametrize(
    "view", ["array", "slice", "other type", "tensor", "part of a tensor", "array of a tensor"]
)
def test_memory_is_used_again_once_its_last_view_is_gone(view: str) -> None:
    memory = ArrayPool(2)
    first = memory.allocate("column", (1_000,), np.int64)
    begin = address(first)
    held = {
        "array": first,
        "slice": first[5:],
        "other type": first.view(np.float64).reshape(10, 100)[1:],
        "tensor": torch.from_numpy(first),
        "part of a tensor": torch.from_numpy(first)[3:].reshape(-1)[:9],
        "array of a tensor": torch.from_numpy(first).view(torch.int32).numpy()[4:],
    }[view]
    del first
    gc.collect()
    assert address(memory.allocate("column", (1_000,), np.int64)) != begin
    del held
    gc.collect()
    assert begin in {address(memory.allocate("column", (990,), np.int64)) for _ in range(2)}


def test_what_is_too_small_or_of_another_name_is_not_used() -> None:
    memory = ArrayPool(1)
    begin = address(memory.allocate("column", (100,), np.int64))
    held = (
        memory.allocate("other", (100,), np.int64),
        memory.allocate("column", (10_000,), np.int64),
    )
    assert begin not in map(address, held)


def test_what_was_given_back_last_is_used_first() -> None:
    memory = ArrayPool(2)
    first, second = (memory.allocate("column", (1_000,), np.int64) for _ in range(2))
    begins = [address(second), address(first)]
    del first
    gc.collect()
    del second
    gc.collect()
    held = [memory.allocate("column", (1_000,), np.int64) for _ in range(2)]
    assert [address(array) for array in held] == begins


def test_no_more_pieces_are_kept_than_said() -> None:
    memory = ArrayPool(3)
    arrays = [memory.allocate("column", (1_000,), np.int64) for _ in range(10)]
    begins = set(map(address, arrays))
    del arrays
    gc.collect()
    assert len(memory._free["column"]) == 3
    assert {address(piece) for piece in memory._free["column"]} < begins


def test_whoever_holds_an_array_never_sees_the_values_of_another() -> None:
    memory, draw = ArrayPool(4), random.Random(5)
    held: dict[int, tuple[np.ndarray, torch.Tensor]] = {}
    for number in range(2_000):
        size = draw.choice([0, 1, 100, 5_000])
        array = memory.allocate("column", (size,), np.int64)
        other = memory.allocate("other", (size // 2, 2), np.int32)
        array[:], other[:] = number, -number
        held[number] = (array, torch.from_numpy(other))
        del array, other
        for gone in draw.sample(sorted(held), len(held) - draw.randint(0, min(6, len(held)))):
            del held[gone]
        for own, (values, tensor) in held.items():
            assert (values == own).all()
            assert bool((tensor == -own).all())


@pytest.mark.parametrize("bundle_tasks", [0, 4])
@pytest.mark.parametrize("threads", [1, 2])
def test_batches_that_are_kept_stay_alike(write: WriteFn, bundle_tasks: int, threads: int) -> None:
    path = write({"train": make_rows(200)}, bundle_tasks=bundle_tasks, block_rows=100)
    dataset = open_dataset(path)
    with BatchReader(dataset, "train", tasks_per_step=8, threads=threads) as reader:
        order = reader._order(0)
        # Every third one is kept: memory is given out again meanwhile.
        kept = {step: b for step, b in enumerate(reader.batches(0)) if step % 3 == 0}
    assert len(kept) > 5
    for step, batch in kept.items():
        parts = [(dataset.read_block("train", p.block), p.episodes) for p in order.step(step)]
        for name, wanted in vars(compose(dataset.features, parts)).items():
            assert torch.equal(getattr(batch, name), wanted), name
