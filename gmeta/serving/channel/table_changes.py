"""Which rows of a table's file differ between two versions, and those rows put over the old.

Shape suffix: R rows of tables"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor

from gmeta.errors import GMetaError
from gmeta.platform.files.tensor_files import read_tensors, translate_write_errors
from gmeta.serving.exported_folder import REMEDY
from metaio.ragged import Int64

_BLOCK_ROWS = 1 << 18  # compared at a time: tens of megabytes, whatever the table's size
_GAPS = "gaps"
# The narrowest that holds the largest gap: a byte or two a row, where ids would take eight.
_GAP_TYPES = (np.uint8, np.uint16, np.uint32, np.uint64)


def write_changed_rows(old: Path | None, new: Path, out: Path) -> int:
    """Write the rows of the table file `new` that differ from those of `old`; return how many."""
    after = read_tensors(new)
    before = {} if old is None else read_tensors(old)
    # Of another format or width, no row is comparable: all are written.
    if not _is_stored_alike(before, after):
        before = {name: tensor[:0] for name, tensor in after.items()}
    changed = _find_changed_rows(before, after)
    num_rows = len(next(iter(after.values())))
    if not len(changed) and len(next(iter(before.values()))) == num_rows:
        return 0
    ids = torch.from_numpy(changed)
    rows = {name: tensor.index_select(0, ids).numpy() for name, tensor in after.items()}
    with translate_write_errors(out):
        save_arrays({_GAPS: _gaps(changed), **rows}, out)
    return len(changed)


def materialize_table(
    base: Path, changes: Sequence[Path], out: Path, table: str, num_rows: int
) -> None:
    """Write the table file of the last version: the full one's rows with each delta's over them."""
    tensors: dict[str, Tensor] = {}
    for name, stored in read_tensors(base).items():
        # Rows beyond the base's come with the deltas.
        tensors[name] = stored.new_empty((num_rows, *stored.shape[1:]))
        tensors[name][: len(stored)] = stored[:num_rows]
    for change in changes:
        try:
            rows = load_arrays(change)
            # Gaps are stored in the narrowest type, in which their sum would overflow.
            ids = torch.from_numpy(np.cumsum(rows.pop(_GAPS).astype(np.int64)))
            if rows.keys() != tensors.keys():
                raise KeyError(", ".join(rows))
            is_kept = ids < num_rows  # a version between may have had more rows than the last
            for name, values in rows.items():
                tensors[name].index_copy_(0, ids[is_kept], torch.from_numpy(values)[is_kept])
        except (SafetensorError, OSError, KeyError, IndexError, RuntimeError) as error:
            raise GMetaError(
                f"{change} does not fit table {table} of {base.parent} "
                f"({str(error).splitlines()[0]:.200}). {REMEDY}"
            ) from error
    with translate_write_errors(out):
        save_file(tensors, out, {"table": table})


def _find_changed_rows(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Int64:
    num_rows = len(next(iter(after.values())))
    kept = min(num_rows, len(next(iter(before.values()))))
    parts = [np.arange(kept, num_rows, dtype=np.int64)]
    for first in range(0, kept, _BLOCK_ROWS):
        stop = min(kept, first + _BLOCK_ROWS)
        differs_R = np.zeros(stop - first, np.bool_)
        for name, tensor in after.items():
            was, now = (_bytes(each[first:stop]) for each in (before[name], tensor))
            differs_R |= (was != now).any(axis=1)
        parts.append(first + np.flatnonzero(differs_R))
    # Ascending: the file holds the gaps between ids.
    return np.sort(np.concatenate(parts))


def _bytes(rows: Tensor) -> npt.NDArray[np.uint8]:
    # NaN differs from itself, its bytes do not.
    return rows.numpy().reshape(len(rows), -1).view(np.uint8)


def _gaps(changed: Int64) -> npt.NDArray[np.unsignedinteger]:
    gaps = np.diff(changed, prepend=0)
    largest = int(gaps.max(initial=0))
    kind = next(kind for kind in _GAP_TYPES if largest <= np.iinfo(kind).max)
    return gaps.astype(kind)


def _is_stored_alike(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    was = {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in before.items()}
    return was == {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in after.items()}
