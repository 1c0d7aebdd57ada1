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
    """Return whether a file system's files are this machine's."""
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


class _SparseFile(io.RawIOBase):
    """A read-only file of which only the bytes [begin, begin + len(data)) were fetched."""

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
    """A mapped file that knows its path."""

    path: str


_open_maps: "weakref.WeakSet[_MappedFile]" = weakref.WeakSet()  # of all datasets


# Without it resident memory would grow to the size of the data. The first ranges stay: each epoch
# reads all again, so keeping the latest would evict what is needed next. Pages that left fault in
# at 10 GB/s, those that stay read at 17, read() at 5.
class _ResidentBytes:
    """Bounds how many bytes of mapped files count as this process's memory."""

    def __init__(self) -> None:
        self._kept: set[tuple[str, int]] = set()  # not the map, which it would hold
        self._num_bytes = 0
        # Reentrant: garbage collection may run a finalizer that calls `release` inside the lock.
        self._lock = threading.RLock()

    def keep_or_release(self, mapped: _MappedFile, begin: int, end: int) -> None:
        """Keep the pages within these bytes, or release them once the bound is reached."""
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
    """Bytes [begin, end) of a file, addressed by their offsets in the file."""

    def __init__(
        self, begin: int, data: memoryview, resident: "_ResidentBytes | None" = None
    ) -> None:
        self._begin = begin
        self._data = data
        self._resident = resident

    def release(self, begin: int, end: int) -> None:
        """Let mapped pages leave memory, as these bytes were used."""
        if self._resident is not None and isinstance(self._data.obj, _MappedFile):
            self._resident.keep_or_release(self._data.obj, begin, end)

    def will_need(self, begin: int, end: int) -> None:
        """Have these bytes read ahead, if they are mapped and not in memory."""
        if isinstance(self._data.obj, mmap.mmap):
            first = begin // mmap.PAGESIZE * mmap.PAGESIZE
            self._data.obj.madvise(mmap.MADV_WILLNEED, first, end - first)

    def can_be_held(self) -> bool:
        """Return whether arrays may view its bytes for as long as they like."""
        # A held view keeps its file open, and processes may open about 1,024 files.
        return not isinstance(self._data.obj, mmap.mmap) or len(_open_maps) <= _MAX_MAPS_HELD

    def view(self, begin: int, end: int) -> memoryview:
        """Return the bytes [begin, end) of the file, not copied."""
        return self._data[begin - self._begin : end - self._begin]

    def open(self) -> pa.NativeFile:
        """Return a file for pyarrow, in which only this window can be read."""
        # A buffer where the window begins the file: decoding then never calls back into Python.
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

    def read(self, path: str, most: int | None = None) -> bytes:
        """Return the bytes of a small file; of a longer one than `most` only one more."""
        # Clients of stores raise anything: aiohttp's errors are no OSError.
        with translate_errors(partial(self._make_read_error, path)):
            limits = {} if most is None else {"end": most + 1}
            data: bytes = self._fs.cat_file(f"{self._root}/{path}", **limits)
        return data

    def _make_read_error(self, path: str, error: Exception) -> FormatError:
        if isinstance(error, FileNotFoundError):
            return FormatError(f"{self.name(path)} does not exist. Prepare the dataset again")
        return FormatError(
            f"{self.name(path)} cannot be read: {to_one_line(str(error)) or type(error).__name__}. "
            "Check its permissions and the network, then try again"
        )

    def read_windows(self, ranges: list[ByteRange]) -> list[ByteWindow]:
        """Return the bytes of each range: locally by mapping the file, else fetched all at once."""
        if self.is_local:
            maps = [self._map_file(own.path, own.num_bytes) for own in ranges]
            return [ByteWindow(0, memoryview(mapped), self._resident) for mapped in maps]
        paths = [f"{self._root}/{own.path}" for own in ranges]
        begins, ends = [own.begin for own in ranges], [own.end for own in ranges]
        # Errors are returned, not raised, so that each message can name its file.
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
            # Checked each time: reading a map of a file that was cut short would kill the process.
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
                # Dropped, not closed: views may still read from it.
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
