"""How a stream's schema may change from one increment to the next: inputs join, policies change.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, K dense columns"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from metaio.errors import SchemaError
from metaio.prepare.episodes.encode import Encoder, FittedEncoding
from metaio.prepare.episodes.encoded_rows import EncodedRows, list_array_types
from metaio.prepare.schema.rules import StreamRule
from metaio.prepare.schema.schema import IdColumn, Schema

# Keys of [stream] that judge files, and change nothing of what rows mean.
_POLICIES = ("missing", "late_share", "drift", "label_shift", "null_shift", "rows_factor")
_INPUTS = ("single", "multi", "dense", "vector")


def apply_changes(before: Schema, after: Schema, stream: str) -> Schema:
    """Return `after`, which differs from a stream's schema by inputs that join and by policies.
    Raises SchemaError: it differs by more, or an input that joins has no null."""
    same: dict[str, Any] = {
        kind: tuple(one for one in getattr(after, kind) if one in getattr(before, kind))
        for kind in _INPUTS
    }
    rules = before.stream or StreamRule(), after.stream or StreamRule()
    policies: dict[str, Any] = {name: getattr(rules[0], name) for name in _POLICIES}
    alike = replace(after, **same, stream=replace(rules[1], **policies))
    differing = [name for name, part in vars(before).items() if getattr(alike, name) != part]
    if differing:
        raise SchemaError(
            f"the schema differs from that of the stream {stream} in {', '.join(differing)}: rows "
            "of both would not mean the same. Inputs may join, and policies change "
            "(docs/streams.md); else leave --schema out, or begin a new stream"
        )
    known = {one.column for kind in _INPUTS for one in getattr(before, kind)}
    for kind in _INPUTS:
        for one in getattr(after, kind):
            is_id = isinstance(one, IdColumn)
            if one.column in known or one in getattr(before, kind):
                continue
            if one.null != "unknown" if is_id else one.fill is None:
                null = 'null = "unknown"' if is_id else "fill = VALUE"
                raise SchemaError(
                    f"column {one.column} joins the stream {stream}, whose earlier rows have none, "
                    f"and has no null. Say what it is: {null}"
                )
    return after


def may_become(before: Schema | None, after: Schema | None) -> bool:
    """Return whether the schema of one increment of a stream may be that of a later one."""
    if before == after or before is None or after is None:
        return before == after
    try:
        apply_changes(before, after, "")
    except SchemaError:
        return False
    return True


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
        encoder, null = (
            Encoder(self.schema, FittedEncoding({}, dict(self.moments))),
            pa.nulls(1, pa.float64()),
        )
        nulls = [
            0.0 if one.fill is None else float(encoder.encode_dense(one, null)[0])
            for one in self.schema.dense
        ]
        return np.array(
            nulls + [x for v in self.schema.vector for x in [v.fill or 0.0] * v.width], np.float64
        )
