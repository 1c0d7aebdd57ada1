"""Batches arranged by threads: in order, so many ahead, errors where they belong."""

import itertools
import threading
from collections.abc import Iterator

import pytest

from gmeta.data.map_ahead import map_ahead


def counted(until: int, given: list[int]) -> Iterator[int]:
    for number in range(until):
        given.append(number)
        yield number


@pytest.mark.parametrize("threads", [1, 3])
def test_values_come_in_the_order_of_the_items(threads: int) -> None:
    assert list(map_ahead(lambda n: n * n, iter(range(20)), threads)) == [n * n for n in range(20)]
    assert list(map_ahead(lambda n: n, iter(()), threads)) == []


def test_so_many_items_are_asked_for_ahead_and_no_more() -> None:
    given: list[int] = []
    values = map_ahead(lambda n: n, counted(10, given), 2)
    assert given == []
    assert [next(values), next(values)] == [0, 1]
    assert given == [0, 1, 2, 3]
    values.close()  # type: ignore[attr-defined]
    assert given == [0, 1, 2, 3]


def test_threads_work_while_the_caller_does() -> None:
    """The value behind the one in hand is made without anybody asking for it."""
    made = [threading.Event() for _ in range(3)]

    def make(number: int) -> str:
        made[number].set()
        return threading.current_thread().name

    values = map_ahead(make, iter(range(3)), 1)
    assert next(values).startswith("arrange")
    assert made[1].wait(timeout=60)


def test_an_error_is_raised_behind_the_items_before_it() -> None:
    values = map_ahead(lambda n: 6 // (2 - n), iter(range(4)), 2)
    assert [next(values), next(values)] == [3, 6]
    with pytest.raises(ZeroDivisionError):
        next(values)


def test_what_the_caller_waits_for_a_value_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("gmeta.data.map_ahead.perf_counter", lambda: next(ticks))
    told: list[float] = []
    assert list(map_ahead(lambda n: n, iter(range(4)), 2, told.append)) == [0, 1, 2, 3]
    assert told == [1, 1, 1, 1]
