"""Settings as frozen dataclasses: filled from TOML, every key checked once.

A field's metadata holds its "help" and may hold "min", "max" and "multiple". Unknown keys are
refused with the nearest name.
"""

import dataclasses
import difflib
import json
import math
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gmeta.errors import ConfigError

# Counts of rows, tasks and steps lie in int64 tensors and arrays.
MOST_INT = 2**63 - 1


def describe_settings(kind: Any) -> list[tuple[str, str, str]]:
    """(section.key, default as JSON, help) of every key of a dataclass of sections, in order."""
    return [
        (
            f"{section}.{item.name}",
            _shown(item.default),
            _with_choices(item.metadata["help"], get_type_hints(fields)[item.name]),
        )
        for section, fields in get_type_hints(kind).items()
        for item in dataclasses.fields(fields)
    ]


def _with_choices(text: str, hint: Any) -> str:
    """The help, with the values there are to choose from unless it names all of them."""
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    if all(re.search(rf"\b{re.escape(choice)}\b", text) for choice in choices):
        return text
    return f"{text} (one of {', '.join(choices)})"


def _shown(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def settings_from_dict(kind: Any, raw: Mapping[str, Any], prefix: str = "") -> Any:
    """An instance of the dataclass `kind` from nested dicts, as TOML or JSON gives them; `prefix`
    stands before keys in messages.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value outside its bounds.
    """
    hints = get_type_hints(kind)
    known = {item.name: item for item in dataclasses.fields(kind)}
    for name in raw:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {prefix}{nearest[0]}?"
                if nearest
                else f"known are {', '.join(known)}"
            )
            raise ConfigError(f"{prefix}{name} is unknown; {hint}")
    values = {}
    for name, value in raw.items():
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{key} = {value!r} is a value, not a section. Write [{key}] in the config"
                )
            values[name] = settings_from_dict(hints[name], value, prefix=f"{key}.")
        else:
            values[name] = _checked(key, hints[name], known[name].metadata, value)
    return kind(**values)


def _checked(key: str, hint: Any, metadata: Mapping[str, Any], value: Any) -> Any:
    """`value` as the type that the field asks for, or a ConfigError."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ConfigError(
                f"{key} = {value!r} is not allowed: "
                f"choose one of {', '.join(map(str, get_args(hint)))}"
            )
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{key} = {value!r} is not a list. Write e.g. {key} = [...]")
        return tuple(
            _checked(f"{key}[{i}]", get_args(hint)[0], metadata, item)
            for i, item in enumerate(value)
        )
    if get_origin(hint) in (Union, types.UnionType):
        # A mistake in the dataclass, not in the config.
        raise TypeError(f"{key}: config fields have one type each, not {hint}")
    # TOML's 1 is a fine rate; true is not, though Python counts it among the integers.
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{key} = {value!r} is not of type {hint.__name__}. Correct the value")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{key} = {value} is not a finite number. Correct the value")
    # Bounds hold for each entry of a list as well.
    if "min" in metadata and value < metadata["min"]:
        raise ConfigError(
            f"{key} = {value} is too small: at least {metadata['min']} is allowed. "
            "Correct the value"
        )
    most = metadata.get("max", MOST_INT if hint is int else math.inf)
    if isinstance(value, int | float) and value > most:
        raise ConfigError(
            f"{key} = {value} is too large: at most {most} is allowed. Correct the value"
        )
    if "multiple" in metadata and value % metadata["multiple"]:
        raise ConfigError(
            f"{key} = {value} is no multiple of {metadata['multiple']}: only these are allowed. "
            "Correct the value"
        )
    return value
