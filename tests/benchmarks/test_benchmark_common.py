"""What all benchmarks share: turns, medians, and a last line that a machine can read."""

import argparse
import json

import pytest
from _common import (
    Spread,
    environment,
    finish,
    interleaved,
    make_parser,
    positive_int,
    print_table,
    spread_of,
)


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
    assert json.loads(capsys.readouterr().out) == {
        "benchmark": "name",
        "speedup": 2.0,
        "missing": None,
    }


def test_figures_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        finish("name", {"speedup": float("nan")})


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "two"])
def test_counts_are_whole_numbers_above_zero(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        positive_int(text)
    assert str(caught.value) == f"{text!r} is not a whole number above 0"


def test_every_benchmark_has_quick_and_rounds() -> None:
    options = make_parser("what it measures").parse_args(["--quick", "--rounds", "3"])
    assert (options.quick, options.rounds) == (True, 3)


def test_the_environment_says_where_a_figure_comes_from() -> None:
    found = environment(packages=["torch"])
    assert found.keys() == {"date", "commit", "processor", "cores", "load_1min", "python", "torch"}
    assert found["cores"] >= 1


def test_tables_align_names_left_and_figures_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["peer", "samples/s"], [["jax", "1,000"], ["learn2learn", "20"]])
    assert capsys.readouterr().out == (
        "peer         samples/s\n"
        "jax              1,000\n"
        "learn2learn         20\n"
    )  # fmt: skip
