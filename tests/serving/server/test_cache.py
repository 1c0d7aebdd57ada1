"""Adapted tasks by key: what is kept, for how long, in how many bytes, and in which process."""

import shutil
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch

from gmeta.serving.server import shared_support
from gmeta.serving.server.shared_support import SharedSupport
from gmeta.serving.server.task_cache import TaskCache
from gmeta.serving.task_states import TaskState

ROWS = pa.table({"item": [1, 2, 3], "name": ["a", "b", None], "tags": [[1], [], [2, 3]]})


def state(num_bytes: int = 800) -> TaskState:
    rows = torch.zeros(num_bytes // 4, 1)
    return TaskState({}, {}, rows, torch.zeros(0, dtype=torch.int64))


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def size_of_one() -> int:
    cache = TaskCache(1 << 20, 10.0)
    cache.put("a", ROWS, state(), "v1")
    return cache.num_bytes


def test_the_least_recently_used_goes_first() -> None:
    cache = TaskCache(3 * size_of_one(), 10.0)
    for key in "abc":
        cache.put(key, ROWS, state(), "v1")
    assert cache.get("a") is not None
    cache.put("d", ROWS, state(), "v1")
    assert [cache.get(key) is not None for key in "abcd"] == [True, False, True, True]
    assert (len(cache), cache.num_bytes) == (3, 3 * size_of_one())


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = TaskCache(2 * size_of_one(), 10.0)
    assert cache.put("a", ROWS, state(), "v1")
    assert not cache.put("a", ROWS, state(100_000), "v1")
    assert cache.get("a") is None
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_a_cache_without_room_says_so_wherever_tasks_are_shared(tmp_path: Path) -> None:
    cache = TaskCache(0, 10.0, SharedSupport(tmp_path / "db", 0))
    assert not cache.put("a", ROWS, state(), "v1")
    assert cache.get("a") is None
    # Whose rows others can adapt by is kept, though this process holds no state of it.
    cache = TaskCache(0, 10.0, SharedSupport(tmp_path / "db", 1 << 20))
    assert cache.put("a", ROWS, state(), "v1")
    assert cache.get("a") is not None


def test_the_time_of_a_task_begins_with_its_rows() -> None:
    clock = Clock()
    cache = TaskCache(1 << 20, 10.0, clock=clock)
    cache.put("a", ROWS, state(), "v1")
    clock.now_s += 9
    assert cache.get("a") is not None
    clock.now_s += 1
    assert cache.get("a") is None
    assert cache.num_bytes == 0


def test_states_of_another_version_go_and_the_rows_stay() -> None:
    cache = TaskCache(1 << 20, 10.0)
    cache.put("a", ROWS, state(), "v1")
    cache.put("b", ROWS, state(), "v2")
    cache.forget_states("v2")
    old, new = cache.get("a"), cache.get("b")
    assert old is not None
    assert new is not None
    assert (old.state, old.support) == (None, ROWS)
    assert new.state is not None
    cache.restore("a", old, state(), "v2")
    assert cache.num_bytes == 2 * size_of_one()


def test_rows_that_came_meanwhile_are_not_replaced_by_the_ones_before() -> None:
    """One batch may hold a request that asks for a task and one that brings newer rows of it."""
    clock = Clock()
    cache = TaskCache(1 << 20, 10.0, clock=clock)
    cache.put("a", ROWS, state(), "v1")
    cache.forget_states("v2")
    asked = cache.get("a")
    assert asked is not None
    clock.now_s += 1
    cache.put("a", ROWS.slice(1), state(), "v2")
    cache.restore("a", asked, state(), "v2")
    kept = cache.get("a")
    assert kept is not None
    assert kept.support.num_rows == 2


def test_the_time_of_a_task_is_none_that_can_be_set_back() -> None:
    cache = TaskCache(1 << 20, 10.0)
    cache.put("a", ROWS, state(), "v1")
    kept = cache.get("a")
    assert kept is not None
    assert kept.expires_s <= time.monotonic() + 10


def test_processes_share_the_rows(tmp_path: Path) -> None:
    clock = Clock()
    one, other = (
        TaskCache(1 << 20, 10.0, SharedSupport(tmp_path / "support.db", 1 << 20), clock)
        for _ in range(2)
    )
    one.put("a", ROWS, state(), "v1")
    found = other.get("a")
    assert found is not None
    assert found.state is None
    assert found.support.equals(ROWS)
    other.restore("a", found, state(), "v1")
    kept = other.get("a")
    assert kept is not None
    assert kept.state is not None
    # Newer rows count everywhere at once.
    one.put("a", ROWS.slice(1), state(), "v1")
    newer = other.get("a")
    assert newer is not None
    assert (newer.state, newer.support.num_rows) == (None, 2)
    clock.now_s += 10
    assert one.get("a") is None
    assert other.get("a") is None


@pytest.mark.parametrize("room", [0, 1, 3])
def test_shared_rows_take_no_more_than_their_room(tmp_path: Path, room: int) -> None:
    probe = SharedSupport(tmp_path / "probe.db", 1 << 20)
    probe.put("a", ROWS, 10.0)
    (size,) = probe._db.execute("select num_bytes from tasks").fetchone()
    shared = SharedSupport(tmp_path / "support.db", room * size)
    for key in "abcd":
        shared.put(key, ROWS, 10.0)
    found = [shared.get(key, "", 0.0) is not None for key in "abcd"]
    assert found == [place >= 4 - room for place in range(4)]


def test_a_task_larger_than_the_room_of_all_takes_nobody_elses(tmp_path: Path) -> None:
    shared = SharedSupport(tmp_path / "support.db", 20_000)
    assert all(shared.put(key, ROWS, 10.0) for key in "abc")
    assert shared.put("a", pa.table({"item": range(9_000)}), 10.0) == ""
    assert [shared.get(key, "", 0.0) is not None for key in "abc"] == [False, True, True]


def test_a_put_costs_as_much_whatever_the_number_of_tasks(tmp_path: Path) -> None:
    shared = SharedSupport(tmp_path / "support.db", 1 << 30)
    steps: list[int] = []

    def count() -> int:
        steps[-1] += 1
        return 0

    shared._db.set_progress_handler(count, 1)  # at each instruction of SQLite's
    for number in range(300):
        steps.append(0)
        shared.put(f"{number:03d}", ROWS, 10.0)
    assert steps[-1] < 2 * steps[1]


def test_the_bytes_of_all_tasks_are_kept_along(tmp_path: Path) -> None:
    shared = SharedSupport(tmp_path / "support.db", 20_000)
    for number in range(60):  # new ones, others of the same key, and some that are too large
        num_rows = 5_000 if number % 7 == 0 else number * 97 % 800
        shared.put("abcdefgh"[number * 5 % 8], pa.table({"item": range(num_rows)}), 10.0)
        (found,) = shared._db.execute("select coalesce(sum(num_bytes), 0) from tasks").fetchone()
        assert shared._total_bytes() == found <= 20_000
    assert sum(shared.get(key, "", 0.0) is not None for key in "abcdefgh") > 2


def full_after(shared: SharedSupport, more_pages: int) -> None:
    """Let the file grow by so many pages and no more, as a full disk does."""
    (pages,) = shared._db.execute("pragma page_count").fetchone()
    shared._db.execute(f"pragma max_page_count = {pages + more_pages}")


def test_a_place_that_is_full_keeps_the_newest_tasks(tmp_path: Path) -> None:
    shared = SharedSupport(tmp_path / "support.db", 1 << 20)
    rows = pa.table({"item": range(2_000)})
    full_after(shared, 12)  # three tasks of four pages
    stamps = [shared.put(key, rows, 10.0) for key in "abcdefgh"]
    assert all(stamps)
    assert shared.num_failed == 0
    kept = [key for key in "abcdefgh" if shared.get(key, "", 0.0) is not None]
    assert kept[-1] == "h"
    assert len(kept) >= 2


def test_a_file_that_others_hold_for_a_while_keeps_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, tried = tmp_path / "support.db", []
    monkeypatch.setattr(shared_support, "_BUSY_S", 0.0)
    shared = SharedSupport(file, 1 << 20)
    assert all(shared.put(key, ROWS, 10.0) for key in "abcd")
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("begin immediate")

    def begin(statement: str) -> None:
        tried.append(statement)
        if statement == "begin immediate" and len(tried) == 2:
            other.execute("rollback")  # it ends in between

    shared._db.set_trace_callback(begin)
    assert shared.put("e", ROWS, 10.0) == ""
    assert shared.num_failed == 1
    assert all(shared.get(key, "", 0.0) is not None for key in "abcd")


def test_a_place_without_bounds_keeps_all_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0))
    shared = SharedSupport(tmp_path / "support.db", 1 << 20)
    assert shared.put("a", ROWS, 10.0)
    assert shared.get("a", "", 0.0) is not None


def test_what_the_shared_file_does_not_take_stays_in_its_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, files = Clock(), [SharedSupport(tmp_path / "support.db", 1 << 20) for _ in range(2)]
    one, other = (TaskCache(1 << 20, 10.0, shared, clock) for shared in files)
    one.put("a", ROWS, state(), "v1")
    long = pa.table({"item": range(2_000)})
    full_after(files[0], 0)
    for key in "abab":
        clock.now_s += 1
        one.put(key, long, state(), "v1")
    for key in "ab":
        found = one.get(key)
        assert found is not None
        assert found.support is long
        assert found.state is not None
    assert other.get("b") is None
    assert (one.num_unshared, other.num_unshared) == (4, 0)
    assert [record.message for record in caplog.records] == ["tasks_not_shared"]
    # Newer rows of another process count here too.
    clock.now_s += 1
    other.put("a", ROWS.slice(1), state(), "v1")
    newer = one.get("a")
    assert newer is not None
    assert newer.support.num_rows == 2
    files[0]._db.execute("pragma max_page_count = 10000")
    one.put("b", long, state(), "v1")
    assert other.get("b") is not None
