"""Assigns rows to splits: by a column, by the hash of their task, or by windows of time.

Shape suffixes: N rows, V values"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import DataError
from metaio.format.names import check_split_name
from metaio.hashing import UInt64, splitmix64, unit_interval
from metaio.prepare.schema.rules import DEFAULT_VALIDATION_SHARE, GATE, VALIDATION, VALIDATION_ITEMS
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.side_columns import QUERY, SUPPORT, UNDECIDED
from metaio.prepare.schema.values import (
    hash_values,
    infer_kind,
    parse_time,
    to_int64,
    to_time_ticks,
)
from metaio.ragged import Int64

# The column with a row's place in the input, for engines that do not keep its order.
PLACE = "place in the input"

# Independent hashes: tasks drawn for one purpose must not be the same for another.
_SPLIT_SALT, _VALIDATION_SALT = np.uint64(0x5EED), np.uint64(0x7A11D)
_ITEM_SALT = np.uint64(0x17E3)
_BINS = 1 << 16

# How a split's tasks become episodes: by [episodes]; by given sides; by sides of windows, tasks
# without support by [episodes] or left out; or only these tasks, by [episodes].
Cutting = Literal["rule", "given", "window or rule", "window", "new"]


@dataclass(frozen=True)
class Splits:
    """The splits of a dataset, and where each window of time after the first begins."""

    names: tuple[str, ...] = ("train",)
    window_starts: tuple[int, ...] = ()

    @property
    def num_windows(self) -> int:
        """Return the number of windows, 1 without [splits] by_time."""
        return 1 + len(self.window_starts)

    def choose_cutting(self, schema: Schema, split: int) -> Cutting:
        """Return how the tasks of a split become episodes."""
        if schema.membership is not None:
            return "given"
        if schema.stream is not None:
            return "window or rule"
        if not self.window_starts or split == 0:
            return "rule"
        if split >= self.num_windows:
            return "new"
        return "window" if schema.splits.new_tasks in ("apart", "drop") else "window or rule"


def list_split_names(schema: Schema, found: list[str] | None = None) -> tuple[str, ...]:
    """Return the splits in the order of the manifest; `found` are the values of a split column."""
    rule = schema.splits
    if schema.stream is not None:
        return (rule.train, GATE)
    names = [rule.train] if rule.column is None else found or []
    carved = [] if rule.validation_from is None else [VALIDATION]
    carved += [] if rule.validation_items is None else VALIDATION_ITEMS
    if rule.train not in names:
        raise DataError(
            f"the train split {rule.train} has no rows; the splits found are "
            f"{', '.join(sorted(names))}. Set splits.train to one of them"
        )
    if rule.validation_from is not None and rule.column is not None:
        for name in (rule.validation_from, *carved):
            if (name in names) != (name == rule.validation_from):
                raise DataError(
                    f"splits.validation_from moves rows of {rule.validation_from} to "
                    f"{' and '.join(carved)}, which are new, but column {rule.column} holds "
                    f"{', '.join(sorted(names))}. Correct it, or leave it out"
                )
    # The train split first, then by name: an order that no order of rows changes.
    columns = sorted(names, key=lambda name: (name != rule.train, name))
    ordered = list(rule.windows or rule.shares or columns)
    if rule.by_time is not None and rule.new_tasks == "apart":
        ordered += [f"{name}-cold" for name in rule.windows[1:]]
    ordered += carved
    # Checked before anything is written: names become folders, and a log may hold any text.
    for name in ordered:
        check_split_name(name)
        if ordered.count(name) > 1:
            raise DataError(f"two splits would be called {name}. Rename one under [splits]")
    return tuple(ordered)


def assign_splits(
    schema: Schema, splits: Splits, batch: pa.RecordBatch, task_hash: UInt64
) -> Int64:
    """Return the index into `splits.names` of each row [N]: of windows, the one it falls into."""
    rule = schema.splits
    if rule.by_time is not None and schema.time is not None:
        times_N = to_time_ticks(schema.time.column, batch[schema.time.column])
        return np.searchsorted(np.array(splits.window_starts, np.int64), times_N, side="right")
    split_N = np.zeros(batch.num_rows, dtype=np.int64)
    shares = rule.shares
    if schema.stream is not None:
        shares = {rule.train: 1 - schema.stream.gate, GATE: schema.stream.gate}
    if shares is not None:
        # Without the last bound: rounding must not leave a task without a split.
        bounds = np.cumsum(np.array(list(shares.values()), np.float64))[:-1]
        # By the task's hash: all its rows get one split, in whatever file they are.
        unit = _hash_to_unit(task_hash ^ _SPLIT_SALT ^ np.uint64(schema.seed))
        split_N = np.searchsorted(bounds, unit, side="right")
    elif rule.column is not None:
        column = batch[rule.column].cast(pa.string())
        split_N = to_int64(pc.index_in(column, value_set=pa.array(splits.names)))
    if rule.validation_from is not None:
        split_N = _hold_back(schema, splits, batch, task_hash, split_N)
    return split_N


def _hold_back(
    schema: Schema, splits: Splits, batch: pa.RecordBatch, task_hash: UInt64, split_N: Int64
) -> Int64:
    """Return the splits of rows, after moving what validation holds back of one of them."""
    rule, place = schema.splits, splits.names.index
    is_dealt_N = split_N == place(str(rule.validation_from))
    unit_N = _hash_to_unit(task_hash ^ _VALIDATION_SALT ^ np.uint64(schema.seed))
    new_task_N = unit_N < (rule.validation_share or DEFAULT_VALIDATION_SHARE)
    is_held_back_N = np.where(new_task_N, place(VALIDATION), split_N)
    if rule.validation_items is not None and schema.item is not None:
        name = schema.item.column
        column = batch[name]
        known = column.drop_null()
        hash_V = splitmix64(hash_values(known, infer_kind(name, known.type, "sparse")))
        new_item_N = np.zeros(batch.num_rows, np.bool_)  # a row without an item has no new one
        new_item_N[column.is_valid().to_numpy(zero_copy_only=False)] = (
            _hash_to_unit(hash_V ^ _ITEM_SALT ^ np.uint64(schema.seed)) < rule.validation_items
        )
        of_known_task, of_new_task = map(place, VALIDATION_ITEMS)
        new_N = np.where(new_task_N, of_new_task, of_known_task)
        is_held_back_N = np.where(new_item_N, new_N, is_held_back_N)
    return np.where(is_dealt_N, is_held_back_N, split_N)


def _hash_to_unit(mixed: UInt64) -> npt.NDArray[np.floating[Any]]:
    return unit_interval(splitmix64(mixed))


def count_split_rows(splits: Splits, split_N: Int64) -> Counter[str]:
    """Return how many rows each split's buckets hold, rows of earlier windows included."""
    counts = np.bincount(split_N, minlength=len(splits.names))
    windows = splits.num_windows
    if windows > 1:
        # copy_to_windows repeats an earlier row in each later split that it may support.
        num_rows = np.cumsum(counts[:windows])[1:]
        counts[1:windows] = num_rows
        counts[windows:] = num_rows[: len(counts) - windows]
    return Counter(dict(zip(splits.names, counts.tolist(), strict=True)))


def copy_to_windows(splits: Splits, window_N: Int64) -> tuple[Int64, Int64, npt.NDArray[np.int8]]:
    """Return the rows that each split needs, with their split and side."""
    # A row is query in its own window, and may be support in all later ones.
    chosen, split = [np.flatnonzero(window_N == 0)], [0]
    sides = [np.full(len(chosen[0]), UNDECIDED, np.int8)]
    for index in range(1, len(splits.names)):
        window = index if index < splits.num_windows else index - splits.num_windows + 1
        own = np.flatnonzero(window_N <= window)
        chosen.append(own)
        split.append(index)
        sides.append(np.where(window_N[own] == window, QUERY, SUPPORT).astype(np.int8))
    split_N = np.repeat(np.array(split), [len(own) for own in chosen])
    return np.concatenate(chosen), split_N, np.concatenate(sides)


# Each pass counts the next 16 bits of the times. Counts of parts add up, so any engine may split
# the work, and memory stays the same.
class WindowSearch:
    """Finds where windows begin that hold given shares of the rows, exactly, in four passes."""

    def __init__(self, shares: Iterable[float]) -> None:
        cumulated: npt.NDArray[np.float64] = np.cumsum(np.array(list(shares), np.float64))
        self._cumulated = cumulated[:-1]
        self._prefixes = np.zeros(len(self._cumulated), dtype=np.uint64)
        self._ranks: Int64 | None = None
        self._shift = 48

    @property
    def is_done(self) -> bool:
        """Return whether `starts` are known."""
        return self._shift < 0

    def count(self, times_N: Int64) -> Int64:
        """Return how many times fall into each bin of this pass, for each wanted rank."""
        # Flipping the sign bit gives uint64 the order of int64.
        values_N = times_N.view(np.uint64) ^ np.uint64(1 << 63)
        # A radix search: each pass fixes 16 bits more of the time at each wanted rank.
        found = np.zeros((len(self._prefixes), _BINS), dtype=np.int64)
        for index, prefix in enumerate(self._prefixes):
            # The first pass takes all values: numpy cannot shift by 64 bits.
            above = np.uint64(self._shift + 16)
            own = values_N if self._shift == 48 else values_N[values_N >> above == prefix >> above]
            bins = (own >> np.uint64(self._shift)) & np.uint64(_BINS - 1)
            found[index] = np.bincount(bins.astype(np.int64), minlength=_BINS)
        return found

    def count_all(self, batches: Iterable[pa.RecordBatch], column: str) -> Int64:
        """Return the sum of `count` over the times of some batches; 0 without a batch."""
        counts = (self.count(to_time_ticks(column, batch[column])) for batch in batches)
        return sum(counts, start=np.zeros(1, np.int64))

    def narrow(self, counts: Int64) -> None:
        """Go on to the next 16 bits, given the sum of all counts of this pass."""
        if self._ranks is None:
            total = int(counts[0].sum())
            # Rounding must not turn 0.7 + 0.1 of ten rows into the seventh row.
            ranks = np.floor(self._cumulated * total + 1e-9).astype(np.int64)
            self._ranks = np.minimum(ranks, total - 1)
        for index, own in enumerate(counts):
            ends = np.cumsum(own)
            bin_ = int(np.searchsorted(ends, self._ranks[index], side="right"))
            self._ranks[index] -= int(ends[bin_ - 1]) if bin_ else 0
            self._prefixes[index] |= np.uint64(bin_) << np.uint64(self._shift)
        self._shift -= 16

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the times at which the windows after the first begin."""
        starts: list[int] = (self._prefixes ^ np.uint64(1 << 63)).view(np.int64).tolist()
        return tuple(starts)


def make_splits(
    schema: Schema,
    names: tuple[str, ...],
    types: dict[str, pa.DataType],
    count: Callable[[WindowSearch, str], Int64],
) -> Splits:
    """Return the splits with their windows in ticks; `count` counts all times for a search."""
    rule = schema.splits
    if schema.time is None or rule.by_time is None:
        return Splits(names)
    column = schema.time.column
    if rule.train in rule.by_time:
        search = WindowSearch(float(share) for share in rule.by_time.values())
        while not search.is_done:
            search.narrow(count(search, column))
        starts = search.starts
    else:
        starts = tuple(
            parse_time(value, types[column], f"splits.by_time.{name}")
            for name, value in rule.by_time.items()
        )
    for index, (before, after) in enumerate(pairwise(starts), start=1):
        if before >= after:
            first, then = rule.windows[index], rule.windows[index + 1]
            raise DataError(
                f"splits.by_time: window {then} does not begin after {first}, so that {first} is "
                "empty. Give later beginnings, or larger shares where many rows share a time"
            )
    return Splits(names, starts)
