"""Embedding tables as an exported model holds them: float32, float16, or int8 with row scales.

Shape suffixes: B tables, U unique ids, R rows of tables, D embedding width"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gmeta.errors import GMetaError, NotFiniteError
from gmeta.platform.files.tensor_files import translate_write_errors
from gmeta.serving.table_format import TableFormat
from gmeta_models.table_projections import pad_width_UD

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}
_SAFETENSORS_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.int8: "I8"}
_BLOCK_BYTES = 8 << 20  # of a table that is written
_Description = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_INT8_LEVELS = 127  # -128 stays unused: the codes of w and -w are then each other's negative


@dataclass(frozen=True)
class StoredTable:
    """Rows as they lie on disk."""

    values_RD: Tensor
    # float32, and there for int8 alone.
    scale_R: Tensor | None = None

    def rows_UD(self, ids_U: Tensor) -> Tensor:
        """Return these rows [U, D] as float32."""
        # The file is mapped: only the pages of these rows are read.
        rows_UD = self.values_RD.index_select(0, ids_U).to(torch.float32)
        if self.scale_R is None:
            return rows_UD
        return rows_UD * self.scale_R.index_select(0, ids_U).unsqueeze(1)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return what goes into the table's file."""
        scale = {} if self.scale_R is None else {"scale": self.scale_R}
        return {"values": self.values_RD, **scale}


def write_table(file: Path, name: str, weight_RD: Tensor, table_format: TableFormat) -> None:
    """Write a trained table as a safetensors file with its name, some rows at a time: it may be
    mapped, and larger than memory. Raises as store_table does."""
    num_rows, width = weight_RD.shape
    row_bytes, places, end = {}, {}, 0
    # The wider type first, as safetensors has them.
    no_rows = store_table(name, weight_RD[:0], table_format).to_tensors()
    for key, tensor in sorted(no_rows.items(), key=lambda one: -one[1].itemsize):
        shape = [num_rows, *tensor.shape[1:]]
        row_bytes[key] = math.prod(shape[1:]) * tensor.itemsize
        begin, end = end, end + num_rows * row_bytes[key]
        dtype = _SAFETENSORS_DTYPES[tensor.dtype]
        places[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": {"table": name}, **places}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with translate_write_errors(file), file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(out.tell() + end)
        begins = {key: out.tell() + place["data_offsets"][0] for key, place in places.items()}
        rows_at_once = max(1, _BLOCK_BYTES // (4 * width))
        for first in range(0, num_rows, rows_at_once):
            block_RD = weight_RD[first : first + rows_at_once]
            stored = store_table(name, block_RD, table_format, first)
            for key, tensor in stored.to_tensors().items():
                out.seek(begins[key] + first * row_bytes[key])
                out.write(tensor.contiguous().numpy().data)


def store_table(
    name: str, weight_RD: Tensor, table_format: TableFormat, first_row: int = 0
) -> StoredTable:
    """Return a trained float32 table in the format that it is to be served from.

    int8: q = round(w / s) with s = max |w| / 127 over the row, so |q s - w| <= s / 2 = max |w| /
    254. float16: rounded to 11 bits, |error| <= |w| / 2048 for |w| >= 6.1e-5.

    >>> store_table("t", torch.tensor([[1.0, -0.25]]), "int8").values_RD.tolist()
    [[127, -32]]"""
    # One number a row is enough to look at: NaN and infinity survive both abs and amax.
    largest_R = weight_RD.abs().amax(dim=1)
    if not bool(torch.isfinite(largest_R).all()):
        row = first_row + int((~torch.isfinite(largest_R)).nonzero()[0])
        raise NotFiniteError(
            f"table {name} holds a value that is not finite in row {row}: the run diverged. "
            "Export an earlier checkpoint with --step, or train with lower rates"
        )
    if table_format == "float32":
        return StoredTable(weight_RD)
    if table_format == "float16":
        limit = torch.finfo(torch.float16).max
        if largest_R.numel() and float(largest_R.max()) > limit:
            raise GMetaError(
                f"table {name} holds {float(largest_R.max()):g}: float16 ends at {limit:g}. "
                "Export with --tables float32 or int8"
            )
        return StoredTable(weight_RD.to(torch.float16))
    scale_R = largest_R / _INT8_LEVELS
    # A row of zeros has any scale; 1 keeps the division defined.
    scale_R = torch.where(scale_R > 0, scale_R, 1.0)
    codes_RD = (weight_RD / scale_R.unsqueeze(1)).round().to(torch.int8)
    return StoredTable(codes_RD, scale_R)


def check_table(
    where: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], table_format: TableFormat
) -> StoredTable:
    """Return the table in a file's tensors. Raise GMetaError if config.json says otherwise."""
    scale = {"scale": (shape[:1], torch.float32)} if table_format == "int8" else {}
    wanted: _Description = {"values": (shape, _DTYPES[table_format]), **scale}
    actual = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if actual != wanted:
        raise GMetaError(
            f"{where} holds {_format_description(actual)}; config.json promises "
            f"{_format_description(wanted)}. "
            "The files come from different exports: export the run again"
        )
    return StoredTable(tensors["values"], tensors.get("scale"))


def _format_description(tensors: _Description) -> str:
    return ", ".join(
        f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}"
        for name, (shape, dtype) in tensors.items()
    )


def fetch_UD(tables: Sequence[StoredTable], ids_U: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the rows [U, D] of the ids, which stand table by table as in a TaskBatch."""
    parts = ids_U.split(lengths_B.tolist())
    rows = [table.rows_UD(ids) for table, ids in zip(tables, parts, strict=True)]
    # Rows of narrower tables end in zeros: a batch has one width.
    widest = max(each.shape[1] for each in rows)
    return torch.cat([pad_width_UD(each, widest) for each in rows])
