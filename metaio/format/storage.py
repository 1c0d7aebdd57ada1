"""Where bytes come from: a local folder through mmap, other fsspec URLs through range requests."""

import io
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import fsspec
import pyarrow as pa

from gmeta_keys.translate_errors import translate_errors
from metaio.errors import FormatError, UrlError, to_one_line

# Mapping a 100 MB file anew for each block costs 0.3 ms, 6 % of a block. A map holds no memory, but
# an open file, and many systems allow a process 1,024 of them.
_MAX_MAPS = 256
_MAX_MAPS_HELD = 640
_MAX_RESIDENT_BYTES = 512 << 20


def find_file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path in it."""
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UrlError(
            f"{url} cannot be opened: {str(error).rstrip('.')}. Give a path, or a URL of a kind "
            "that an installed package of fsspec reads"
        ) from error
    return found


def is_local(fs: Any) -> bool:
    """Tell whether its files are this machine's."""
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


class _SparseFile(io.RawIOBase):
    """A read-only file of which only the bytes [begin, begin + len(data)) are at hand."""

    def __init__(self, begin: int, data: memoryview) -> None:
        super().__init__()
        self._begin = begin
        self._data = data
        self._at = begin

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            # For Arrow the file ends where the window does.
            offset += self._begin + len(self._data)
        self._at = offset + self._at if whence == os.SEEK_CUR else offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        start = self._at - self._begin
        stop = len(self._data) if size < 0 else start + size
        if start < 0 or stop > len(self._data):
            raise OSError(f"bytes {self._at} to {self._at + size} were not fetched")
        self._at += stop - start
        # Arrow takes any buffer and does not copy it.
        return self._data[start:stop]  # type: ignore[return-value]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class _MappedFile(mmap.mmap):
    """A file that is mapped, by its path."""

    path: str


_open_maps: "weakref.WeakSet[_MappedFile]" = weakref.WeakSet()  # of all datasets


class _ResidentBytes:
    """Bounds how many bytes of mapped files count as this process's memory.

    Without it resident memory would grow to the size of the data. The first ranges stay, later ones
    leave as soon as they are decoded: every epoch reads all of it again, so keeping the latest
    would keep what is needed last. Pages that left fault in again at 10 GB/s; 17 while they stay, 5
    by read().
    """

    def __init__(self) -> None:
        self._kept: set[tuple[str, int]] = set()  # not the map, which it would hold
        self._num_bytes = 0
        # Reentrant: a block may be let go of, which calls `used`, wherever memory is asked for.
        self._lock = threading.RLock()

    def keep_or_release(self, mapped: _MappedFile, begin: int, end: int) -> None:
        """Keep the whole pages within these bytes, or let them go where the bound is reached."""
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= stop:
            return
        with self._lock:
            if (mapped.path, first) in self._kept:
                return
            if self._num_bytes + stop - first <= _MAX_RESIDENT_BYTES:
                self._num_bytes += stop - first
                self._kept.add((mapped.path, first))
                return
        mapped.madvise(mmap.MADV_DONTNEED, first, stop - first)


class ByteWindow:
    """Bytes [begin, end) of a file, addressed by their offsets in the whole file."""

    def __init__(
        self, begin: int, data: memoryview, resident: "_ResidentBytes | None" = None
    ) -> None:
        self._begin = begin
        self._data = data
        self._resident = resident

    def release(self, begin: int, end: int) -> None:
        """Note that these bytes were used: mapped pages may leave memory until they are read
        again."""
        if self._resident is not None and isinstance(self._data.obj, _MappedFile):
            self._resident.keep_or_release(self._data.obj, begin, end)

    def will_need(self, begin: int, end: int) -> None:
        """Have these bytes read ahead where they are mapped and not in memory."""
        if isinstance(self._data.obj, mmap.mmap):
            first = begin // mmap.PAGESIZE * mmap.PAGESIZE
            self._data.obj.madvise(mmap.MADV_WILLNEED, first, end - first)

    def can_be_held(self) -> bool:
        """Tell whether arrays may look at its bytes as long as they like."""
        return not isinstance(self._data.obj, mmap.mmap) or len(_open_maps) <= _MAX_MAPS_HELD

    def view(self, begin: int, end: int) -> memoryview:
        """Return the bytes [begin, end) of the file, not copied."""
        return self._data[begin - self._begin : end - self._begin]

    def open(self) -> pa.NativeFile:
        """Return a file for pyarrow, in which only this window can be read."""
        # No call back into Python while decoding where the whole file is at hand.
        if self._begin == 0:
            return pa.BufferReader(pa.py_buffer(self._data))
        return pa.PythonFile(_SparseFile(self._begin, self._data), mode="r")


@dataclass(frozen=True)
class ByteRange:
    """Bytes [begin, end) of a file that has `num_bytes`."""

    path: str
    num_bytes: int
    begin: int
    end: int


class Storage:
    """Reads files below one dataset URL."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if url != "/" else url
        self._fs: Any
        self._fs, self._root = find_file_system(self.url)
        self.is_local = is_local(self._fs)
        self._maps: OrderedDict[str, _MappedFile] = OrderedDict()
        self._resident = _ResidentBytes()
        self._lock = threading.Lock()

    def name(self, path: str) -> str:
        """Return the full address of a file, for messages."""
        return f"{self.url}/{path}"

    def read(self, path: str) -> bytes:
        """Return a whole small file."""
        # Whatever the client of a store raises: aiohttp's errors are no OSError.
        with translate_errors(partial(self._make_read_error, path)):
            data: bytes = self._fs.cat_file(f"{self._root}/{path}")
        return data

    def _make_read_error(self, path: str, error: Exception) -> FormatError:
        if isinstance(error, FileNotFoundError):
            return FormatError(f"{self.name(path)} does not exist. Prepare the dataset again")
        return FormatError(
            f"{self.name(path)} cannot be read: "
            f"{to_one_line(str(error)) or type(error).__name__}. Check "
            "its permissions and the network, then try again"
        )

    def read_windows(self, ranges: list[ByteRange]) -> list[ByteWindow]:
        """Return the bytes of each range: locally the whole file is mapped, elsewhere all are
        fetched at once."""
        if self.is_local:
            maps = [self._map_file(own.path, own.num_bytes) for own in ranges]
            return [ByteWindow(0, memoryview(mapped), self._resident) for mapped in maps]
        paths = [f"{self._root}/{own.path}" for own in ranges]
        begins, ends = [own.begin for own in ranges], [own.end for own in ranges]
        found = self._fs.cat_ranges(paths, begins, ends, on_error="return")
        return [self._make_window(own, data) for own, data in zip(ranges, found, strict=True)]

    def _make_window(self, own: ByteRange, data: bytes | Exception) -> ByteWindow:
        if isinstance(data, Exception):
            raise self._make_read_error(own.path, data) from data
        name, wanted = self.name(own.path), own.end - own.begin
        if len(data) > wanted:
            raise FormatError(
                f"{name}: {len(data)} bytes came where {wanted} were asked for: its server knows "
                "no ranges. Serve the dataset by one that does, or copy it to a disk"
            )
        if len(data) < wanted:
            raise _make_size_error(name, own.begin + len(data), own.num_bytes)
        return ByteWindow(own.begin, memoryview(data))

    def _map_file(self, path: str, num_bytes: int) -> _MappedFile:
        full = f"{self._root}/{path}"
        try:
            found_bytes = os.stat(full).st_size
            if found_bytes != num_bytes:
                raise _make_size_error(self.name(path), found_bytes, num_bytes)
            # The size is asked each time: a file cut short under a map would kill the process.
            with self._lock:
                if full in self._maps:
                    self._maps.move_to_end(full)
                    return self._maps[full]
            with open(full, "rb") as file:
                mapped = _MappedFile(file.fileno(), num_bytes, access=mmap.ACCESS_READ)
            mapped.path = full
            with self._lock:
                _open_maps.add(mapped)
                self._maps[full] = mapped
                # Let go of, not closed: whoever still reads from it holds it.
                if len(self._maps) > _MAX_MAPS:
                    self._maps.popitem(last=False)
            return mapped
        except OSError as error:
            raise self._make_read_error(path, error) from error


def _make_size_error(name: str, found_bytes: int, num_bytes: int) -> FormatError:
    return FormatError(
        f"{name} has {found_bytes} bytes, the manifest says {num_bytes}: it was cut short or "
        "rewritten. Copy the dataset again or prepare it again"
    )
