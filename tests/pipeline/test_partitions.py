"""Which partitions are closed: by _SUCCESS, by age, or as they are."""

import os
import threading
import time
from pathlib import Path

import pytest

from gmeta.pipeline.log_partitions import QuarantineChecks, closed_partitions, sort_partitions
from metaio.stream.taken_files import hash_file

LONG_AGO_S = 1_000_000_000


def names(pattern: str, closed_after_s: float = 0.0) -> list[tuple[str, int]]:
    found = closed_partitions(pattern, closed_after_s)
    return [(Path(one.name).name, len(one.files)) for one in found]


def test_a_folder_is_closed_by_success_or_by_age(tmp_path: Path) -> None:
    for name in ("day=1", "day=2", "day=3", "_tmp"):
        (tmp_path / name / "hour=1").mkdir(parents=True)
        for file in ("a.parquet", "_b.parquet", ".c.parquet", "hour=1/d.parquet"):
            (tmp_path / name / file).touch()
    (tmp_path / "day=1" / "_SUCCESS").touch()
    (tmp_path / "day=4").mkdir()
    (tmp_path / "day=4" / "_SUCCESS").touch()  # closed, with nothing in it
    pattern = f"{tmp_path}/*"
    assert names(pattern) == [("day=1", 2)]
    for path in (tmp_path / "day=3").rglob("*"):
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    assert names(pattern, 3_600.0) == [("day=1", 2), ("day=3", 2)]
    os.utime(tmp_path / "day=3" / "a.parquet")  # written to again
    assert names(pattern, 3_600.0) == [("day=1", 2)]


def test_a_file_is_whole_as_it_is_there_unless_an_age_is_asked_for(tmp_path: Path) -> None:
    for name in ("b.parquet", "a.parquet", "_c.parquet"):
        (tmp_path / name).touch()
    assert names(f"{tmp_path}/*.parquet") == [("a.parquet", 1), ("b.parquet", 1)]
    assert names(f"{tmp_path}/*.parquet", 3_600.0) == []


def test_what_was_written_in_the_future_is_told_and_not_taken(tmp_path: Path) -> None:
    """By a machine whose clock is wrong: it would be closed in some years, and by then be late."""
    (tmp_path / "day=1").mkdir()
    part = tmp_path / "day=1" / "a.parquet"
    part.touch()
    os.utime(part, (time.time() + 10 * 86_400,) * 2)
    found = closed_partitions(f"{tmp_path}/*", 3_600.0)
    log = sort_partitions(found, set(), [], {})
    assert not log.waiting
    assert log.refused[str(part)].startswith("it was written 10.0 days from now, so that")
    assert not sort_partitions(
        found, {str(part)}, [], {}
    ).refused  # or the own clock went back since
    (tmp_path / "day=1" / "_SUCCESS").touch()
    assert sort_partitions(closed_partitions(f"{tmp_path}/*", 3_600.0), set(), [], {}).waiting


def test_links_to_files_are_files(tmp_path: Path) -> None:
    (tmp_path / "real.csv").touch()
    (tmp_path / "logs" / "day=1").mkdir(parents=True)
    for name in ("a.csv", "_SUCCESS"):
        (tmp_path / "logs" / "day=1" / name).symlink_to(tmp_path / "real.csv")
    (tmp_path / "logs" / "day=1" / "elsewhere").symlink_to(tmp_path)
    (found,) = closed_partitions(f"{tmp_path}/logs/*", 0.0)
    assert found.files == (f"{tmp_path}/logs/day=1/a.csv",)


def test_a_glob_of_another_file_system_names_whole_urls() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe("/logs/day=1/a.parquet", b"x")
    fs.pipe("/logs/day=1/_SUCCESS", b"")
    (found,) = closed_partitions("memory://logs/day=*", 0.0)
    assert found.files == ("memory:///logs/day=1/a.parquet",)


def test_partitions_of_a_store_are_listed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    fs, both = fsspec.filesystem("memory"), threading.Barrier(2, timeout=60)
    for day in (1, 2):
        fs.pipe(f"/hours/hour={day}/a.parquet", b"x")
        fs.pipe(f"/hours/hour={day}/_SUCCESS", b"")
    find = type(fs).find

    def once_both_are_asked(self: object, path: str, **options: object) -> object:
        if path.startswith("/hours/hour="):  # not where the glob is looked for
            both.wait()
        return find(self, path, **options)

    monkeypatch.setattr(type(fs), "find", once_both_are_asked)
    monkeypatch.setattr(type(fs), "async_impl", True)  # as clients of stores are
    assert names("memory://hours/hour=*") == [("hour=1", 1), ("hour=2", 1)]


def test_a_client_of_one_connection_is_one_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe("/one/day=1/a.parquet", b"x")
    fs.pipe("/one/day=1/_SUCCESS", b"")
    find = type(fs).find

    def asked_here(self: object, path: str, **options: object) -> object:
        assert threading.current_thread() is threading.main_thread()
        return find(self, path, **options)

    monkeypatch.setattr(type(fs), "find", asked_here)
    assert names("memory://one/day=*") == [("day=1", 1)]


def test_a_note_holds_where_a_store_says_another_size_than_was_read() -> None:
    """Some know none, or that of the file as it is packed for the way."""
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe("/logs/a.parquet", b"refused")
    file = hash_file("memory:///logs/a.parquet")
    note = {"files": [{**file._asdict(), "num_bytes": 99}]}
    noted = QuarantineChecks()
    assert noted.notes_in_force([note], ()) == [note]
    fs.pipe("/logs/a.parquet", b"is mended")
    assert noted.notes_in_force([note], ()) == []
