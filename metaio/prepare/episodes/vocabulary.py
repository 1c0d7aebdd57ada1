"""Looks values up in a vocabulary, which is sorted once and then bisected."""

from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from metaio.hashing import UInt64, splitmix64
from metaio.prepare.schema.values import Kind, hash_values, to_int64
from metaio.ragged import Int64


class RowIndex(Protocol):
    """Knows the rows of values in one table."""

    def rows(self, column: pa.Array) -> Int64:
        """Return the row of each value [N], 0 for unknown ones; no nulls."""
        ...


def make_index(vocabulary: pa.Array, kind: Kind) -> RowIndex:
    """Return the index of a vocabulary, whose value i (from 1 on) has row i; null: no value."""
    # `kind` is that of the column: integers looked up in a vocabulary that they share with text are
    # text there.
    if kind == "integer" and pa.types.is_integer(vocabulary.type):
        return IntegerIndex(vocabulary)
    return TextIndex(vocabulary)


class IntegerIndex:
    """Rows of a vocabulary of integers: bisection gives the row, without a hash table."""

    def __init__(self, vocabulary: pa.Array) -> None:
        self._rows = _valid_rows(vocabulary)
        self._values = to_int64(vocabulary.drop_null())
        # prepare leaves vocabularies sorted; in a stream they are in the order of arrival.
        if (self._values[1:] < self._values[:-1]).any():
            order = np.argsort(self._values)
            self._values, self._rows = self._values[order], self._rows[order]

    def rows(self, column: pa.Array) -> Int64:
        """Return the row of each integer [N]; no nulls."""
        wanted = to_int64(column)
        if not len(self._values):
            return np.zeros(len(wanted), np.int64)
        # In ascending order, which finds most of the way in caches: a third of the time among ten
        # million values.
        order = np.argsort(wanted)
        ascending = wanted[order]
        place = np.minimum(np.searchsorted(self._values, ascending), len(self._values) - 1)
        rows = np.empty(len(wanted), np.int64)
        rows[order] = np.where(self._values[place] == ascending, self._rows[place], 0)
        return rows


# pyarrow's index_in hashes the complete vocabulary at every call: 0.3 s for a million words.
class TextIndex:
    """Rows of a vocabulary of text, by bisecting hashes."""

    def __init__(self, vocabulary: pa.Array) -> None:
        self._rows = _valid_rows(vocabulary)
        self._words = vocabulary.drop_null().cast(pa.large_string())
        hashes = hash_values(self._words, "text")
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]
        # Among a million words two share a 64-bit hash with a chance of 1 in 37 million.
        self._is_exact = not (self._hashes[1:] == self._hashes[:-1]).any()

    def rows(self, column: pa.Array) -> Int64:
        """Return the row of each word [N]; no nulls."""
        words = column.cast(pa.large_string())
        if not len(self._hashes):
            return np.zeros(len(words), dtype=np.int64)
        if not self._is_exact:
            found = pc.index_in(words, value_set=self._words)
            place = to_int64(pc.fill_null(found, 0))
            return np.where(found.is_valid().to_numpy(zero_copy_only=False), self._rows[place], 0)
        wanted = hash_values(words, "text")
        # Beyond the last hash: the last word is compared instead, and differs.
        at = np.minimum(np.searchsorted(self._hashes, wanted), len(self._hashes) - 1)
        place = self._order[at]
        rows = np.where(self._hashes[at] == wanted, self._rows[place], 0)
        # An unknown word may have the hash of a known one, so words are compared too.
        hits = np.flatnonzero(rows)
        equal = pc.equal(words.take(pa.array(hits)), self._words.take(pa.array(place[hits])))
        rows[hits[~equal.to_numpy(zero_copy_only=False)]] = 0
        return rows


class ValueKeys:
    """Keys of a vocabulary's rows by their values: a value has the same key in every vocabulary,
    wherever it stands there. The key of row 0, of unknown values, is 0."""

    def __init__(self, vocabulary: pa.Array) -> None:
        kind: Kind = "integer" if pa.types.is_integer(vocabulary.type) else "text"
        rows = _valid_rows(vocabulary)
        keys = splitmix64(hash_values(vocabulary.drop_null(), kind))  # 0 is as good as never one
        self._keys_R = np.zeros(len(vocabulary) + 1, np.uint64)
        self._keys_R[rows] = keys
        order = np.argsort(keys)
        self._sorted_keys, self._rows = keys[order], rows[order]

    def keys(self, rows: Int64) -> UInt64:
        """Return the key of each row."""
        return self._keys_R[rows]

    def rows(self, keys: UInt64) -> Int64:
        """Return the row of each key, 0 for values that the vocabulary does not have."""
        if not len(self._rows):
            return np.zeros(len(keys), np.int64)
        place = np.minimum(np.searchsorted(self._sorted_keys, keys), len(self._rows) - 1)
        return np.where(self._sorted_keys[place] == keys, self._rows[place], 0)


def _valid_rows(vocabulary: pa.Array) -> Int64:
    return np.flatnonzero(vocabulary.is_valid().to_numpy(zero_copy_only=False)) + 1
