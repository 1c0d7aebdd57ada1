"""Numbers from raw columns: the same whatever type the file or the engine chose for them."""

import math
import random
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from metaio.errors import DataError
from metaio.values import as_numbers, hash_values, integer_values, kind_of, time_of, time_values

WORDS = ["", "a", "straße", "日本", "a", "0", "very " * 40]
TEXT_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
]
INTEGER_TYPES = [pa.int8(), pa.uint8(), pa.int32(), pa.int64(), pa.uint64()]
EPOCH = datetime(1970, 1, 1)


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_text_hashes_by_its_bytes_whatever_its_type(kind: pa.DataType) -> None:
    column = pa.array(WORDS, pa.string()).cast(kind)
    assert kind_of("c", column.type, "task") == "text"
    expected = [xxhash.xxh3_64_intdigest(word.encode()) for word in WORDS]
    assert hash_values(column, "text").tolist() == expected


def test_a_part_of_a_column_hashes_as_the_same_values_alone() -> None:
    for kind in (pa.string(), pa.dictionary(pa.int32(), pa.string())):
        whole = pa.array(WORDS, pa.string()).cast(kind)
        part = hash_values(whole.slice(2, 3), "text")
        assert part.tolist() == hash_values(whole, "text").tolist()[2:5]


@pytest.mark.parametrize("kind", INTEGER_TYPES, ids=str)
def test_integers_stay_themselves_whatever_their_width(kind: pa.DataType) -> None:
    column = pa.array([0, 1, 7, 100], kind)
    assert kind_of("c", kind, "task") == "integer"
    assert hash_values(column, "integer").tolist() == [0, 1, 7, 100]


def test_ids_above_the_signed_range_stay_apart() -> None:
    ids = [2**63 - 1, 2**63, 2**64 - 1]
    assert hash_values(pa.array(ids, pa.uint64()), "integer").tolist() == ids


def test_a_dictionary_of_integers_is_its_values_not_its_indices() -> None:
    column = pa.array([70, 50, 70], pa.int64()).dictionary_encode()
    assert integer_values(column).tolist() == [70, 50, 70]


@pytest.mark.parametrize("kind", [pa.float64(), pa.binary(), pa.list_(pa.int64()), pa.date32()])
def test_a_column_of_ids_that_are_none_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(DataError, match="integer or text is needed"):
        kind_of("user", kind, "task")


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([True, False]), [1.0, 0.0]),
        (pa.array([-3, 2**40], pa.int64()), [-3.0, 2.0**40]),
        (pa.array([2**64 - 1], pa.uint64()), [2.0**64]),
        (pa.array([0.5, -math.inf], pa.float32()), [0.5, -math.inf]),
        (pa.array(["1.25"]).cast(pa.decimal128(5, 2)), [1.25]),
    ],
)
def test_numbers_of_any_type_become_float64(column: pa.Array, expected: list[float]) -> None:
    numbers = as_numbers("price", column, "dense")
    assert numbers.dtype == np.float64
    assert numbers.tolist() == expected


def test_a_number_that_is_text_is_refused_with_its_role_and_column() -> None:
    with pytest.raises(DataError, match=r"dense column price has type string; a number is needed"):
        as_numbers("price", pa.array(["1.5"]), "dense")


def some_times(rng: random.Random) -> list[datetime]:
    """Before and after 1970, whole seconds: every unit can hold them."""
    return [EPOCH + timedelta(seconds=rng.randint(-(10**9), 10**9)) for _ in range(50)]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
def test_times_are_microseconds_whatever_their_unit(unit: str, zone: str | None) -> None:
    times = some_times(random.Random(0))
    column: Any = pa.array(times, pa.timestamp("us")).cast(pa.timestamp(unit, zone))
    expected = [(time - EPOCH) // timedelta(microseconds=1) for time in times]
    assert time_values("t", column).tolist() == expected


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64()], ids=str)
def test_dates_are_days(kind: pa.DataType) -> None:
    days = [date(1969, 12, 31), date(1970, 1, 1), date(2026, 11, 22)]
    expected = [(day - EPOCH.date()).days for day in days]
    assert time_values("t", pa.array(days, pa.date32()).cast(kind)).tolist() == expected


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_floating_times_sort_as_the_floats_do(kind: pa.DataType) -> None:
    rng = random.Random(1)
    values = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-6, 6) for _ in range(200)]
    column = pa.array([*values, 0.0, -math.inf, math.inf], kind)
    by_time = np.argsort(time_values("t", column), kind="stable")
    assert by_time.tolist() == np.argsort(column.to_numpy(), kind="stable").tolist()


def test_both_zeros_are_the_same_time() -> None:
    minus, plus = time_values("t", pa.array([-0.0, 0.0])).tolist()
    assert minus == plus


def test_a_column_without_times_is_refused() -> None:
    with pytest.raises(DataError, match=r"time column at has type string.*leave out \[time\]"):
        time_values("at", pa.array(["2026-01-01"]))


@pytest.mark.parametrize(
    ("written", "column"),
    [
        ("2026-03-01", pa.array([datetime(2026, 3, 1)], pa.timestamp("ns"))),
        ("2026-03-01T04:05:06", pa.array([datetime(2026, 3, 1, 4, 5, 6)], pa.timestamp("s"))),
        (
            "2026-03-01T04:05:06",
            pa.array([datetime(2026, 3, 1, 4, 5, 6, tzinfo=UTC)], pa.timestamp("ms", "UTC")),
        ),
        ("2026-03-01", pa.array([date(2026, 3, 1)], pa.date32())),
        (1700000000, pa.array([1700000000], pa.int64())),
        (17, pa.array([17], pa.int32())),
        (-2.5, pa.array([-2.5], pa.float64())),
        (0.1, pa.array([0.1], pa.float32())),
    ],
)
def test_a_time_in_the_schema_is_on_the_scale_of_its_column(
    written: float | str, column: pa.Array
) -> None:
    assert time_of(written, column.type) == time_values("at", column)[0]


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("yesterday", pa.timestamp("us")),
        ("2026-13-01", pa.date32()),
        ("soon", pa.int64()),
        (2**40, pa.int32()),
    ],
)
def test_a_time_that_its_column_cannot_hold_is_refused(
    written: float | str, kind: pa.DataType
) -> None:
    with pytest.raises(DataError, match=r"episodes\.at is .*Correct it"):
        time_of(written, kind)
