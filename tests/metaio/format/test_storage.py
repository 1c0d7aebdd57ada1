"""Bytes of a dataset's files: mapped on a local disk, fetched by ranges elsewhere."""

import mmap
from pathlib import Path
from typing import Any

import fsspec
import pytest

from metaio import FormatError
from metaio.format.storage import ByteRange, Storage, _ResidentBytes
from tests.support.refusals import catch_message

CONTENT = bytes(range(200))


@pytest.fixture
def remote() -> Storage:
    fs = fsspec.filesystem("memory")
    fs.pipe("/storage-test/a.bin", CONTENT)
    return Storage("memory://storage-test")


def whole(path: str, begin: int = 0, end: int = len(CONTENT)) -> ByteRange:
    return ByteRange(path, len(CONTENT), begin, end)


def message_of(storage: Storage, *ranges: ByteRange) -> str:
    return catch_message(FormatError, storage.read_windows, list(ranges))


def test_a_local_file_and_a_fetched_range_are_the_same(tmp_path: Path, remote: Storage) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    for storage in (Storage(str(tmp_path)), remote):
        (window,) = storage.read_windows([whole("a.bin", 50, 90)])
        assert bytes(window.view(60, 70)) == CONTENT[60:70]
        with window.open() as file:
            file.seek(80)
            assert file.read(10) == CONTENT[80:90]
            assert file.tell() == 90


def test_what_was_not_fetched_is_not_made_up(remote: Storage) -> None:
    (window,) = remote.read_windows([whole("a.bin", 50, 90)])
    with window.open() as file:
        file.seek(85)
        with pytest.raises(OSError, match=r"^bytes 85 to 95 were not fetched$"):
            file.read(10)
        file.seek(0)
        with pytest.raises(OSError, match=r"^bytes 0 to 4 were not fetched$"):
            file.read(4)


def test_a_file_of_another_size_is_refused_wherever_it_is(tmp_path: Path, remote: Storage) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT[:120])
    fsspec.filesystem("memory").pipe("/storage-test/a.bin", CONTENT[:120])
    for storage in (Storage(str(tmp_path)), remote):
        assert message_of(storage, whole("a.bin", 100, 200)) == (
            f"{storage.url}/a.bin has 120 bytes, the manifest says 200: it was cut short or "
            "rewritten. Copy the dataset again or prepare it again"
        )
        expected = f"{storage.url}/b.bin does not exist. Prepare the dataset again"
        assert message_of(storage, whole("b.bin")) == expected


def test_a_store_that_does_not_answer_is_no_damaged_dataset(
    remote: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> list[Exception]:
        return [TimeoutError("no answer")]

    monkeypatch.setattr(remote._fs, "cat_ranges", away)
    assert message_of(remote, whole("a.bin")) == (
        "memory://storage-test/a.bin cannot be read: no answer. Check its permissions and the "
        "network, then try again"
    )


def test_a_server_that_sends_whole_files_is_no_damaged_dataset(
    remote: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote._fs, "cat_ranges", lambda *_, **__: [CONTENT])
    assert message_of(remote, whole("a.bin", 50, 90)) == (
        "memory://storage-test/a.bin: 200 bytes came where 40 were asked for: its server knows no "
        "ranges. Serve the dataset by one that does, or copy it to a disk"
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError("Forbidden"), "Forbidden"),
        (TimeoutError(), "TimeoutError"),  # as fsspec raises it
        (RuntimeError("500\nServer Error"), "500\\nServer Error"),  # aiohttp's is no OSError
    ],
)
def test_a_small_file_that_cannot_be_read_is_told_with_what_to_look_at(
    remote: Storage, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def refuse(path: str) -> bytes:
        raise error

    monkeypatch.setattr(remote._fs, "cat_file", refuse)
    assert catch_message(FormatError, remote.read, "manifest.json") == (
        f"memory://storage-test/manifest.json cannot be read: {reason}. Check its permissions and "
        "the network, then try again"
    )


def test_maps_once_let_go_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metaio.format.storage._MAX_MAPS", 2)
    names = [f"{number}.bin" for number in range(4)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes([number]) * len(CONTENT))
    storage = Storage(str(tmp_path))
    first = storage.read_windows([whole(name) for name in names])
    again = storage.read_windows([whole(name) for name in names])
    assert len(storage._maps) == 2
    for windows in (first, again):  # who still reads from a map holds it
        assert [window.view(7, 8)[0] for window in windows] == [0, 1, 2, 3]


def test_pages_stay_up_to_the_bound_and_leave_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    page = mmap.PAGESIZE
    monkeypatch.setattr("metaio.format.storage._MAX_RESIDENT_BYTES", 3 * page)
    left: list[tuple[int, int]] = []

    class Mapped:
        path = "a.bin"

        def madvise(self, advice: int, first: int, length: int) -> None:
            assert advice == mmap.MADV_DONTNEED
            left.append((first, length))

    resident, mapped = _ResidentBytes(), Mapped()
    for _ in range(2):  # epochs go round: the first pages stay
        resident.keep_or_release(mapped, 10, 3 * page + 5)  # type: ignore[arg-type]
        resident.keep_or_release(mapped, 4 * page, 6 * page)  # type: ignore[arg-type]
        resident.keep_or_release(mapped, 10, page - 1)  # type: ignore[arg-type]
    assert left == [(4 * page, 2 * page)] * 2
