"""Reads the rows of a stored split, a block at a time, or some of its episodes."""

from collections.abc import Iterator

from gmeta.yardstick.rows import EpisodeRows, joined, rows_of, share_of, some_rows
from metaio.format.dataset import Dataset


def read_rows(dataset: Dataset, split: str) -> Iterator[EpisodeRows]:
    """Yield the rows of a split, a stored block at a time.

    Raises:
        FormatError: a file is missing or damaged.
    """
    for block in range(dataset.split(split).num_blocks):
        yield rows_of(dataset.read_block(split, block))


def sample_rows(dataset: Dataset, split: str, max_rows: int, seed: int) -> EpisodeRows:
    """Return whole episodes of a split: all if they have no more than `max_rows` rows, else about
    as many as that; the seed and a task's id decide which.

    Raises:
        FormatError: a file is missing or damaged.
    """
    share = max_rows / max(dataset.split(split).num_rows, 1)

    def drawn(share: float) -> EpisodeRows:
        return joined(share_of(rows, share, seed) for rows in read_rows(dataset, split))

    return some_rows(drawn, share)
