"""Negatives for logs of positives alone: rows of items that a task does not have, with label 0.

Items come from a catalogue that is gathered while rows are encoded, so memory follows the number of
items; negatives are drawn where a bucket's episodes are built, a portion at a time.

Shape suffixes: N rows of a bucket, I items, C chosen rows, P positives among them, J negatives of a
positive, M multi-id features.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from metaio.errors import DataError
from metaio.format.features import vector_of
from metaio.hashing import UInt64, splitmix64
from metaio.prepare.encoded_rows import EncodedRows, joined, take_rows, value_starts
from metaio.prepare.in_order import are_to_be_merged
from metaio.prepare.schema import Schema, SparseColumn
from metaio.prepare.values import list_hashes
from metaio.ragged import Int64, offsets, ragged_indices, run_starts

# If the task has the drawn item, draw again, this often at most; then take the next item that it
# lacks.
_ATTEMPTS = 32
_SALT = np.uint64(0x4E6)


@dataclass(frozen=True)
class ItemColumns:
    """Where the columns of the item stand among the features of each kind."""

    single: tuple[int, ...]
    multi: tuple[int, ...]
    dense: tuple[int, ...]


def item_columns(schema: Schema) -> ItemColumns:
    """Return the places of the columns that [negatives] names."""
    names = schema.negatives.features if schema.negatives else ()

    def places(columns: tuple[SparseColumn, ...]) -> tuple[int, ...]:
        return tuple(index for index, column in enumerate(columns) if column.column in names)

    dense = (i for i, name in enumerate(schema.dense_names) if vector_of(name) in names)
    return ItemColumns(places(schema.single), places(schema.multi), tuple(dense))


@dataclass(frozen=True)
class Catalogue:
    """The items of a log in the order of their hash, a row of each, and how many rows they have."""

    rows: EncodedRows
    train_I: Int64  # rows of the train split
    all_I: Int64

    @property
    def item_I(self) -> UInt64:
        """Return the hash of each item."""
        hashes: UInt64 = self.rows.item_NI[:, 0]
        return hashes


class CatalogueBuilder:
    """Gathers the items of encoded rows: the same catalogue in whatever order they come."""

    def __init__(self, schema: Schema, train: int) -> None:
        self._schema = schema
        self._train = train  # index of the train split
        self._columns = item_columns(schema)
        self._parts: list[Catalogue] = []

    def add(self, part: Catalogue) -> None:
        """Add the items of other rows."""
        self._parts.append(part)
        if are_to_be_merged([len(part.train_I) for part in self._parts]):
            self._parts = [self.merged()]

    def of_rows(self, rows: EncodedRows) -> Catalogue:
        """Return the items of some rows."""
        in_train = (rows.split_N == self._train).astype(np.int64)
        return self._distinct(rows, in_train, np.ones_like(in_train))

    def merged(self) -> Catalogue:
        """Return all items added so far."""
        rows = joined(self._schema, [part.rows for part in self._parts])
        none = np.zeros(0, np.int64)
        train = np.concatenate([none, *(part.train_I for part in self._parts)])
        every = np.concatenate([none, *(part.all_I for part in self._parts)])
        return self._distinct(rows, train, every)

    def _distinct(self, rows: EncodedRows, train_N: Int64, all_N: Int64) -> Catalogue:
        """Return one row an item. If an item's attributes differ between rows, it is the row with
        their least hash, so that the order of rows does not matter."""
        item_N = rows.item_NI[:, 0]
        order_N = np.lexsort((_attribute_hash(rows, self._columns), item_N))
        ordered = item_N[order_N]
        firsts = np.flatnonzero(run_starts(ordered))
        sums = (
            np.diff(offsets(counts[order_N])[np.append(firsts, len(ordered))])
            for counts in (train_N, all_N)
        )
        return Catalogue(take_rows(rows, order_N[firsts]), *sums)


def _attribute_hash(rows: EncodedRows, columns: ItemColumns) -> UInt64:
    """Return a hash of each row's item columns."""
    total_N = np.zeros(rows.num_rows, dtype=np.uint64)
    for index in columns.single:
        total_N = splitmix64(total_N ^ rows.ids_NF[:, index].astype(np.uint64))
    for index in columns.dense:
        bits_N = np.ascontiguousarray(rows.dense_NK[:, index]).view(np.uint32)
        total_N = splitmix64(total_N ^ bits_N.astype(np.uint64))
    starts_NM = value_starts(rows)
    for index in columns.multi:
        lengths_N = rows.lengths_NM[:, index].astype(np.int64)
        ids = rows.values_V[ragged_indices(starts_NM[:, index], lengths_N)].astype(np.int64)
        total_N = splitmix64(total_N ^ list_hashes(ids, lengths_N))
    return total_N


class Sampler:
    """Draws the negatives of a bucket's positives: a pure function of seed, task, row and
    catalogue."""

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
        self.columns = item_columns(schema)
        # A model in training may not learn which items come later.
        counts_I = catalogue.train_I if is_train else catalogue.all_I
        weights_I = (
            counts_I if rule and rule.by == "popularity" else (counts_I > 0).astype(np.int64)
        )
        self._ends_I = np.cumsum(weights_I)
        self._allowed_I = weights_I > 0
        self._rows = rows
        # Of the row and its task, not of its place: whatever bucket or engine draws, draws the
        # same.
        self._key_N = splitmix64(identity_N ^ splitmix64(rows.task_hash_N ^ _SALT))
        _, self._task_N = np.unique(rows.task_hash_N, return_inverse=True)
        item_N = np.searchsorted(catalogue.item_I, rows.item_NI[:, 0])
        self._has = np.unique(self._task_N * len(catalogue.item_I) + item_N)

    def counts(self, chosen_C: Int64) -> Int64:
        """Return how many negatives stand behind each chosen row."""
        counts: Int64 = self._per_positive * (self._rows.label_N[chosen_C] > 0).astype(np.int64)
        return counts

    def draw(self, chosen_C: Int64) -> Int64:
        """Return the items of the negatives of each positive among the chosen rows, as places in
        the catalogue [P, J]: no two alike, none that the task has. Raises DataError: there are too
        few items that a task lacks."""
        positive_P = chosen_C[self._rows.label_N[chosen_C] > 0]
        items_PJ = np.full((len(positive_P), self._per_positive), -1, dtype=np.int64)
        for index in range(self._per_positive):
            open_P = np.arange(len(positive_P))
            for attempt in range(_ATTEMPTS):
                salt = splitmix64(np.uint64(index << 32 | attempt))
                mixed = splitmix64(self._key_N[positive_P[open_P]] ^ salt)
                at = (mixed % np.uint64(self._ends_I[-1])).astype(np.int64)
                drawn = np.searchsorted(self._ends_I, at, side="right")
                taken = self._taken(positive_P[open_P], drawn, items_PJ[open_P, :index])
                items_PJ[open_P[~taken], index] = drawn[~taken]
                open_P = open_P[taken]
                if not len(open_P):
                    break
            for place in open_P.tolist():
                row, own = positive_P[place], items_PJ[place, :index]
                items_PJ[place, index] = self._free(row, own)
        return items_PJ

    def _taken(self, rows_P: Int64, items_P: Int64, drawn_PJ: Int64) -> npt.NDArray[np.bool_]:
        """Tell which items the row's task has, or the row has as negatives already."""
        # (task, item) as one integer, looked up among those of all rows by bisection.
        keys = self._task_N[rows_P] * len(self._allowed_I) + items_P
        places = np.minimum(np.searchsorted(self._has, keys), len(self._has) - 1)
        taken: npt.NDArray[np.bool_] = self._has[places] == keys
        taken |= (drawn_PJ == items_P[:, None]).any(axis=1)
        return taken

    def _free(self, row: int, own: Int64) -> int:
        """Return the first item that the row's task lacks, from a drawn place of the catalogue on.
        Raise DataError where there is none."""
        items = np.flatnonzero(self._allowed_I)
        items = np.roll(items, -int(self._key_N[row] % np.uint64(len(items))))
        rows = np.full(len(items), row)
        free = items[~self._taken(rows, items, np.tile(own, (len(items), 1)))]
        if not len(free):
            raise DataError(
                f"task {self._rows.task_N[row]} lacks {len(own)} of the {len(items):,} items that "
                f"negatives are drawn from, negatives.per_positive is {self._per_positive}. Lower "
                "it, or leave out tasks that have nearly every item (episodes.longer = 'drop')"
            )
        return int(free[0])
