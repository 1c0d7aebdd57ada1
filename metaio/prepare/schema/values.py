"""Turns raw Arrow columns into integers, hashes and times, in the same way on every engine."""

import logging
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from metaio.errors import DataError
from metaio.hashing import UInt64, splitmix64
from metaio.ragged import Int64, offsets, places

Kind = Literal["integer", "text"]
_log = logging.getLogger(__name__)


def infer_kind(name: str, kind: pa.DataType, role: str) -> Kind:
    """Return whether a column of ids holds integers or text; raise DataError if neither."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "integer"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "text"
    raise DataError(
        f"{role} column {name} has type {kind}; integer or text is needed. Cast it, or choose "
        "another column"
    )


def decode_views(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a categorical column of polars as text, others as they are: Arrow neither writes nor
    casts categories that are views."""
    kind = column.type
    if not (pa.types.is_dictionary(kind) and pa.types.is_string_view(kind.value_type)):
        return column
    words = [one.dictionary.cast(pa.large_string()).take(one.indices) for one in column.chunks]
    return pa.chunked_array(words, pa.large_string())


def check_cases(where: str, names: Sequence[str], wanted: Iterable[str]) -> None:
    """Raise DataError for a wanted column that `names` has twice, perhaps in other letters."""
    for column in wanted:
        alike = sorted(name for name in names if name.casefold() == column.casefold())
        if len(alike) > 1:
            what = f"two columns {alike[0]}"
            if alike[0] != alike[1]:
                what = f"columns {alike[0]} and {alike[1]}, which differ only in case"
            raise DataError(f"{where} has {what}. Rename or remove one")


def to_float64(name: str, column: pa.Array, role: str) -> npt.NDArray[np.float64]:
    """Return a numeric or boolean column without nulls as float64."""
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise DataError(
            f"{role} column {name} has type {kind}; a number is needed. Cast it, or choose "
            "another column"
        )
    # Unsafe: integers beyond 2^53 lose digits that float32 would not keep anyway.
    column = column.cast(pa.float64(), safe=False)
    numbers: npt.NDArray[np.float64] = column.to_numpy(zero_copy_only=False)
    return numbers


def to_float32(name: str, numbers_N: npt.NDArray[np.float64], role: str) -> npt.NDArray[np.float32]:
    """Return numbers as stored; raise DataError for NaN, infinity, or what float32 cannot hold."""
    with np.errstate(over="ignore"):  # what overflows is refused by its value
        stored_N = numbers_N.astype(np.float32)
    wrong_N = ~np.isfinite(stored_N)
    if wrong_N.any():
        raise DataError(
            f"{role} column {name} holds {numbers_N[wrong_N][0]:g}; finite numbers up to 3.4e38 "
            "are needed. Replace those values"
        )
    return stored_N


def hash_values(column: pa.Array, kind: Kind) -> UInt64:
    """Return 64 bits for each value, no nulls: integers as they are, xxh3_64 of UTF-8 text."""
    if kind == "integer":
        integers: UInt64 = to_int64(column).view(np.uint64)
        return integers
    # Hashing text is a Python call, so each distinct word of a batch is hashed once.
    encoded = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
    words = encoded.dictionary.cast(pa.binary()).to_pylist()  # UTF-8 as it is
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, words), np.uint64, len(words))
    spread: UInt64 = hashes[encoded.indices.to_numpy(zero_copy_only=False)]
    return spread


def hash_lists(values_V: Int64, lengths_N: Int64) -> UInt64:
    """Return a hash of each list of integers [N]: of the values in their order."""
    place_V = places(lengths_N)
    # Places repeat across lists, so each is hashed once.
    hash_of_place = splitmix64(np.arange(place_V.max(initial=0) + 1, dtype=np.uint64))
    mixed_V = splitmix64(values_V.view(np.uint64) ^ hash_of_place[place_V])
    # Differences of running sums: both wrap around at 2^64, so they are exact.
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed_V, dtype=np.uint64)])
    ends = offsets(lengths_N)
    hashes: UInt64 = sums[ends[1:]] - sums[ends[:-1]]
    return hashes


def to_int64(column: pa.Array) -> Int64:
    """Return an integer or boolean column without nulls as int64."""
    if pa.types.is_dictionary(column.type):
        # Each batch has a dictionary of its own: only decoded values can be compared.
        column = column.dictionary_decode()
    # Ids above 2^63 keep their bits: they are names, not quantities.
    if pa.types.is_uint64(column.type):
        unsigned: UInt64 = column.to_numpy(zero_copy_only=False)
        return unsigned.view(np.int64)
    # A cast that changes nothing takes 30 microseconds, as long as hashing 10,000 integers.
    if not pa.types.is_int64(column.type):
        column = column.cast(pa.int64())
    integers: Int64 = column.to_numpy(zero_copy_only=False)
    return integers


def to_time_ticks(name: str, column: pa.Array) -> Int64:
    """Return times as int64 in their order: us of timestamps, days of dates, numbers unchanged."""
    kind = column.type
    # Microseconds whatever the file's unit, so that files and engines with other units agree.
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", kind.tz), safe=False)
        return to_int64(column.cast(pa.int64()))
    if pa.types.is_date(kind):
        return to_int64(column.cast(pa.date32()).cast(pa.int32()))
    if pa.types.is_integer(kind):
        return to_int64(column)
    if pa.types.is_floating(kind):
        # Sorted by its bits NaN would be the newest time. Nulls are refused elsewhere.
        if pc.any(pc.is_nan(column)).as_py():
            raise DataError(
                f"time column {name} holds NaN, which is no time. Repair those rows, or drop them"
            )
        return _to_ordered_bits(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
    raise DataError(
        f"time column {name} has type {kind}; integer, float, date or timestamp is needed. Cast "
        'it, give its format if it is text (format = "%Y-%m-%d %H:%M:%S UTC"), or leave out [time]'
    )


def warn_of_mixed_units(name: str, magnitudes: Iterable[float | None]) -> None:
    """Warn where the powers of ten of numeric times leap, as of seconds among milliseconds."""
    # Seconds since 1970 are above 10^8; what is below counts rows or means that there is no time.
    known = sorted(power for power in magnitudes if power is not None and power >= 8)
    for less, more in pairwise(known):
        if more - less >= 2:
            _log.warning(
                f"warning: time column {name} holds numbers of {less + 1:.0f} and of "
                f"{more + 1:.0f} digits, and none between, as if seconds and milliseconds were "
                "mixed: its order may be wrong. Write all of its times in one unit"
            )
            return


def _to_ordered_bits(values: npt.NDArray[np.float64]) -> Int64:
    """Return int64 patterns that sort like the floats."""
    # IEEE 754 orders positive floats as integers; negative ones are flipped.
    return _flip_negative((values + 0.0).view(np.int64))  # + 0.0 makes -0.0 equal 0.0


def from_ordered_bits(bits: Int64) -> npt.NDArray[np.float64]:
    """Return the floats behind the ticks of a float column, see `to_time_ticks`."""
    return _flip_negative(bits).view(np.float64)


def _flip_negative(bits: Int64) -> Int64:
    """Return the bits, all but the sign of negative ones turned over; twice is as before."""
    return np.where(bits < 0, bits ^ np.int64(0x7FFFFFFFFFFFFFFF), bits)


def parse_time(value: float | str, kind: pa.DataType, key: str = "episodes.at") -> int:
    """Return a time of the schema, written under `key`, on the scale of `to_time_ticks`."""
    try:
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            text = str(value).replace(" ", "T")
            form = "%Y-%m-%d" if len(text) == 10 else "%Y-%m-%dT%H:%M:%S"
            times = pc.strptime(pa.array([text]), format=form, unit="us")
            # A date has no zone.
            column: Any = times.cast(pa.timestamp("us", getattr(kind, "tz", None)))
            column = column if pa.types.is_timestamp(kind) else column.cast(pa.date32())
        else:
            column = pa.array([value]).cast(kind)
        return int(to_time_ticks("at", column)[0])
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise DataError(
            f"{key} is {value!r}, which is no value of type {kind} ({error}). Correct it"
        ) from error
