"""Summarises a prepared dataset: episode sizes, use of ids and its skew; finds damaged files.

Shape suffixes: T tasks, N rows, F single-id or pooled features, V values, L labels, B tables, U
unique ids, R rows of tables"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from metaio.errors import DataError, FormatError
from metaio.format.block import Block
from metaio.format.dataset import Dataset, read_verified_file
from metaio.ragged import Int64

Progress = Callable[[int, int], None]  # blocks done, blocks in all

# Percentages of the ids in use, most used first, whose share of all uses is shown.
SKEW_PERCENT = (1, 10, 50)


@dataclass(frozen=True)
class TableUsage:
    """The use of one embedding table by a split; `uses_R` counts positions, single and multi."""

    name: str
    num_rows: int
    uses_R: Int64

    @property
    def num_used(self) -> int:
        """Return the number of distinct ids that occur."""
        return int(np.count_nonzero(self.uses_R))

    @property
    def unknown_share(self) -> float:
        """Return the share of uses that fell to row 0, the out-of-vocabulary row."""
        total = int(self.uses_R.sum())
        return float(self.uses_R[0] / total) if total else 0.0

    def top_share(self, percent: int) -> float:
        """Return the share of uses that the most used `percent` per cent of ids carry."""
        falling = np.sort(self.uses_R[self.uses_R > 0])[::-1]
        if not len(falling):
            return 0.0
        # One per cent of few ids would be none.
        count = max(1, round(len(falling) * percent / 100))
        return float(falling[:count].sum() / falling.sum())


class LabelUsage(NamedTuple):
    """One label: its mean over the rows where it is known, and their number."""

    name: str
    mean: float
    num_known: int


class EventUsage(NamedTuple):
    """The events of a split: how many each episode stores, and how many each row knows."""

    num_events_T: Int64
    known_N: Int64
    longest: int  # newest ones kept before each row; 0: all

    @property
    def cut_share(self) -> float:
        """Return the share of rows that know `longest` events or more: older ones may be cut."""
        if not (self.longest and len(self.known_N)):
            return 0.0
        return float((self.known_N >= self.longest).mean())


@dataclass(frozen=True)
class SplitSummary:
    """One split: its episodes' sizes, its labels and its use of each table."""

    name: str
    num_tasks: int
    support_T: Int64
    query_T: Int64
    labels: tuple[LabelUsage, ...]
    tables: tuple[TableUsage, ...]
    events: EventUsage | None = None  # None: the dataset stores none

    @property
    def num_rows(self) -> int:
        """Return the number of support and query rows."""
        return int(self.support_T.sum() + self.query_T.sum())


def summarise(dataset: Dataset, progress: Progress | None = None) -> list[SplitSummary]:
    """Return the summary of each split; reads every block once."""
    total = sum(split.num_blocks for split in dataset.splits.values())
    finished = itertools.count(1)

    def blocks(split: str) -> Iterator[Block]:
        for block in range(dataset.split(split).num_blocks):
            yield dataset.read_block(split, block)
            if progress is not None:
                progress(next(finished), total)

    return [_summarise_split(dataset, name, blocks(name)) for name in dataset.splits]


def _summarise_split(dataset: Dataset, name: str, blocks: Iterator[Block]) -> SplitSummary:
    tables = dataset.features.tables
    try:
        uses = [np.zeros(table.num_rows, dtype=np.int64) for table in tables]
    except MemoryError as error:
        largest = max(tables, key=lambda table: table.num_rows)
        raise DataError(
            f"{dataset.url}: table {largest.name} has {largest.num_rows:,} rows, and to count the "
            "use of each takes more memory than there is. Inspect it on a larger machine"
        ) from error
    tasks, support, query, events, known = ([np.zeros(0, np.int64)] for _ in range(5))
    names = dataset.features.labels or ("label",)
    sum_L, known_L = np.zeros(len(names)), np.zeros(len(names), np.int64)
    for block in blocks:
        tasks.append(block.task_T)
        support.append(block.support_lengths_T)
        query.append(np.diff(block.row_offsets_T1) - block.support_lengths_T)
        events.append(block.num_events_T)
        known.append(block.events_before_N.astype(np.int64))
        # In float64: a billion labels of 0 and 1 are more than float32 can count.
        label_NL = block.label_N.reshape(block.num_rows, -1)
        known_L += np.count_nonzero(~np.isnan(label_NL), axis=0)
        sum_L += np.nansum(label_NL, axis=0, dtype=np.float64)
        # Positions are counted per block and added to the ids once, not id by id.
        counts_U = np.bincount(block.positions_NF.ravel(), minlength=len(block.unique_ids_U))
        counts_U += np.bincount(block.multi_positions_V, minlength=len(block.unique_ids_U))
        for table, used_R in enumerate(uses):
            own = slice(block.unique_offsets_B1[table], block.unique_offsets_B1[table + 1])
            # np.add.at, not indexing: with bundles an id stands several times.
            np.add.at(used_R, block.unique_ids_U[own], counts_U[own])
    means = (sum_L / np.maximum(known_L, 1)).tolist()
    labels = tuple(map(LabelUsage, names, means, known_L.tolist()))
    used = (TableUsage(t.name, t.num_rows, own_R) for t, own_R in zip(tables, uses, strict=True))
    num_tasks = len(np.unique(np.concatenate(tasks)))
    support_T, query_T = np.concatenate(support), np.concatenate(query)
    usage: EventUsage | None = None
    if dataset.features.events:
        longest = dataset.features.event_longest
        usage = EventUsage(np.concatenate(events), np.concatenate(known), longest)
    return SplitSummary(name, num_tasks, support_T, query_T, labels, tuple(used), usage)


def find_damage(
    dataset: Dataset, progress: Progress | None = None, known_problems: Sequence[str] = ()
) -> list[str]:
    """Return a message for each missing or altered file or column chunk, `known_problems` first."""
    found = list(known_problems)
    places = [
        (name, block) for name, split in dataset.splits.items() for block in range(split.num_blocks)
    ]
    for finished, (name, block) in enumerate(places, start=1):
        try:
            dataset.read_block(name, block)
        except FormatError as error:
            found.append(str(error))
        if progress is not None:
            progress(finished, len(places))
    # Our readers skip bytes outside footers and chunks, but other programs read complete files.
    for path, entry in dataset.files():
        if any(message.startswith(f"{dataset.url}/{path}") for message in found):
            continue
        try:
            read_verified_file(dataset, path, entry)
        except FormatError as error:
            found.append(str(error))
    # Every block of a missing file reports it: once is enough.
    return list(dict.fromkeys(found))
