"""`gmeta.follow` and `gmeta serve CHANNEL`: whole versions, exchanged while threads predict."""

import fcntl
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

import gmeta
from gmeta.access.log import LOGGER_NAME
from gmeta.errors import UserError
from gmeta.platform.files import checksums
from gmeta.platform.files.checksums import FileChecksum, describe_file
from gmeta.serving.channel import follower as follow_module
from gmeta.serving.channel import load_failure as trouble
from gmeta.serving.channel.channel import Channel
from gmeta.serving.channel.follower import load_current
from gmeta.serving.channel.version_cache import CACHE_VARIABLE
from gmeta.serving.channel.version_packing import pack
from gmeta.serving.server.version_loader import load_version
from tests.serving.channel.models import Model
from tests.serving.server.serving import get, post, request_of, service_of, values
from tests.support.full_disk import files_of_at_most
from tests.support.refusals import catch_message
from tests.support.waiting import wait_until

SIZES = {"item": 3_000, "city": 30}
SUPPORT = {"item": [1, 2, 3], "city": [4, 5, 6], "price": [0.1, 0.2, 0.3], "click": [1, 0, 1]}
QUERY = {"item": [7, 8], "city": [9, 10], "price": [0.5, 0.6]}
ROWS = pa.table({**QUERY, "user": [1, 1], "click": [0, 0]})


def promote(channel: Channel, model: Model, folder: Path) -> None:
    packed = folder.with_suffix(".packed")
    pack(channel, model.write(folder), packed, overwrite=False)
    channel.promote(packed)


def test_threads_see_one_version_each_through_many_swaps(tmp_path: Path) -> None:
    """Rows and layers of one version together: each of its answers is one that it gives alone."""
    channel, rng = Channel(tmp_path / "channel"), np.random.default_rng(0)
    answers: dict[int, tuple[list[float], list[float]]] = {}
    model = Model.of(SIZES)
    for number in range(1, 5):
        folder = tmp_path / str(number)
        model.tables["item"][7] += 0.5
        model.write(folder.with_suffix(".alone"))
        promote(channel, model, folder)
        alone = gmeta.load(folder.with_suffix(".alone"))
        answers[number] = (
            alone.predict(QUERY).tolist(),
            alone.adapt(SUPPORT).predict(QUERY).tolist(),
        )
        model = model.changed(rng)
    assert len({tuple(before) for before, _ in answers.values()}) == 4
    ended, seen = threading.Event(), set()
    with gmeta.follow(channel.root, every_s=0) as follower, ThreadPoolExecutor(3) as pool:

        def ask() -> None:
            while not ended.is_set():
                served = follower.served
                found = (
                    served.model.predict(QUERY).tolist(),
                    served.model.adapt(SUPPORT).predict(QUERY).tolist(),
                )
                assert found == answers[served.number]
                seen.add(served.number)

        asking = [pool.submit(ask) for _ in range(3)]
        try:
            for swap in range(24):
                channel.rollback(swap % 4 + 1)
                assert follower.check() or swap == 3
                if swap < 4:
                    wait_until(lambda: follower.served.number in seen)
        finally:
            ended.set()
        for each in asking:
            each.result()
    assert seen == {1, 2, 3, 4}


def test_a_thread_takes_up_what_is_promoted(tmp_path: Path) -> None:
    channel, model = Channel(tmp_path / "channel"), Model.of(SIZES)
    promote(channel, model, tmp_path / "1")
    with gmeta.follow(channel.root, every_s=0.01) as follower:
        promote(channel, model.changed(np.random.default_rng(0)), tmp_path / "2")
        wait_until(lambda: follower.served.number == 2)
    assert follower.refused == ""


@contextmanager
def changed(path: Path, content: bytes) -> Iterator[None]:
    """A file that holds something else for a while."""
    before = path.read_bytes()
    path.write_bytes(content)
    yield
    path.write_bytes(before)


def test_a_damaged_delta_leaves_the_old_version_which_says_how_old_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trouble, "RETRY_S", 1e6)
    channel, model = Channel(tmp_path / "channel"), Model.of(SIZES)
    promote(channel, model, tmp_path / "1")
    with gmeta.follow(channel.root, every_s=0, cache=tmp_path / "own") as follower:
        before = follower.model.predict(QUERY).tolist()
        promote(channel, model.changed(np.random.default_rng(0)), tmp_path / "2")
        layers = channel.folder_of(2) / "layers.safetensors"
        whole = layers.read_bytes()
        layers.write_bytes(whole[:-1])
        assert not follower.check()
        refused = f"{layers} has {len(whole) - 1:,} bytes"
        assert follower.refused.startswith(refused)
        assert f"(version 1 of {channel.root} serves on, promoted " in follower.refused
        # Nor is it read again at once because its place was away.
        pointer = channel.root / "current.json"
        with changed(pointer, b"{"), changed(layers, whole):
            assert not follower.check()
            assert "current.json is not JSON" in follower.refused
        with changed(layers, whole):
            assert not follower.check()
            assert follower.refused.startswith(refused)
        assert follower.model.predict(QUERY).tolist() == before
        channel.rollback(1)
        assert not follower.check()
        assert follower.refused == ""
        layers.write_bytes(whole)
        channel.rollback(2)
        assert follower.check()
        assert follower.served.number == 2


def test_a_channel_without_a_version_is_refused(tmp_path: Path) -> None:
    assert catch_message(UserError, gmeta.follow, tmp_path) == (
        f"{tmp_path} is a channel without a version, or none at all. "
        f"Run: gmeta channel promote RUN {tmp_path}"
    )


def test_the_server_reloads_from_a_channel(tmp_path: Path) -> None:
    channel, model = Channel(tmp_path / "channel"), Model.of(SIZES)
    promote(channel, model, tmp_path / "1")
    with service_of(channel.root) as service:
        before = values(post(service, request_of(ROWS)))
        assert not service.reload()
        promote(channel, model.changed(np.random.default_rng(0)), tmp_path / "2")
        assert service.reload()
        assert service.loaded.version == channel.require_current().checksum[:12]
        assert np.abs(values(post(service, request_of(ROWS))) - before).max() > 0
        (channel.folder_of(2) / "model.json").write_text("{")
        channel.rollback(1)
        assert service.reload()
        assert values(post(service, request_of(ROWS))).tolist() == before.tolist()
        assert get(service, "/status").json()["refused"] is None


def test_a_disk_that_is_full_for_a_while_delays_a_version_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    channel, model = Channel(tmp_path / "channel"), Model.of(SIZES)
    promote(channel, model, tmp_path / "1")
    with service_of(channel.root) as service, gmeta.follow(channel.root, every_s=0) as follower:
        promote(channel, model.changed(np.random.default_rng(0)), tmp_path / "2")
        assert channel.version(2).delta is not None
        shutil.rmtree(tmp_path / "cache")
        monkeypatch.setattr(trouble, "RETRY_S", 0.0)
        with files_of_at_most(20_000):
            for _ in range(2):
                assert not service.reload()
                assert not follower.check()
        told = f"{channel.root} cannot be read or written: [Errno 27] File too large: "
        assert service.refused is not None
        assert service.refused[1].startswith(told)
        assert follower.refused.startswith(service.refused[1])
        expected = [LOGGER_NAME, "gmeta.serving.channel.follower"]
        assert [one.name for one in caplog.records] == expected
        page = get(service, "/metrics").text
        assert "gmeta_serve_model_refused 1.0" in page
        assert 'gmeta_serve_reloads_total{result="refused"} 1.0' in page
        assert service.reload()
        assert follower.check()
        assert service.loaded.version == channel.require_current().checksum[:12]
        assert (follower.served.number, follower.refused) == (2, "")
        assert "gmeta_serve_model_refused 0.0" in get(service, "/metrics").text


def test_a_pointer_that_cannot_be_read_for_a_while_is_told_and_read_again(tmp_path: Path) -> None:
    channel, model = Channel(tmp_path / "channel"), Model.of(SIZES)
    promote(channel, model, tmp_path / "1")
    pointer = channel.root / "current.json"
    with service_of(channel.root) as service, gmeta.follow(channel.root, every_s=0) as follower:
        for damage, told in (
            (lambda: pointer.mkdir(), "cannot be read or written: [Errno 21] Is a directory: "),
            (lambda: pointer.write_text("{"), "current.json is not JSON: it was cut short"),
        ):
            model = model.changed(np.random.default_rng(0))
            promote(channel, model, tmp_path / f"{follower.served.number + 1}")
            pointer.rename(tmp_path / "away")
            damage()
            assert not service.reload()
            assert not follower.check()
            assert service.refused is not None
            assert told in service.refused[1]
            assert told in follower.refused
            shutil.rmtree(pointer) if pointer.is_dir() else pointer.unlink()
            (tmp_path / "away").rename(pointer)
            assert service.reload()
            assert follower.check()
            assert (service.refused, follower.refused) == (None, "")


def test_work_in_small_pieces_lets_other_threads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rests = [0.0], []

    def slept(rest_s: float) -> None:
        rests.append(clock[0])
        clock[0] += rest_s

    monkeypatch.setattr(
        follow_module, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=slept)
    )

    def piece() -> None:
        clock[0] += 0.0002

    with follow_module._rest_between_calls():
        for _ in range(9):
            piece()
    assert len(rests) == 3
    assert np.diff(rests).min() > 10 * 0.0006  # what it works before each rest
    piece()
    assert len(rests) == 3  # none behind the block


@pytest.mark.parametrize("kinds", ["full", "delta"])
def test_each_file_is_read_once_a_load_and_keeps_no_other_process_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: str
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    channel, model = Channel(tmp_path / "channel"), Model.of(SIZES)
    promote(channel, model, tmp_path / "1")
    if kinds == "delta":
        promote(channel, model.changed(np.random.default_rng(0)), tmp_path / "2")
    read: list[Path] = []

    def described(path: Path) -> FileChecksum:
        read.append(path)
        for lock in cache.glob("*/.cache.lock"):
            with lock.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where it is held
        return describe_file(path)

    monkeypatch.setattr(checksums, "describe_file", described)
    load_current(channel.root)
    assert len(read) == len(set(read)) >= 3
    read.clear()
    load_version(channel.root)
    assert len(read) == len(set(read)) >= 3
