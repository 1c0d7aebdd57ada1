"""Draws negatives for logs of positives alone: rows of items that a task does not have, label 0.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, V values, K dense
columns, A items"""

# Items come from a catalogue gathered while rows are encoded, so memory follows the number of
# items; negatives are drawn where a bucket's episodes are built, a portion at a time.
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from metaio.errors import DataError
from metaio.format.features import find_vector_column
from metaio.hashing import UInt64, splitmix64
from metaio.prepare.episodes.encoded_rows import (
    EncodedRows,
    concatenate_rows,
    find_value_starts,
    select_rows,
)
from metaio.prepare.episodes.ordered_map import should_merge
from metaio.prepare.schema.schema import IdColumn, Schema
from metaio.prepare.schema.values import hash_lists
from metaio.ragged import Int64, find_run_starts, offsets, ragged_indices

# If the task has the drawn item, draw again, so often at most; then take the next free item.
_ATTEMPTS = 32
# Independent of the hashes that draw splits and order rows.
_SALT = np.uint64(0x4E6)


@dataclass(frozen=True)
class ItemColumns:
    """The indexes of the item's columns among the features of each kind."""

    single: tuple[int, ...]
    multi: tuple[int, ...]
    dense: tuple[int, ...]


def find_item_columns(schema: Schema) -> ItemColumns:
    """Return the indexes of the columns that [negatives] names."""
    names = schema.negatives.features if schema.negatives else ()

    def places(columns: tuple[IdColumn, ...]) -> tuple[int, ...]:
        return tuple(index for index, column in enumerate(columns) if column.column in names)

    dense = (i for i, name in enumerate(schema.dense_names) if find_vector_column(name) in names)
    return ItemColumns(places(schema.single), places(schema.multi), tuple(dense))


@dataclass(frozen=True)
class Catalogue:
    """The items of a log in the order of their hash, with one row each, and their row counts."""

    rows: EncodedRows
    train_A: Int64  # rows of the train split
    all_A: Int64

    @property
    def item_A(self) -> UInt64:
        """Return the hash of each item."""
        hashes: UInt64 = self.rows.item_NI[:, 0]
        return hashes


class CatalogueBuilder:
    """Gathers the items of encoded rows; the order of rows does not matter."""

    def __init__(self, schema: Schema, train: int) -> None:
        self._schema = schema
        self._train = train  # index of the train split
        self._columns = find_item_columns(schema)
        self._parts: list[Catalogue] = []

    def add(self, part: Catalogue) -> None:
        """Add the items of other rows."""
        self._parts.append(part)
        # Merged now and then, so that memory follows the number of items.
        if should_merge([len(part.train_A) for part in self._parts]):
            self._parts = [self.build()]

    def build_from_rows(self, rows: EncodedRows) -> Catalogue:
        """Return the items of some rows."""
        in_train = (rows.split_N == self._train).astype(np.int64)
        return self._merge_items(rows, in_train, np.ones_like(in_train))

    def build(self) -> Catalogue:
        """Return all items added so far."""
        rows = concatenate_rows(self._schema, [part.rows for part in self._parts])
        none = np.zeros(0, np.int64)
        train = np.concatenate([none, *(part.train_A for part in self._parts)])
        every = np.concatenate([none, *(part.all_A for part in self._parts)])
        return self._merge_items(rows, train, every)

    def _merge_items(self, rows: EncodedRows, train_N: Int64, all_N: Int64) -> Catalogue:
        """Return one row an item."""
        item_N = rows.item_NI[:, 0]
        # If attributes of an item differ between rows, the row with their least hash wins, so that
        # the order of rows does not matter.
        order_N = np.lexsort((_hash_attributes(rows, self._columns), item_N))
        ordered = item_N[order_N]
        firsts = np.flatnonzero(find_run_starts(ordered))
        sums = (
            np.diff(offsets(counts[order_N])[np.append(firsts, len(ordered))])
            for counts in (train_N, all_N)
        )
        return Catalogue(select_rows(rows, order_N[firsts]), *sums)


def _hash_attributes(rows: EncodedRows, columns: ItemColumns) -> UInt64:
    """Return a hash of each row's item columns."""
    total_N = np.zeros(rows.num_rows, dtype=np.uint64)
    for index in columns.single:
        total_N = splitmix64(total_N ^ rows.ids_NF[:, index].astype(np.uint64))
    for index in columns.dense:
        bits_N = np.ascontiguousarray(rows.dense_NK[:, index]).view(np.uint32)
        total_N = splitmix64(total_N ^ bits_N.astype(np.uint64))
    starts_NM = find_value_starts(rows)
    for index in columns.multi:
        lengths_N = rows.lengths_NM[:, index].astype(np.int64)
        ids = rows.values_V[ragged_indices(starts_NM[:, index], lengths_N)].astype(np.int64)
        total_N = splitmix64(total_N ^ hash_lists(ids, lengths_N))
    return total_N


class NegativeSampler:
    """Draws the negatives of a bucket: a pure function of seed, task, row and catalogue."""

    def __init__(
        self,
        schema: Schema,
        catalogue: Catalogue,
        is_train: bool,
        rows: EncodedRows,
        identity_N: UInt64,
    ) -> None:
        rule = schema.negatives
        self._per_positive = rule.per_positive if rule else 0
        self.catalogue = catalogue
        self.columns = find_item_columns(schema)
        # In training only items of the train split: a model must not learn which items come later.
        counts_A = catalogue.train_A if is_train else catalogue.all_A
        by_count = rule is not None and rule.by == "popularity"
        weights_A = counts_A if by_count else (counts_A > 0).astype(np.int64)
        self._ends_A = np.cumsum(weights_A)
        self._allowed_A = weights_A > 0
        self._rows = rows
        # Seeded by the row and its task, not by its position, so that every engine draws the same.
        self._key_N = splitmix64(identity_N ^ splitmix64(rows.task_hash_N ^ _SALT))
        _, self._task_N = np.unique(rows.task_hash_N, return_inverse=True)
        item_N = np.searchsorted(catalogue.item_A, rows.item_NI[:, 0])
        self._has = np.unique(self._task_N * len(catalogue.item_A) + item_N)

    def count_negatives(self, chosen: Int64) -> Int64:
        """Return the number of negatives of each chosen row."""
        is_positive_N = self._rows.label_N[chosen] > 0
        return self._per_positive * is_positive_N.astype(np.int64)

    def draw(self, chosen: Int64) -> Int64:
        """Return the items drawn for each positive: distinct, and none that its task has."""
        positives = chosen[self._rows.label_N[chosen] > 0]
        found = np.full((len(positives), self._per_positive), -1, dtype=np.int64)
        for index in range(self._per_positive):
            unfilled = np.arange(len(positives))
            for attempt in range(_ATTEMPTS):
                salt = splitmix64(np.uint64(index << 32 | attempt))
                # The salt differs for each negative and attempt, so their draws are independent.
                mixed = splitmix64(self._key_N[positives[unfilled]] ^ salt)
                at = (mixed % np.uint64(self._ends_A[-1])).astype(np.int64)
                proposed = np.searchsorted(self._ends_A, at, side="right")
                is_taken = self._find_taken(positives[unfilled], proposed, found[unfilled, :index])
                found[unfilled[~is_taken], index] = proposed[~is_taken]
                unfilled = unfilled[is_taken]
                if not len(unfilled):
                    break
            for place in unfilled.tolist():
                row, own = positives[place], found[place, :index]
                found[place, index] = self._find_free_item(row, own)
        return found

    def _find_taken(self, rows: Int64, items: Int64, drawn: Int64) -> npt.NDArray[np.bool_]:
        """Return which items the row's task has, or the row has as negatives already."""
        # (task, item) is one integer, looked up by bisection among those of all rows.
        keys = self._task_N[rows] * len(self._allowed_A) + items
        places = np.minimum(np.searchsorted(self._has, keys), len(self._has) - 1)
        is_taken: npt.NDArray[np.bool_] = self._has[places] == keys
        is_taken |= (drawn == items[:, None]).any(axis=1)
        return is_taken

    def _find_free_item(self, row: int, own: Int64) -> int:
        """Return the first item from a drawn place on that the task lacks, or raise DataError."""
        items = np.flatnonzero(self._allowed_A)
        items = np.roll(items, -int(self._key_N[row] % np.uint64(len(items))))
        rows = np.full(len(items), row)
        free = items[~self._find_taken(rows, items, np.tile(own, (len(items), 1)))]
        if not len(free):
            raise DataError(
                f"task {self._rows.task_N[row]} lacks {len(own)} of the {len(items):,} items that "
                f"negatives are drawn from, negatives.per_positive is {self._per_positive}. Lower "
                "it, or leave out tasks that have nearly every item (episodes.longer = 'drop')"
            )
        return int(free[0])
