"""Texts of a schema: a condition on raw rows, and a duration."""

import re
from typing import NamedTuple

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def parse_duration_s(key: str, text: str) -> float:
    """Return the seconds of a duration such as "10m", written under `key`. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise ValueError(
            f"{key} is {text!r}; a number and one of s, m, h, d is allowed, as in '10m'. Correct it"
        )
    return float(found[1]) * _UNITS_S[found[2]]


class Condition(NamedTuple):
    """A comparison of a raw column with a value."""

    column: str
    comparison: str
    value: float | str


_CONDITION = re.compile(
    r"""\s*(?:"([^"]+)"|(\w+))\s*(!=|<=|>=|=|<|>)\s*(?:'([^']*)'|(-?\d+(?:\.\d+)?))\s*"""
)


def parse_where(where: str) -> tuple[Condition, ...]:
    """Return the comparisons of `where`, all of which hold for an event. Raises ValueError."""
    found = []
    for part in re.split(r"\s+and\s+", where, flags=re.IGNORECASE) if where else ():
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise ValueError(
                f"events.where has {part!r}; comparisons with =, !=, <, <=, > or >= of a column "
                "and a number or a 'text', joined by and, are allowed, as in \"click = 1 and kind "
                "!= 'ad'\". Correct it"
            )
        value = float(match[5]) if match[5] is not None else match[4]
        found.append(Condition(match[1] or match[2], match[3], value))
    return tuple(found)
