"""Hashes that stand in files and decide orders: the same on every machine, release and engine."""

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]


def splitmix64(values: UInt64 | np.uint64) -> UInt64:
    """Mix 64-bit integers: a bijection that spreads neighbours apart. Source: Steele, Lea, Flood:
    Fast splittable pseudorandom number generators, OOPSLA 2014. The input is an array of any shape,
    or a scalar, which gives an array of no dimension.

    >>> hex(int(splitmix64(np.uint64(0))))
    '0xe220a8397b1dcdaf'"""
    # Arrays wrap around silently, as is wanted here; numpy scalars would warn.
    mixed = np.atleast_1d(np.asarray(values, dtype=np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    # One array for what is shifted: fresh memory each time would cost as much as the arithmetic.
    shifted = mixed >> np.uint64(30)
    mixed ^= shifted
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(mixed, np.uint64(27), out=shifted)
    mixed ^= shifted
    mixed *= np.uint64(0x94D049BB133111EB)
    np.right_shift(mixed, np.uint64(31), out=shifted)
    mixed ^= shifted
    return mixed.reshape(np.shape(values))


def unit_interval(mixed: UInt64) -> npt.NDArray[np.float64]:
    """Return mixed integers as float64 numbers in [0, 1), from their upper 53 bits."""
    # 53 bits are what a float64 holds exactly: no rounding, so every machine draws the same.
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
