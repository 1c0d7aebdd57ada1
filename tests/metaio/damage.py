"""Damages a dataset at random and reads it whole: a reader may refuse it, or read correctly."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from metaio import BatchReader, MetaIOError, TaskBatch, open_dataset
from metaio.format.dataset import Dataset


def whole_content(dataset: Dataset) -> bytes:
    """Every tensor of every split in stored order, as bytes."""
    return b"".join(
        tensor.numpy().tobytes() for batch in _batches(dataset) for tensor in vars(batch).values()
    )


def _batches(dataset: Dataset) -> Iterator[TaskBatch]:
    for split in dataset.splits:
        with BatchReader(dataset, split, tasks_per_step=50, shuffle=False) as reader:
            yield from reader.batches(0)


def damage_and_read(path: Path, num_trials: int, seed: int) -> dict[str, int]:
    """Counts of `refused` and `read` after each of `num_trials` truncations and bit flips.

    Raises:
        AssertionError: rows came back wrong. Any other error than MetaIOError passes through."""
    rng = np.random.default_rng(seed)
    intact = whole_content(open_dataset(str(path)))
    copy = path.with_name(f"{path.name}-damaged")
    shutil.copytree(path, copy)
    files = sorted(file for file in copy.rglob("*") if file.is_file())
    counts = {"refused": 0, "read": 0}
    for _ in range(num_trials):
        file = files[rng.integers(len(files))]
        original = file.read_bytes()
        file.write_bytes(_damaged(rng, original))
        try:
            if whole_content(open_dataset(str(copy))) != intact:
                raise AssertionError(f"{file} was damaged and gave other rows")
            counts["read"] += 1
        except MetaIOError as error:
            counts["refused"] += 1
            if not str(error).startswith(str(copy)):
                raise AssertionError(f"the message does not name a file: {error}") from error
        file.write_bytes(original)
    return counts


def _damaged(rng: np.random.Generator, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return data[: rng.integers(len(data))]
    changed = bytearray(data)
    for at in rng.integers(len(data), size=rng.integers(1, 4)):
        changed[at] ^= 1 << rng.integers(8)
    return bytes(changed)
