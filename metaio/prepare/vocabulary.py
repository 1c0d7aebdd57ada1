"""Looks up text in a vocabulary: hashed once, then bisected, however often rows are encoded."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from metaio.prepare.values import hash_values, integer_values
from metaio.ragged import Int64


class TextIndex:
    """Rows of a vocabulary of text, from 1; 0 for what it does not hold.

    pyarrow's index_in hashes the whole vocabulary at every call: 0.3 s for a million words.
    """

    def __init__(self, vocabulary: pa.Array) -> None:
        self._words = vocabulary.cast(pa.large_string())
        hashes = hash_values(self._words, "text")
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._rows = hashes[order], order + 1
        # Two words of one 64-bit hash are a chance of 1 in 37 million among a million words.
        self._is_exact = not (self._hashes[1:] == self._hashes[:-1]).any()

    def rows(self, column: pa.Array) -> Int64:
        """Return the row of each value [N]; no nulls."""
        words = column.cast(pa.large_string())
        if not self._is_exact:
            found = pc.index_in(words, value_set=self._words)
            return integer_values(pc.fill_null(found, -1)) + 1
        if not len(self._hashes):
            return np.zeros(len(words), dtype=np.int64)
        wanted = hash_values(words, "text")
        # Beyond the last hash there is none: the last one is compared and differs.
        place = np.minimum(np.searchsorted(self._hashes, wanted), len(self._hashes) - 1)
        rows = np.where(self._hashes[place] == wanted, self._rows[place], 0)
        # An unknown word may have the hash of a known one.
        hits = np.flatnonzero(rows)
        equal = pc.equal(words.take(pa.array(hits)), self._words.take(pa.array(rows[hits] - 1)))
        rows[hits[~equal.to_numpy(zero_copy_only=False)]] = 0
        return rows
