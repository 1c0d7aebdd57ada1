"""A channel at a URL: readers have the version before or the new one, wherever it stopped."""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import gmeta
from gmeta.errors import GMetaError, UserError
from gmeta.serving.channel import load_failure as trouble
from gmeta.serving.channel import remote_channel as remote
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.current_version import current_at
from gmeta.serving.channel.materialize import materialize_version
from gmeta.serving.channel.remote_channel import channel_at, publish
from gmeta.serving.channel.version_cache import lock_folder
from gmeta.serving.channel.version_packing import pack
from gmeta.serving.channel.version_retention import prune, remove_others
from metaio.format import atomic_folder as destination
from tests.serving.channel.models import Model, content
from tests.serving.channel.test_follow import QUERY, ROWS
from tests.serving.server.serving import post, request_of, service_of, values
from tests.support.commands import gmeta as gmeta_command
from tests.support.commands import succeed
from tests.support.full_disk import files_of_at_most
from tests.support.refusals import catch_message

SIZES = {"item": 3_000, "city": 30}


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty place at a URL: of an object store, and of a disk, where files come in parts."""
    if request.param == "file":
        yield f"file://{tmp_path}/store/clicks"
        return
    store, bucket = fsspec.filesystem("memory"), uuid.uuid4().hex
    yield f"memory://{bucket}/clicks"
    if store.exists(f"/{bucket}"):
        store.rm(f"/{bucket}", recursive=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A channel with a full version and two deltas."""
    root, rng = tmp_path_factory.mktemp("made"), np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GMETA_CACHE", str(root / "cache"))
        channel, model = Channel(root / "channel"), Model.of(SIZES)
        for number in (1, 2, 3):
            pack(channel, model.write(root / str(number)), root / f"{number}.packed", False)
            channel.promote(root / f"{number}.packed", {"verdict": "promote", "number": number})
            model = model.changed(rng)
    assert [channel.version(number).kind for number in (1, 2, 3)] == ["full", "delta", "delta"]
    return channel.root


@pytest.fixture
def channel(made: Path, tmp_path: Path) -> Channel:
    """A copy of it, whose versions a test may move, and which serves version 3."""
    return Channel(shutil.copytree(made, tmp_path / "channel"))


def served_model(place: str | Path, cache: Path) -> dict[str, bytes]:
    """Every file of the model that a channel serves, as a machine with this cache sees it."""
    found = channel_at(place, cache)
    return content(materialize_version(found, found.require_current().number, cache))


def store_of(url: str) -> tuple[Any, str]:
    fs, root = fsspec.core.url_to_fs(url)
    return fs, root


def test_every_machine_has_the_served_model(channel: Channel, url: str, tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    told = []
    for number in (1, 3, 2, 3):
        channel.rollback(number)
        told.append(publish(channel, url))
        assert current_at(url) == channel.require_current()
        expected = served_model(channel.root, tmp_path / "here")
        assert served_model(url, other) == expected
    assert served_model(url, own) == expected
    assert told == [[1, 2, 3], [], [], []]  # a version goes there once


def test_a_copy_holds_what_it_serves_alone(channel: Channel, url: str, tmp_path: Path) -> None:
    for number, expected in ((3, [1, 2, 3]), (2, [1, 2]), (1, [1])):
        channel.rollback(number)
        publish(channel, url)
        copy = channel_at(url, tmp_path / "own")
        assert copy.numbers() == expected
        assert not list((copy.root / "versions").glob(".*"))


def test_what_the_channel_removes_goes_too(channel: Channel, url: str, tmp_path: Path) -> None:
    publish(channel, url)
    for number in (4, 5):
        channel.promote(Model.of(SIZES, seed=number).write(tmp_path / str(number)))
    assert prune(channel, 1) == [3, 2, 1]
    assert publish(channel, url) == [4, 5]
    assert left_at(url) == {"00000004", "00000005"}


def broken(monkeypatch: pytest.MonkeyPatch, url: str, last: int) -> None:
    """Let the file system fail at every write behind `last`, the rename of a folder included."""
    kind, count = type(store_of(url)[0]), 0

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count > last:
                raise OSError(errno.ECONNRESET, "connection reset")
            return original(*arguments, **more)

        return write

    for name in ("put_file", "rm_file", "rm"):
        monkeypatch.setattr(kind, name, failing(getattr(kind, name)))
    if url.startswith("file"):
        monkeypatch.setattr(destination, "replace_folder", failing(destination.replace_folder))
        monkeypatch.setattr(remote, "write_atomically", failing(remote.write_atomically))


@pytest.mark.parametrize("removes", [False, True])
def test_a_reader_sees_the_old_or_the_new_model_after_every_prefix_of_the_writes(
    channel: Channel, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removes: bool
) -> None:
    """A delta comes over version 2, or a whole version 4 in the place of version 1."""
    before = Channel(shutil.copytree(channel.root, tmp_path / "before"))
    if removes:
        before.rollback(1)
        remove_others(before, [1])
        channel.promote(Model.of(SIZES, seed=9).write(tmp_path / "4"))
        channel.rollback(4)  # so that no version before it is what a rollback goes back to
        remove_others(channel, [4])
    else:
        before.rollback(2)
        remove_others(before, [1, 2])
    old, new = (served_model(one.root, tmp_path / "here") for one in (before, channel))
    seen: list[bool] = []
    failures: list[str] = []
    is_done = False
    while not is_done:
        place = f"{url}/{len(seen)}"
        publish(before, place)
        channel_at(place, tmp_path / "reader")
        with monkeypatch.context() as patched:
            broken(patched, place, len(seen))
            try:
                publish(channel, place)
                is_done = True
            except GMetaError as error:
                failures.append(str(error))
        found = served_model(place, tmp_path / "reader")
        assert found == served_model(place, tmp_path / "fresh")
        assert found in (old, new)
        seen.append(found == new)
        publish(channel, place)
        assert current_at(place) == channel.require_current()
        assert left_at(place) == {path.name for path in (channel.root / "versions").iterdir()}
    assert all("connection reset" in failure for failure in failures)
    assert seen == sorted(seen)  # behind the pointer it is new for good
    assert len(seen) >= (4 if url.startswith("file") else 8)
    assert (seen[0], seen[-1]) == (False, True)


def left_at(url: str) -> set[str]:
    """The versions of which any file is at a URL."""
    fs, root = store_of(url)
    fs.invalidate_cache()
    names = {path.rsplit("/versions/", 1)[1].split("/")[0] for path in fs.find(f"{root}/versions")}
    return {name for name in names if not name.startswith(".")}


@pytest.mark.parametrize("name", ["current.json", "versions/00000003/delta.json"])
def test_a_description_far_too_large_is_refused(
    channel: Channel, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    publish(channel, url)
    monkeypatch.setattr("gmeta.serving.channel.current_version.MAX_DESCRIPTION_BYTES", 9_999)
    with fsspec.open(f"{url}/{name}", "wb") as file:
        file.write(b" " * 10_000)
    message = catch_message(GMetaError, channel_at, url, tmp_path / "copy")
    assert f"{name} has more than 9,999 bytes, the most that a description may have" in message


def test_a_torn_pointer_leaves_the_old_version_and_is_mended(channel: Channel, url: str) -> None:
    channel.rollback(1)
    publish(channel, url)
    fs, root = store_of(url)
    with gmeta.follow(url, every_s=0) as follower:
        before = follower.model.predict(QUERY).tolist()
        channel.rollback(3)
        pointer = (channel.root / "current.json").read_bytes()
        for length in (0, 1, len(pointer) // 2, len(pointer) - 3):
            fs.pipe_file(f"{root}/current.json", pointer[:length])
            assert not follower.check()
            assert follower.refused.startswith(f"{url}/current.json is not JSON: it was cut short")
            assert f"(version 1 of {url} serves on, promoted " in follower.refused
        assert follower.model.predict(QUERY).tolist() == before
        publish(channel, url)
        assert follower.check()
        assert (follower.served.number, follower.refused) == (3, "")


def test_a_damaged_version_is_not_served_and_tried_again_later(
    channel: Channel, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel.rollback(1)
    publish(channel, url)
    fs, root = store_of(url)
    path = f"{root}/versions/00000003/layers.safetensors"
    whole = fs.cat_file(path)
    with gmeta.follow(url, every_s=0) as follower:
        channel.rollback(3)
        publish(channel, url)
        for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
            fs.pipe_file(path, damaged)
            monkeypatch.setattr(trouble, "RETRY_S", 0.0)
            assert not follower.check()
            name = channel.require_current().checksum[:12]
            told = f"version 3-{name} did not come whole from {url}: "
            assert follower.refused.startswith(told)
            assert follower.served.number == 1
            # A version that could not be loaded is not brought again every two seconds.
            monkeypatch.setattr(trouble, "RETRY_S", 1e6)
            assert not follower.check()
            fs.pipe_file(path, whole)
            assert not follower.check()
            follower._load_failure.clear()
        assert follower.check()
        assert follower.served.number == 3


def test_a_copy_damaged_here_is_brought_anew(channel: Channel, url: str, tmp_path: Path) -> None:
    publish(channel, url)
    expected = served_model(url, tmp_path / "own")
    copy = channel_at(url, tmp_path / "own")
    for number in (1, 3):
        layers = copy.folder_of(number) / "layers.safetensors"
        layers.write_bytes(layers.read_bytes()[:-1])
    shutil.rmtree(copy.folder_of(2))
    for made_whole in (tmp_path / "own").glob("[0-9a-f]*"):
        shutil.rmtree(made_whole)
    assert served_model(url, tmp_path / "own") == expected


def test_a_version_that_the_disk_did_not_take_leaves_nothing_behind(
    channel: Channel, url: str, cache: Path
) -> None:
    channel.rollback(1)
    publish(channel, url)
    with gmeta.follow(url, every_s=0) as follower:
        for number, limit in ((2, 1_000), (2, 20_000)):
            channel.rollback(number)
            publish(channel, url)
            with files_of_at_most(limit):
                assert not follower.check()
            assert "[Errno 27] File too large" in follower.refused
            assert list(cache.rglob(".*.partial")) == []
            follower._load_failure.clear()
        (copy,) = (cache / "channels").iterdir()
        (own,) = (path for path in cache.iterdir() if path.name != "channels")
        for killed in (copy / "versions" / ".00000002.partial", own / ".0123.partial"):
            (killed / "half").mkdir(parents=True)
        channel.rollback(3)
        publish(channel, url)
        assert follower.check()
        assert follower.served.number == 3
    assert list(cache.rglob(".*.partial")) == []


def test_the_server_reloads_from_a_url_and_says_when_it_cannot(
    channel: Channel, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel.rollback(1)
    publish(channel, url)
    with service_of(url) as service:
        before = values(post(service, request_of(ROWS)))
        assert not service.reload()
        channel.rollback(3)
        publish(channel, url)
        with monkeypatch.context() as patched:

            def unreachable(self: Any, path: str, **more: Any) -> bytes:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

            patched.setattr(type(store_of(url)[0]), "cat_file", unreachable)
            assert not service.reload()
            assert service.status()["refused"] == {
                "version": "",
                "reason": f"{url} cannot be read or written: [Errno 111] Connection refused. Look "
                "at the place, the credentials and the space on the disk",
            }
        assert values(post(service, request_of(ROWS))).tolist() == before.tolist()
        assert service.reload()
        assert service.status()["refused"] is None
        assert service.loaded.version == channel.require_current().checksum[:12]
        assert np.abs(values(post(service, request_of(ROWS))) - before).max() > 0


def test_a_channel_is_published_to_its_place(channel: Channel, url: str, tmp_path: Path) -> None:
    publish(channel, url)
    other = Channel(tmp_path / "other")
    other.promote(Model.of(SIZES, seed=3).write(tmp_path / "model"))
    message = catch_message(UserError, publish, other, url)
    name = f"3-{channel.require_current().checksum[:12]}"
    assert message == (
        f"{url} holds another channel, which serves version {name}: no version of {other.root} is "
        "that. Choose another URL, or empty that one"
    )
    assert catch_message(UserError, channel_at, f"{url}/none", tmp_path / "own") == (
        f"{url}/none holds no channel: there is no current.json. "
        f"Run: gmeta channel publish CHANNEL {url}/none"
    )


def test_versions_of_another_channel_without_a_pointer_are_replaced(
    channel: Channel, url: str, tmp_path: Path
) -> None:
    """Sizes alone do not tell whose a version is."""
    other = Channel(tmp_path / "other")
    other.promote(Model.of(SIZES, seed=3).write(tmp_path / "model"))
    publish(other, url)
    fs, root = store_of(url)
    fs.rm_file(f"{root}/current.json")
    assert publish(channel, url) == [1, 2, 3]
    assert served_model(url, tmp_path / "own") == served_model(channel.root, tmp_path / "here")
    # Also a delta by a full version: what described it must not stay beside what does now.
    other.promote(Model.of(SIZES, seed=4).write(tmp_path / "second"))
    fs.rm_file(f"{root}/current.json")
    assert publish(other, url) == [1, 2]
    assert served_model(url, tmp_path / "third") == content(tmp_path / "second")


@pytest.mark.parametrize("stays", [False, True])
def test_a_version_is_removed_before_the_new_one_only_where_files_would_stay(
    channel: Channel, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    """Nobody can read it from then until the new one is whole."""
    publish(channel, url)
    fs, root = store_of(url)
    damaged = f"{root}/versions/00000003/layers.safetensors"
    fs.pipe_file(damaged, fs.cat_file(damaged)[:-1])
    if stays:
        fs.pipe_file(f"{root}/versions/00000003/table-00099.safetensors", b"x")
    removed: list[str] = []
    remove = remote.remove_folder

    def recorded(fs: Any, there: str, last: str) -> None:
        removed.append(there)
        remove(fs, there, last)

    monkeypatch.setattr(remote, "remove_folder", recorded)
    assert publish(channel, url) == [3]
    is_swapped = url.startswith("file")  # a folder on a disk
    assert removed == ([f"{root}/versions/00000003"] if stays and not is_swapped else [])
    assert publish(channel, url) == []
    assert served_model(url, tmp_path / "own") == served_model(channel.root, tmp_path / "here")


def test_the_command_publishes_and_refuses_no_channel(channel: Channel, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    done = succeed("channel", "publish", channel.root, url, "--json")
    assert json.loads(done.stdout)["copied"] == [1, 2, 3]
    name = f"3-{channel.require_current().checksum[:12]}"
    wanted = f"published: version {name} of {channel.root} at {url}  (3 versions copied)\n"
    assert done.stderr == wanted
    channel.rollback(2)
    publish(channel, url)
    done = succeed("inspect", url, "--verify", "--json")
    found = json.loads(done.stdout)
    assert (found["kind"], found["path"], found["serves"]) == ("channel", url, 2)
    assert (found["versions"], found["decisions"]) == ([1, 2], channel.promotions())
    empty = tmp_path / "empty"
    done = gmeta_command("channel", "publish", empty, url)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {empty} is no channel and no stream: there is neither current.json nor "
        "stream.json. Give a folder that `gmeta channel promote` or `gmeta prepare --extend` "
        "wrote\n"
    )
    assert not empty.exists()


def test_a_cache_on_read_only_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's root often is."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refused)
    told = "cannot be written: Read-only file system. Set GMETA_CACHE to a folder that can"
    with pytest.raises(UserError, match=told), lock_folder(tmp_path / "cache"):
        pass


def test_only_what_a_version_lists_is_published(channel: Channel, url: str, tmp_path: Path) -> None:
    """Who can write into the channel's folder would have the publisher's files copied to others."""
    secret = tmp_path / "credentials"
    secret.write_text("key")
    for number in (1, 2):
        (channel.folder_of(number) / "notes").symlink_to(secret)
    (channel.folder_of(3) / "vocabulary").mkdir()
    (channel.folder_of(3) / "vocabulary" / "item.parquet").write_bytes(b"unlisted")
    assert publish(channel, url) == [1, 2, 3]
    fs, root = store_of(url)
    left = {Path(path).name for path in fs.find(root)}
    assert left & {"notes", "item.parquet"} == set()
    assert publish(channel, url) == []
    assert served_model(url, tmp_path / "own") == served_model(channel.root, tmp_path / "here")


def test_what_serves_is_published_whole_or_not_at_all(
    channel: Channel, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    layers = channel.folder_of(2) / "layers.safetensors"
    layers.write_bytes(layers.read_bytes()[:-1] + b"x")
    told = f"{layers} differs from the checksum in delta.json: it was altered. "
    assert catch_message(GMetaError, publish, channel, url).startswith(told)
    assert not store_of(url)[0].exists(f"{store_of(url)[1]}/current.json")
    channel.rollback(1)
    assert publish(channel, url) == [1, 3]
    assert f"version 2 of {channel.root} is not published: {told}" in caplog.text


def test_a_file_of_another_size_than_is_listed_is_not_brought(
    channel: Channel, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(channel, url)
    fs, root = store_of(url)
    path = f"{root}/versions/00000001/layers.safetensors"
    fs.pipe_file(path, bytes(1 << 20))
    brought: list[str] = []
    get = type(fs).get_file

    def noted(self: Any, there: str, *arguments: Any, **more: Any) -> Any:
        brought.append(Path(there).name)
        return get(self, there, *arguments, **more)

    monkeypatch.setattr(type(fs), "get_file", noted)
    with pytest.raises(GMetaError, match=r"layers.safetensors has 1,048,576 bytes, .* are listed"):
        channel_at(url, tmp_path / "own")
    assert "layers.safetensors" not in brought
