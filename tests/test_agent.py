"""What a rank counts as its own time."""

import pytest

from gmeta.agent import Hiding


def test_a_reader_as_slow_as_before_shows_the_same_whoever_waits() -> None:
    hiding = Hiding(batches_ahead=2)
    assert [hiding.shown_s(4.0, 1.0) for _ in range(3)] == [3.0, 3.0, 3.0]


def test_reading_that_the_computation_hides_costs_nothing_also_when_it_comes_in_bursts() -> None:
    hiding = Hiding(batches_ahead=2)
    assert [hiding.shown_s(read_s, 1.0) for read_s in (0.0, 1.8) * 4] == [0.0] * 8


def test_no_more_is_hidden_than_can_be_read_ahead() -> None:
    hiding = Hiding(batches_ahead=2)
    for _ in range(10):
        hiding.shown_s(0.0, 1.0)
    assert hiding.shown_s(5.0, 1.0) == pytest.approx(2.0)
