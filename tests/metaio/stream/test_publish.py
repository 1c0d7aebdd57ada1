"""A stream at a URL: readers see whole increments, and a disk that was lost goes on from there."""

import errno
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from metaio import DataError
from metaio.format.inspection import find_damage
from metaio.stream.chain import list_increment_numbers, open_stream
from metaio.stream.publish import publish_stream
from tests.metaio.stream.logs import append, log, schema
from tests.support.commands import succeed
from tests.support.refusals import catch_message


@pytest.fixture
def url() -> Iterator[str]:
    """An empty place on an object store."""
    store, bucket = fsspec.filesystem("memory"), uuid.uuid4().hex
    yield f"memory://{bucket}/clicks"
    store.rm(f"/{bucket}", recursive=True)


def test_a_copy_has_what_the_stream_has_and_can_be_extended(tmp_path: Path, url: str) -> None:
    stream, back = tmp_path / "s", tmp_path / "back" / "s"
    told = []
    for day in (0, 1):
        append(stream, log(day), schema=schema())
        told.append(publish_stream(stream, url))
    assert [*told, publish_stream(stream, url)] == [[1], [2], []]
    there = open_stream(url)
    assert there.records == open_stream(str(stream)).records
    assert [find_damage(there.dataset(number)) for number in there.numbers] == [[], []]
    fs, root = fsspec.core.url_to_fs(url)
    fs.get(f"{root}/", str(back), recursive=True)
    assert [path.name for path in (back / "state").iterdir()] == ["000002"]
    records = [append(one, log(2), f"{tmp_path}/2.parquet") for one in (stream, back)]
    assert records[0] == records[1]


def test_an_increment_is_there_once_all_of_it_is(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = tmp_path / "s"
    append(stream, log(0, rows=150), schema=schema())
    publish_stream(stream, url)
    append(stream, log(1, rows=150))
    store = type(fsspec.filesystem("memory"))
    put, seen = store.put_file, []
    for last in range(60):
        count = 0

        def failing(self: Any, *arguments: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count > last:  # noqa: B023 - called before it changes
                raise OSError(errno.ECONNRESET, "connection reset")
            return put(self, *arguments, **more)

        with monkeypatch.context() as patched:
            patched.setattr(store, "put_file", failing)
            try:
                publish_stream(stream, url)
                is_done = True
            except OSError:
                is_done = False
        seen.append(open_stream(url).numbers)
        if is_done:
            break
    assert seen == [[1]] * (len(seen) - 1) + [[1, 2]]
    assert len(seen) > 3
    assert find_damage(open_stream(url).dataset(2)) == []


def test_another_stream_is_refused(tmp_path: Path, url: str) -> None:
    for name, seed in (("s", 0), ("other", 1)):
        append(tmp_path / name, log(0, rows=150, seed=seed), f"{name}.parquet", schema=schema())
    publish_stream(tmp_path / "s", url)
    assert catch_message(DataError, publish_stream, tmp_path / "other", url) == (
        f"{url} has an increment 1 that {tmp_path / 'other'} has not: it is of another stream, or "
        "was taken back here. Choose another URL, or remove it there"
    )
    assert list_increment_numbers(url) == [1]


def test_the_command_copies_a_stream_to_a_disk_too(tmp_path: Path) -> None:
    stream, url = tmp_path / "s", f"file://{tmp_path}/copy"
    append(stream, log(0, rows=150), schema=schema())
    done = succeed("channel", "publish", stream, url)
    assert done.stderr == f"published: increment 1 of {stream} at {url}  (1 increment copied)\n"
    assert open_stream(url).records == open_stream(str(stream)).records
    succeed("inspect", url)


def test_a_link_in_a_stream_is_not_published(tmp_path: Path, url: str) -> None:
    stream, secret = tmp_path / "s", tmp_path / "credentials"
    secret.write_text("key")
    append(stream, log(0), schema=schema())
    (link := stream / "increments/000001/train/notes").symlink_to(secret)
    assert catch_message(DataError, publish_stream, stream, url) == (
        f"{link} is a link: what it points to would be copied. Remove it"
    )
    link.unlink()
    assert publish_stream(stream, url) == [1]
