"""Values of a vocabulary that were added, changed or freed, and a vocabulary made full again."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from gmeta.errors import GMetaError
from gmeta.serving.exported_folder import REMEDY, read_vocabulary

_LENGTH = b"num_values"  # of the vocabulary that a delta leads to


def checksum_of(values: pa.Array) -> str:
    """Return the checksum of the values and of their type."""
    # Not of the file: another release of Arrow writes the same values in other bytes.
    digest = xxhash.xxh3_64(f"{values.type} {len(values)} ".encode())
    # Nulls apart from values: a freed row and an empty text are not the same.
    digest.update(np.packbits(values.is_valid().to_numpy(zero_copy_only=False)).tobytes())
    if pa.types.is_integer(values.type):
        digest.update(pc.fill_null(values, 0).to_numpy().tobytes())
        return digest.hexdigest()
    words = pc.fill_null(values.cast(pa.large_string()), "")
    lengths = pc.binary_length(words).to_numpy()
    data = pa.concat_arrays([words]).buffers()[2]  # joined: buffers from 0 on, even of a slice
    digest.update(lengths.tobytes())
    digest.update(memoryview(data)[: int(lengths.sum())] if data is not None else b"")
    return digest.hexdigest()


def write_changed_values(old: pa.Array | None, new: pa.Array, out: Path) -> None:
    """Write the rows whose value is new, changed or freed; no file where there is none."""
    if old is not None and old.equals(new):
        return
    rows = np.arange(len(new))
    # Values of another type all count as changed.
    if old is not None and old.type == new.type:
        kept = min(len(old), len(new))
        old_value, now = old.slice(0, kept), new.slice(0, kept)
        differs = pc.or_(
            pc.not_equal(old_value.is_null(), now.is_null()),
            pc.fill_null(pc.not_equal(old_value, now), False),
        )
        differs_N = differs.to_numpy(zero_copy_only=False)
        rows = np.concatenate([np.flatnonzero(differs_N), rows[kept:]])
    table = pa.table({"row": rows, "value": new.take(pa.array(rows))})
    metadata = {_LENGTH: str(len(new)).encode()}
    out.parent.mkdir(exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), out)


def materialize_values(base: Path | None, changes: Sequence[Path]) -> pa.Array:
    """Return the values of the last version. Raise GMetaError: the files do not fit each other."""
    values = None if base is None else read_vocabulary(base)
    for change in changes:
        table = _read_changes(change)
        try:
            rows, changed = table["row"].to_numpy(), table["value"].combine_chunks()
            length = int(table.schema.metadata[_LENGTH])
            old = changed.slice(0, 0) if values is None else values
            # The delta holds all values then; the old ones cannot stand beside them.
            if old.type != changed.type:
                old = old.slice(0, 0).cast(changed.type)
            # The changed values stand after the old ones, and each row takes its own of all these.
            source = np.arange(length)
            source[rows] = len(old) + np.arange(len(rows))
            values = pa.concat_arrays([old, changed]).take(pa.array(source))
        except (KeyError, TypeError, ValueError, IndexError, pa.ArrowException) as error:
            raise GMetaError(
                f"{change} does not fit the vocabulary that it changes "
                f"({str(error).splitlines()[0]:.200}). {REMEDY}"
            ) from error
    if values is None:
        raise GMetaError(f"a vocabulary of the chain has neither a base nor a delta. {REMEDY}")
    return values


def _read_changes(file: Path) -> pa.Table:
    try:
        with pq.ParquetFile(file) as vocabulary:
            return vocabulary.read(use_threads=False)  # one column
    except (pa.ArrowException, OSError) as error:
        raise GMetaError(
            f"{file} cannot be read: {str(error).splitlines()[0].rstrip('.')}. {REMEDY}"
        ) from error
