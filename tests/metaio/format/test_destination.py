"""Where a dataset appears: by one rename on a disk, by its manifest elsewhere, from one writer."""

import errno
import fcntl
import os
import socket
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from metaio import DataError
from metaio.format.atomic_folder import (
    copy_folder,
    find_unfinished,
    open_destination,
    open_exclusive_folder,
    open_temporary_folder,
    replace_folder,
)
from tests.support.full_disk import files_of_at_most

MANIFEST = "manifest.json"


def fill(folder: Path, *names: str) -> None:
    for name in (*names, MANIFEST):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


@pytest.fixture
def url() -> str:
    """Of this run alone: what is built for it lies in the machine's temporary folder."""
    return f"memory://{uuid.uuid4().hex}/data"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a remote store was asked to change, in order."""
    asked: list[str] = []
    kind = type(fsspec.filesystem("memory"))
    put, remove = kind.put_file, kind.rm_file

    def noted_put(fs: Any, source: str, target: str, **more: Any) -> None:
        asked.append(f"put {Path(target).name}")
        put(fs, source, target, **more)

    def noted_remove(fs: Any, path: str) -> None:
        asked.append(f"remove {Path(path).name}")
        remove(fs, path)

    monkeypatch.setattr(kind, "put_file", noted_put)
    monkeypatch.setattr(kind, "rm_file", noted_remove)
    return asked


def test_a_remote_dataset_is_replaced_behind_a_missing_manifest(url: str, told: list[str]) -> None:
    """A reader sees the old one, none or the new one, whenever it looks."""
    with open_destination(url, overwrite=False) as (folder, is_renamed):
        assert not is_renamed
        fill(folder, "train/b", "train/a")
    assert told == ["put a", "put b", f"put {MANIFEST}"]
    told.clear()
    with open_destination(url, overwrite=True) as (folder, _):
        fill(folder, "train/a")
    assert told == [f"remove {MANIFEST}", "put a", f"put {MANIFEST}"]
    with pytest.raises(DataError, match="holds a dataset already"), open_destination(url, False):
        pass


def test_nothing_is_uploaded_of_what_failed(url: str, told: list[str]) -> None:
    def fail() -> None:
        with open_destination(url, False) as (folder, _):
            fill(folder, "train/a")
            raise ValueError("row 3")

    with pytest.raises(ValueError, match="row 3"):
        fail()
    assert told == []
    assert find_unfinished(url) is None


def test_a_folder_takes_the_place_of_another_and_of_what_a_crash_left(tmp_path: Path) -> None:
    for name in ("new", "data", ".data.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "says").write_text(name)
    replace_folder(tmp_path / "new", tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert (tmp_path / "data" / "says").read_text() == "new"


def test_a_writer_begins_with_an_empty_folder_and_leaves_none(tmp_path: Path) -> None:
    partial = tmp_path / ".data.partial"
    partial.mkdir()
    (partial / "half").write_text("of a killed writer")
    with open_exclusive_folder(partial, "data") as folder:
        assert list(folder.iterdir()) == []
        (folder / "more").touch()
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    partial = tmp_path / ".data.partial"
    with open_exclusive_folder(partial, "data") as folder:
        (folder / "mine").touch()
        with pytest.raises(DataError) as caught, open_exclusive_folder(partial, "data"):
            pass
        assert str(caught.value) == (
            f"process {os.getpid()} on {socket.gethostname()} is writing data. Wait for it, or "
            "choose another place"
        )
        assert (folder / "mine").exists()


def test_what_a_killed_process_unpacked_goes_with_the_next_one_and_what_is_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pipe = tmp_path / "metaio-passing-pipe"
    os.mkfifo(pipe)  # to open it would wait for a writer for ever
    with open_temporary_folder() as used:
        killed = Path(f"{used}-killed")
        (killed / "unpacked").mkdir(parents=True)
        with open_temporary_folder() as own:
            assert {str(path) for path in tmp_path.iterdir()} == {used, own, str(pipe)}
    assert list(tmp_path.iterdir()) == [pipe]


def test_what_another_writer_finished_just_before_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "data"

    def finished_meanwhile(partial: Path, name: str) -> Any:
        out.mkdir()
        (out / "manifest.json").write_text("of another")
        return open_exclusive_folder(partial, name)

    monkeypatch.setattr("metaio.format.atomic_folder.open_exclusive_folder", finished_meanwhile)
    with pytest.raises(DataError) as caught, open_destination(str(out), False) as (folder, _):
        (folder / "manifest.json").write_text("of this one")
    assert str(caught.value) == (
        f"{out} holds a dataset already. Choose another place, or pass --overwrite to replace it"
    )
    assert (out / "manifest.json").read_text() == "of another"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_who_locked_a_file_that_the_last_writer_has_removed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock would keep nobody out: the next writer makes the file anew."""
    partial, lock = tmp_path / ".data.partial", fcntl.flock

    def late(file: Any, kind: int) -> None:
        (tmp_path / ".data.lock").unlink()  # between the opening and the locking
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(DataError, match="another process is writing"):
        open_exclusive_folder(partial, "data").__enter__()
    assert not partial.exists()


def test_a_removed_lock_file_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, lock, file = tmp_path / ".data.partial", fcntl.flock, tmp_path / ".data.lock"
    left = 3

    def late(opened: Any, kind: int) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            file.unlink()
        lock(opened, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with open_exclusive_folder(partial, "data"):
        assert left == -1
        with pytest.raises(DataError, match=f"process {os.getpid()} on .* is writing data"):
            open_exclusive_folder(partial, "data").__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(file: Any, kind: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", without)
    with open_exclusive_folder(tmp_path / ".data.partial", "data") as folder:
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (errno.ENOSPC, "No space left on device. Free space or choose another place"),
        (errno.EDQUOT, "Disk quota exceeded. Free space or choose another place"),
        (
            errno.EIO,
            "Input/output error. The disk, or what leads to it, fails: look into the system's log",
        ),
        (errno.EACCES, "Permission denied. Look at the place and its permissions"),
    ],
)
def test_a_disk_that_refuses_is_told_with_the_file(tmp_path: Path, code: int, what: str) -> None:
    with (
        pytest.raises(DataError) as caught,
        open_exclusive_folder(tmp_path / ".data.partial", "s3://bucket/data"),
    ):
        raise OSError(code, os.strerror(code))
    assert str(caught.value) == f"s3://bucket/data could not be written: [Errno {code}] {what}"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_copied_whole_or_the_first_file_that_fails_is_told(tmp_path: Path) -> None:
    fill(tmp_path / "one", "a/b", "c")
    copy_folder(tmp_path / "one", tmp_path / "two")
    assert sorted(path.name for path in (tmp_path / "two").rglob("*")) == ["a", "b", "c", MANIFEST]
    with files_of_at_most(5), pytest.raises(OSError, match="File too large") as caught:
        copy_folder(tmp_path / "one", tmp_path / "three")
    assert caught.value.errno == errno.EFBIG  # shutil.copytree has none, and a list for a text
