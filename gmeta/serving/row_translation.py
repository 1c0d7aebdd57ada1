"""Encoded rows in a form that all versions of a model read, whatever rows of tables their values
have: support rows that a task's state carries.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, V values, K dense
columns"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from gmeta.serving.encoded_rows import EncodedColumns
from metaio.format.block import find_features_of_values
from metaio.prepare.episodes.vocabulary import ValueKeys
from metaio.ragged import Int64

Arrays = Mapping[str, npt.NDArray[Any]]


@final
class RowTranslation:
    """Between a version's encoded rows and the common form: a key for each value of a vocabulary,
    and dense columns before they are standardised."""

    def __init__(
        self,
        meaning: object,
        vocabularies: Mapping[str, pa.Array],
        tables: tuple[Sequence[str], Sequence[str]],
        moments: Sequence[tuple[float, float]],
    ) -> None:
        """Take the tables of the single-id and the multi-id features, mean and deviation of each
        dense column; versions of equal `meaning` (as JSON) understand each other."""
        # Names the form: 16 hexadecimal digits.
        self.name: str = xxhash.xxh3_64(json.dumps(meaning).encode()).hexdigest()
        self._vocabularies, self._tables = vocabularies, tables
        self._moments_2K = np.array(moments, np.float64).reshape(-1, 2).T

    def to_common(self, rows: EncodedColumns) -> Arrays:
        """Return the columns of encoded rows in the common form, by their names."""
        ids_NF, values_V = self._replace_ids(vars(rows), is_common=False)
        mean_K, deviation_K = self._moments_2K
        # In 64 bits: a time of today would lose its minutes in 32.
        dense_NK = rows.dense_NK.astype(np.float64) * deviation_K + mean_K
        return {**vars(rows), "ids_NF": ids_NF, "values_V": values_V, "dense_NK": dense_NK}

    def from_common(self, arrays: Arrays) -> EncodedColumns:
        """Return encoded rows of this version; a value that it does not know is 0. Raise ValueError
        or its like for what does not fit."""
        ids_NF, values_V = self._replace_ids(arrays, is_common=True)
        mean_K, deviation_K = self._moments_2K
        with np.errstate(over="ignore"):  # becomes infinite, which whoever reads it refuses
            dense_NK = ((arrays["dense_NK"] - mean_K) / deviation_K).astype(np.float32)
        rows = EncodedColumns(**{one.name: arrays[one.name] for one in fields(EncodedColumns)})
        return replace(rows, ids_NF=ids_NF, values_V=values_V, dense_NK=dense_NK)

    @cached_property
    def _keys(self) -> dict[str, ValueKeys]:
        return {table: ValueKeys(values) for table, values in self._vocabularies.items()}

    def _replace_ids(self, arrays: Arrays, is_common: bool) -> tuple[Int64, Int64]:
        single_tables, multi_tables = self._tables
        ids_NF, values_V = (arrays[name].astype(np.int64) for name in ("ids_NF", "values_V"))
        feature_V = find_features_of_values(arrays["lengths_NM"])
        for index, table in enumerate(single_tables):
            if table in self._vocabularies:
                ids_NF[:, index] = self._translate(table, ids_NF[:, index], is_common)
        for index, table in enumerate(multi_tables):
            if table in self._vocabularies:
                mine_V = feature_V == index
                values_V[mine_V] = self._translate(table, values_V[mine_V], is_common)
        return ids_NF, values_V

    def _translate(self, table: str, ids: Int64, is_common: bool) -> Int64:
        keys = self._keys[table]
        if is_common:
            return keys.rows(np.ascontiguousarray(ids).view(np.uint64))
        return keys.keys(ids).view(np.int64)
