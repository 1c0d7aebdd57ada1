"""What a rank counts as its own time."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from gmeta.feeds.cost_meter import CostMeter
from gmeta.feeds.local_time import ReadOverlap, ReadTime
from gmeta.feeds.step_agent import StaticStepAgent


def test_a_reader_as_slow_as_before_shows_the_same_whoever_waits() -> None:
    hiding = ReadOverlap(batches_ahead=2)
    assert [hiding.exposed_s(4.0, 1.0) for _ in range(3)] == [3.0, 3.0, 3.0]


def test_reading_that_the_computation_hides_costs_nothing_also_when_it_comes_in_bursts() -> None:
    hiding = ReadOverlap(batches_ahead=2)
    assert [hiding.exposed_s(read_s, 1.0) for read_s in (0.0, 1.8) * 4] == [0.0] * 8


def test_no_more_is_hidden_than_can_be_read_ahead() -> None:
    hiding = ReadOverlap(batches_ahead=2)
    for _ in range(10):
        hiding.exposed_s(0.0, 1.0)
    assert hiding.exposed_s(5.0, 1.0) == pytest.approx(2.0)


def test_what_is_read_ahead_in_the_first_step_does_not_make_a_task_slow() -> None:
    reading = ReadTime()
    assert reading.task_s(4.8, 48) == pytest.approx(0.1)
    assert reading.task_s(6.4, 64) == pytest.approx(0.1)


def test_tasks_that_are_read_again_out_of_memory_do_not_make_the_storage_fast() -> None:
    reading = ReadTime()
    reading.task_s(4.8, 48)
    reading.skip(2)
    assert [reading.task_s(4.8, 48 + 5 * step) for step in (1, 2)] == [pytest.approx(0.1)] * 2
    assert reading.task_s(4.8 + 0.5, 63) == pytest.approx(0.1)


def test_storage_that_becomes_slow_is_as_slow_within_some_steps() -> None:
    reading = ReadTime()
    for step in range(20):
        reading.task_s(0.1 * step, 10 * step)
    slow = [reading.task_s(2.0 + 0.4 * step, 200 + 10 * step) for step in range(10)]
    assert slow == sorted(slow)
    assert slow[1] > 0.015
    assert slow[-1] == pytest.approx(0.04, rel=0.1)


def test_nothing_read_yet_takes_no_time() -> None:
    assert ReadTime().task_s(0.0, 0) == 0.0


def test_steps_that_wait_for_arranging_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("gmeta.data.map_ahead.perf_counter", lambda: next(ticks))
    exchange = SimpleNamespace(prepare=lambda episodes: f"{episodes} and packed")
    sharded: Any = SimpleNamespace(local=SimpleNamespace(exchange=exchange))
    ranks: Any = None
    meter = CostMeter(sharded.local, ranks)
    batches: list[Any] = [1, 2, 3]
    arrange: Any = "{} arranged".format
    agent = StaticStepAgent(sharded, meter, micro_batches=1, threads=1)
    wanted = [f"{batch} arranged and packed" for batch in batches]
    assert list(agent.collate_batches(iter(batches), arrange)) == wanted
    assert agent.wait_s == 3
    beside = StaticStepAgent(sharded, meter, micro_batches=1, threads=0)
    found = list(beside.collate_batches(iter(batches), arrange))
    assert found == [f"{batch} arranged" for batch in batches]
    assert beside.wait_s == 0
