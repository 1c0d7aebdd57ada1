"""A file is there whole, or as it was before."""

import os
from pathlib import Path

import pytest

from gmeta.platform.files.atomic_write import open_atomically, write_atomically


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_write_replaces_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    write_atomically(target, b"a longer old one")
    write_atomically(target, b"new")
    assert contents(tmp_path) == {"report.html": b"new"}


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    write_atomically(target, b"old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left on device"):
        write_atomically(target, b"new")
    assert contents(tmp_path) == {"report.html": b"old"}


def test_what_fails_half_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "rows.parquet"
    write_atomically(target, b"old")

    def fail_half_way() -> None:
        with open_atomically(target) as file:
            file.write(b"half of it")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert contents(tmp_path) == {"rows.parquet": b"old"}


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    target = tmp_path / "report[1].html"
    for name in (".report[1].html.1.tmp", ".report1.html.1.tmp"):
        (tmp_path / name).write_bytes(b"half of it")
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / ".report[1].html.3.tmp").write_bytes(b"")  # just opened
    mine, other = (tmp_path / f".report[1].html.{pid}.tmp" for pid in (os.getpid(), 2))
    with open_atomically(target) as file:
        file.write(b"first")
        file.flush()
        os.utime(mine, (0, 0))
        mine.rename(other)
        write_atomically(target, b"second")  # while somebody else writes it
        other.rename(mine)
    assert contents(tmp_path) == {
        target.name: b"first",
        ".report1.html.1.tmp": b"half of it",
        ".report[1].html.3.tmp": b"",
    }


def test_a_file_is_readable_for_whom_others_of_its_writer_are(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    write_atomically(tmp_path / "whole", b"")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode
