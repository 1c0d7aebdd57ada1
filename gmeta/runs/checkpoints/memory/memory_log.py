"""A log of steps in memory that its launcher holds, so that it outlives the rank that writes it."""

import ctypes
import mmap
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]
_ENDS = struct.Struct("<QQ")  # where the oldest entry begins, and where the newest ends
_HEAD = struct.Struct("<16sQQQQQQ")
_FIRST = mmap.PAGESIZE  # entries lie behind a page that holds _ENDS
_PUNCH_HOLE = 3  # fallocate: give the memory back, and keep all offsets


class EntryHead(NamedTuple):
    """What an entry is: the run it is of, the `rank` and the `step` whose state it gives together
    with the entries since step `needs_from`, on a checkpoint of step `covers_from` or a later."""

    run: bytes  # 16 of them: a digest
    rank: int
    step: int
    needs_from: int
    covers_from: int
    num_bytes: int
    checksum: int  # xxh3_64 of all before, and of the bytes behind the head


class _Place(NamedTuple):
    head: EntryHead
    begin: int
    end: int


def frame_entry(head: EntryHead, parts: list[Bytes]) -> Bytes:
    """Return an entry as a log takes it: its head, with size and checksum of the parts, then the
    parts."""
    entry = np.concatenate([np.zeros(_HEAD.size, np.uint8), *parts])
    body = entry[_HEAD.size :]
    filled = head._replace(num_bytes=body.size)
    filled = filled._replace(checksum=_sum(filled, body))
    entry[: _HEAD.size] = np.frombuffer(_HEAD.pack(*filled), np.uint8)
    return entry


def _sum(head: EntryHead, body: Bytes) -> int:
    digest = xxhash.xxh3_64(_HEAD.pack(*head._replace(checksum=0)))
    digest.update(body.data)
    return digest.intdigest()


def iterate_entries(data: Bytes) -> Iterator[tuple[EntryHead, Bytes]]:
    """Yield head and body of entries that stand one behind the other, up to the first that is cut
    short or altered."""
    while data.size >= _HEAD.size:
        head = EntryHead(*_HEAD.unpack(data[: _HEAD.size].tobytes()))
        body = data[_HEAD.size :][: head.num_bytes]
        if body.size < head.num_bytes or _sum(head, body) != head.checksum:
            return
        yield head, body
        data = data[_HEAD.size + head.num_bytes :]


@final
class MemoryLog:
    """Entries of one rank, oldest first. One that its writer did not finish is not there: where the
    newest ends is written last."""

    def __init__(self, path: str) -> None:
        """Open the log at `path`; what holds its memory is whoever made that file."""
        self._file = os.open(path, os.O_RDWR)
        self.places: list[_Place] = []
        begin, end = self._ends()
        offset = begin
        for head, body in iterate_entries(self._read(begin, end)):
            self.places.append(_Place(head, offset, offset := offset + _HEAD.size + body.size))

    def heads_for(self, run: bytes, base: int) -> list[EntryHead]:
        """Return the heads of entries that lead from the checkpoint of step `base` to a later one
        of the run, with all that they need."""
        steps = {place.head.step for place in self.places}
        return [
            head
            for head, *_ in self.places
            if head.run == run and head.covers_from <= base < head.step and head.needs_from in steps
        ]

    def read_chain(self, step: int) -> Bytes:
        """Return the entry of this step, behind those that it needs."""
        last = next(place for place in self.places if place.head.step == step)
        first = next(place for place in self.places if place.head.step == last.head.needs_from)
        return self._read(first.begin, last.end)

    def append(self, entry: Bytes) -> None:
        """Add an entry; drop those that the entry before this one does not need."""
        self.write(entry)
        # All ranks have the entry before: each took part in a step since.
        needed = self.places[-2].head.needs_from if len(self.places) > 1 else 0
        kept = [place for place in self.places if place.head.step >= needed]
        begin = self._ends()[0]
        self._set_ends(kept[0].begin, kept[-1].end)
        # From the page's beginning: what lay before is gone, and only whole pages are given back.
        self._free(begin - begin % mmap.PAGESIZE, kept[0].begin)
        self.places = kept

    def write(self, entries: Bytes) -> None:
        """Add entries that stand one behind the other."""
        begin, end = self._ends()
        offset = end
        rest = entries.data
        while rest:  # one call writes 2 GB at most
            written = os.pwrite(self._file, rest, offset)
            offset, rest = offset + written, rest[written:]
        self._set_ends(begin, offset)
        for head, body in iterate_entries(entries):
            self.places.append(_Place(head, end, end := end + _HEAD.size + body.size))

    def drop_after(self, step: int) -> None:
        """Drop the entries of later steps."""
        self.places = [place for place in self.places if place.head.step <= step]
        begin, end = self._ends()
        kept_until = self.places[-1].end if self.places else begin
        self._set_ends(begin, kept_until)
        self._free(kept_until, end)

    def _ends(self) -> tuple[int, int]:
        ends = _ENDS.unpack(os.pread(self._file, _ENDS.size, 0).ljust(_ENDS.size, b"\0"))
        return (ends[0] or _FIRST, ends[1] or _FIRST)

    def _set_ends(self, begin: int, end: int) -> None:
        os.pwrite(self._file, _ENDS.pack(begin, end), 0)

    def _read(self, begin: int, end: int) -> Bytes:
        if begin == end:
            return np.zeros(0, np.uint8)
        page = begin - begin % mmap.ALLOCATIONGRANULARITY
        with mmap.mmap(self._file, end - page, access=mmap.ACCESS_READ, offset=page) as mapped:
            return np.frombuffer(mapped, np.uint8, end - begin, begin - page).copy()

    def _free(self, begin: int, end: int) -> None:
        offset, length = ctypes.c_long(begin), ctypes.c_long(end - begin)
        if end > begin and ctypes.CDLL(None).fallocate(self._file, _PUNCH_HOLE, offset, length):
            raise OSError(f"memory of {end - begin:,} bytes cannot be given back")
