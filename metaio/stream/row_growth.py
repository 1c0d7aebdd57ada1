"""The newest rows of a stream's tasks, by a schema that has more inputs than when they were stored.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, V values, K dense
columns"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from metaio.prepare.episodes.encode import Encoder, FittedEncoding
from metaio.prepare.episodes.encoded_rows import EncodedRows, list_array_types
from metaio.prepare.schema.schema import Schema


@dataclass(frozen=True)
class RowGrowth:
    """Gives rows that were stored by an earlier schema of a stream the nulls of inputs that joined
    since; it is sent to every worker of a cluster."""

    stored: Schema
    schema: Schema
    moments: Mapping[str, tuple[float, float]]

    def grow(self, rows: EncodedRows) -> EncodedRows:
        """Return the rows as the newer schema has them."""
        old, new, types = self.stored, self.schema, list_array_types(self.schema)
        num_rows = rows.num_rows
        ids_NF = np.zeros((num_rows, len(new.single)), types["ids_NF"][0])
        ids_NF[:, [new.single.index(one) for one in old.single]] = rows.ids_NF
        lengths_NM = np.zeros((num_rows, len(new.multi)), np.int32)
        lengths_NM[:, [new.multi.index(one) for one in old.multi]] = rows.lengths_NM
        # By the names of dense inputs, of which a vector has several.
        places = [new.dense_names.index(name) for name in old.dense_names]
        dense_NK = np.empty((num_rows, len(new.dense_names)), np.float32)
        dense_NK[:] = self._nulls_K()
        dense_NK[:, places] = rows.dense_NK
        values_V = rows.values_V.astype(types["values_V"][0])
        return replace(
            rows, ids_NF=ids_NF, lengths_NM=lengths_NM, dense_NK=dense_NK, values_V=values_V
        )

    def _nulls_K(self) -> npt.NDArray[np.float64]:
        """Return what each dense input is where it is null; 0 where it may not be."""
        encoder = Encoder(self.schema, FittedEncoding({}, dict(self.moments)))
        null = pa.nulls(1, pa.float64())
        nulls = [
            0.0 if one.fill is None else float(encoder.encode_dense(one, null)[0])
            for one in self.schema.dense
        ]
        return np.array(
            nulls + [x for v in self.schema.vector for x in [v.fill or 0.0] * v.width], np.float64
        )
