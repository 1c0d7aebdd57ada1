"""A table's values inside a checkpoint's file, some rows at a time: torch.load would make all of
them at once."""

import io
import math
import zipfile
from collections.abc import Sequence
from typing import IO, Any, final

import torch
from torch import Tensor

BLOCK_BYTES = 8 << 20
# A record's header ends with the lengths of its name and of what stands between it and the values.
_HEADER_BYTES, _LENGTHS_AT = 30, 26


@final
class FileSlice(io.RawIOBase):
    """Some bytes of a file as a file; torch's own view of such takes an offset from the end for
    one from the beginning."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        self._file, self._begin, self._length = file, begin, length
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, counted from the beginning, from here or from the end."""
        self._at = max(0, (0, self._at, self._length)[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; return the number of bytes, 0 at the end."""
        self._file.seek(self._begin + self._at)
        found = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


def copy_table(
    file: IO[bytes] | FileSlice, shape: Sequence[int], offsets: Sequence[int], target: Tensor
) -> None:
    """Fill `target` from a part, which begins at `offsets`, of the tensor of this shape that
    torch.save wrote. Raises ValueError: it holds something else, or is cut short."""
    start = _find_values(file, math.prod(shape) * target.element_size())
    row_bytes = math.prod(shape[1:]) * target.element_size()
    columns = [
        slice(first, first + n) for first, n in zip(offsets[1:], target.shape[1:], strict=True)
    ]
    rows_at_once = max(1, BLOCK_BYTES // max(row_bytes, 1))
    for rows in target.split(rows_at_once):
        file.seek(start + offsets[0] * row_bytes)
        values = bytearray(file.read(len(rows) * row_bytes))
        if len(values) < len(rows) * row_bytes:
            raise ValueError("a table's values are cut short")
        stored = torch.frombuffer(values, dtype=target.dtype).view(len(rows), *shape[1:])
        rows.copy_(stored[:, *columns])
        offsets = offsets[0] + len(rows), *offsets[1:]


def _find_values(file: IO[bytes] | FileSlice, num_bytes: int) -> int:
    """Return where the values of the only tensor begin, which the archive holds as they are."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = [one for one in archive.infolist() if one.filename.endswith("/data/0")]
    except zipfile.BadZipFile as error:
        raise ValueError(f"a table is no archive of torch's: {error}") from error
    sizes = [(one.file_size, one.compress_type) for one in records]
    if sizes != [(num_bytes, zipfile.ZIP_STORED)]:
        raise ValueError(f"a table holds {sizes} where the index says {num_bytes:,} bytes")
    header_at = records[0].header_offset
    file.seek(header_at)
    lengths = file.read(_HEADER_BYTES)[_LENGTHS_AT:]
    return (
        header_at
        + _HEADER_BYTES
        + sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
    )
