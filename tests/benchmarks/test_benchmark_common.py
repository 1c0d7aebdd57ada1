"""What all benchmarks share: turns, medians, and a last line that a machine can read."""

import json

import pytest
from _common import Spread, finish, interleaved, spread_of


def test_rounds_alternate_their_direction() -> None:
    calls: list[str] = []
    measures = {name: (lambda name=name: calls.append(name) or float(len(calls))) for name in "abc"}
    values = interleaved(measures, rounds=3)
    assert "".join(calls) == "abccbaabc"
    assert values == {"a": [1.0, 6.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}


def test_a_spread_is_median_and_range() -> None:
    assert spread_of([3.0, 1.0, 9.0, 2.0]) == Spread(median=2.5, lowest=1.0, highest=9.0, repeats=4)


def test_the_last_line_is_json_with_the_benchmarks_name(capsys: pytest.CaptureFixture[str]) -> None:
    finish("name", {"speedup": 2.0, "missing": None})
    expected = {"benchmark": "name", "speedup": 2.0, "missing": None}
    assert json.loads(capsys.readouterr().out) == expected
