"""Dataclasses from untrusted JSON: every value has its type, or the error names its place."""

import reprlib
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_origin

from gmeta_keys import hints_of

_NEEDED = {int: "a whole number from 0 to 2^64 - 1", str: "text", tuple: "a list"}


def parse_typed(kind: Any, value: Any, place: str) -> Any:
    """Return `value` as `kind`: a dataclass, tuple, dict, text or natural number."""
    if get_origin(kind) is types.UnionType:
        # Writers leave None out of JSON, so `X | None` is read as X.
        (kind,) = (one for one in get_args(kind) if one is not types.NoneType)
    base = get_origin(kind) or kind
    if is_dataclass(base) and isinstance(value, dict):
        hints = hints_of(base)  # type: ignore[arg-type]
        optional = {
            f.name for f in fields(base) if (f.default, f.default_factory) != (MISSING, MISSING)
        }
        # Missing and unknown keys in one pass; optional ones may be missing.
        for name in sorted((hints.keys() ^ value.keys()) - (optional - value.keys())):
            fault = "is missing" if name in hints else "is unknown"
            raise ValueError(f"{place}: key {reprlib.repr(name)} {fault}")
        made = {
            name: parse_typed(hints[name], own, f"{place}.{name}") for name, own in value.items()
        }
        return kind(**made)
    if base is tuple and isinstance(value, list):
        own = get_args(kind)[0]
        return tuple(parse_typed(own, part, f"{place}[{i}]") for i, part in enumerate(value))
    if base is dict and isinstance(value, dict):
        own = get_args(kind)[1]
        return {name: parse_typed(own, part, f"{place}.{name}") for name, part in value.items()}
    if kind is Any or (type(value) is kind and (kind is not int or 0 <= value < 1 << 64)):
        return value
    raise ValueError(
        f"{place} is {reprlib.repr(value)}; {_NEEDED.get(base, 'an object')} is needed"
    )
