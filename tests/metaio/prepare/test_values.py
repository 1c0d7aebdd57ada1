"""Raw columns as numbers: what is an id, what a hash is of, how times stand in order."""

import datetime
import math

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from metaio import DataError
from metaio.hashing import splitmix64
from metaio.prepare.schema.values import (
    hash_values,
    infer_kind,
    parse_time,
    to_float64,
    to_int64,
    to_time_ticks,
)
from tests.support.refusals import catch_message

WORDS = ["b", "", "grün", "b", "a"]
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def test_the_mixer_is_the_published_one() -> None:
    """The first outputs of SplitMix64 from seed 0, as its reference implementation prints them."""
    states = (np.arange(3, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)).reshape(3, 1)
    before = states.copy()
    expected = [[0xE220A8397B1DCDAF], [0x6E789E6AA1B965F4], [0x06C45D188009454F]]
    assert splitmix64(states).tolist() == expected
    assert (states == before).all()
    assert splitmix64(np.uint64(0)).shape == ()


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (pa.int8(), "integer"), (pa.uint64(), "integer"), (pa.bool_(), "integer"),
        (pa.dictionary(pa.int32(), pa.int64()), "integer"), (pa.string(), "text"),
        (pa.large_string(), "text"), (pa.dictionary(pa.int32(), pa.string()), "text"),
    ],
)  # fmt: skip
def test_ids_are_integers_or_text_however_they_are_stored(kind: pa.DataType, found: str) -> None:
    assert infer_kind("shop", kind, "sparse") == found


@pytest.mark.parametrize(
    "column",
    [
        pa.array(WORDS),
        pa.array(WORDS, pa.large_string()),
        pa.array(WORDS).dictionary_encode(),
        # Another batch's numbering of the same words.
        pa.DictionaryArray.from_arrays(pa.array([3, 1, 0, 3, 2]), pa.array(["grün", "", "a", "b"])),
    ],
)
def test_a_word_has_one_hash_however_it_is_stored(column: pa.Array) -> None:
    expected = [xxhash.xxh3_64_intdigest(word.encode()) for word in WORDS]
    assert hash_values(column, "text").tolist() == expected


def test_integers_keep_their_bits() -> None:
    assert to_int64(pa.array([1 << 63, 3], pa.uint64())).tolist() == [-(1 << 63), 3]
    assert hash_values(pa.array([-1, 3], pa.int8()), "integer").tolist() == [2**64 - 1, 3]
    assert to_int64(pa.array([True, False])).tolist() == [1, 0]
    numbered = pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array([70, 900]))
    assert to_int64(numbered).tolist() == [900, 70]


def test_numbers_are_numbers_and_text_is_refused() -> None:
    assert to_float64("price", pa.array([True, False]), "dense").tolist() == [1.0, 0.0]
    money = pa.array([1, 3], pa.decimal128(5, 2))
    assert to_float64("price", money, "dense").tolist() == [1.0, 3.0]
    assert catch_message(DataError, to_float64, "price", pa.array(["1"]), "dense") == (
        "dense column price has type string; a number is needed. Cast it, or choose another column"
    )


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_moment_is_the_same_time_in_every_unit(unit: str) -> None:
    noon = datetime.datetime(1971, 2, 5, 12)
    microseconds = int((noon - datetime.datetime(1970, 1, 1)).total_seconds()) * 10**6
    assert to_time_ticks("at", pa.array([noon], pa.timestamp(unit))).tolist() == [microseconds]
    assert parse_time("1971-02-05T12:00:00", pa.timestamp(unit)) == microseconds


def test_dates_are_days_wherever_the_machine_stands() -> None:
    dates = pa.array([datetime.date(1970, 1, 3), datetime.date(1969, 12, 31)])
    assert to_time_ticks("at", dates).tolist() == [2, -1]
    assert parse_time("1970-01-03", pa.date32()) == 2
    assert parse_time("1970-01-03", pa.timestamp("us", "UTC")) == 2 * 86_400 * 10**6


def test_times_with_fractions_keep_their_order() -> None:
    rising = [-math.inf, -2.5, -1e-300, 0.0, 1e-300, 2.5, math.inf]
    found = to_time_ticks("at", pa.array(rising)).tolist()
    assert found == sorted(found)
    assert len(set(found)) == len(rising)
    zeros = to_time_ticks("at", pa.array([0.0, -0.0])).tolist()
    assert zeros[0] == zeros[1]
    assert parse_time(2.5, pa.float64()) == found[5]


def test_what_is_no_time_is_refused_with_the_place_where_it_stands() -> None:
    assert catch_message(DataError, to_time_ticks, "at", pa.array(["noon"])) == (
        "time column at has type string; integer, float, date or timestamp is needed. Cast it, "
        'give its format if it is text (format = "%Y-%m-%d %H:%M:%S UTC"), or leave out [time]'
    )
    assert catch_message(DataError, parse_time, "noon", pa.timestamp("us")).startswith(
        "episodes.at is 'noon', which is no value of type timestamp[us] ("
    )
