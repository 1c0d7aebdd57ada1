"""Parses TOML keys into frozen dataclasses whose fields carry help and bounds."""

# Below all packages: metaio, the models and the data-shard service have keys, and none of them may
# import another.
import dataclasses
import difflib
import functools
import json
import math
import sys
import tomllib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from gmeta_keys.path_kinds import describe_folder, describe_toml, suggest_path

# Counts of rows, tasks and steps lie in int64 tensors and arrays.
MOST_INT = 2**63 - 1

Part = TypeVar("Part")


class Wording(NamedTuple):
    """How messages about one kind of file are worded."""

    error: type[Exception]
    subject: str  # before a key's name
    known: str  # before the names that are known
    wrong_type: Callable[[str, Any, object], str]  # of a key, its field's type and its value


def key(default: Any, help: str, **bounds: float) -> Any:
    """Return a dataclass field with a default, a line of help, and bounds (min, max, multiple)."""
    # dataclasses refuse a mutable default, so `dict` stands for an empty one.
    if default is dict:
        return dataclasses.field(default_factory=dict, metadata={"help": help, **bounds})
    return dataclasses.field(default=default, metadata={"help": help, **bounds})


def read_toml(what: str, path: Path, error: type[Exception], own_table: str = "") -> dict[str, Any]:
    """Return the tables of a TOML file, or of a .json that holds the same; `what` names the file's
    role in messages. A file that lacks `own_table` may turn out to be of another kind."""
    try:
        # Editors on Windows begin UTF-8 files with a byte order mark, which TOML does not allow.
        text = path.read_text(encoding="utf-8-sig")
        raw = dict(json.loads(text)) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as fault:
        if other := describe_folder(path):
            raise error(f"{what} {str(path)!r} is no TOML file but {other}") from fault
        raise error(
            f"{what} {str(path)!r} cannot be read: {fault.strerror}. Give a TOML file"
            f"{suggest_path(path)}"
        ) from fault
    # ValueError covers bytes that are not UTF-8; deep nesting overflows tomllib's recursion.
    except (ValueError, TypeError, RecursionError) as fault:
        raise error(f"{what} {str(path)!r} is no TOML: {fault}. Mend that line") from fault
    if own_table and (other := describe_toml(path, raw, own_table)):
        raise error(f"{what} {str(path)!r} is {other}")
    return raw


def parse(kind: type[Part], raw: Mapping[str, Any], wording: Wording, prefix: str = "") -> Part:
    """Return `raw` (tables of TOML or JSON) as the dataclass `kind`, or raise wording.error."""
    if not isinstance(raw, Mapping):
        raise wording.error(f"{raw!r} stands where a table of keys is needed. Correct it")
    hints = hints_of(kind)  # type: ignore[arg-type]
    known = {item.name: item for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    subject = f"{wording.subject}{prefix}"
    for name in raw:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            names = f"{wording.known} are {', '.join(known)}"
            hint = f"did you mean {prefix}{near[0]}?" if near else names
            raise wording.error(f"{subject}{name} is unknown; {hint}")
    values = {
        name: _first_fitting(f"{prefix}{name}", hints[name], known[name].metadata, value, wording)
        for name, value in raw.items()
    }
    for name, item in known.items():
        if name not in raw and item.default is item.default_factory is dataclasses.MISSING:
            raise wording.error(f"{subject}{name} is missing; it has no default. Add it")
    return kind(**values)


# Resolving annotations takes longer than all else that parsing does.
@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields."""
    return get_type_hints(kind)


def _first_fitting(
    name: str, hint: Any, bounds: Mapping[str, Any], value: object, wording: Wording
) -> object:
    """Return `value` as the first type of `hint` that accepts it, else raise wording.error."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if bounds.keys() - {"help"} and len(options) > 1:
        # A mistake in the dataclass, not in the file: a bound would hold for one of them alone.
        raise TypeError(f"{name}: config fields have one type each, not {hint}")
    for option in options:
        converted = _convert(name, option, bounds, value, wording)
        if converted is not None:
            _check_number(name, converted, bounds, wording)
            return converted
    raise wording.error(wording.wrong_type(name, hint, value))


def _convert(name: str, kind: Any, bounds: Mapping[str, Any], value: Any, wording: Wording) -> Any:
    """Return `value` as the type `kind`; None if it is of another type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value if value in inner else None
    if origin is tuple and isinstance(value, list | tuple):
        if not dataclasses.is_dataclass(inner[0]):
            entries = enumerate(value)
            return tuple(
                _first_fitting(f"{name}[{i}]", inner[0], bounds, entry, wording)
                for i, entry in entries
            )
        if all(isinstance(part, Mapping) for part in value):
            tables = [parse(inner[0], part, wording, f"{name}.") for part in value]  # type: ignore
            return tuple(tables)
    if origin is dict and inner[1] is Any and isinstance(value, Mapping):
        return dict(value)  # whoever asked for it checks what is in it
    if origin is dict and isinstance(value, Mapping):
        values = [_convert(name, inner[1], bounds, entry, wording) for entry in value.values()]
        fit = (isinstance(one, str) or (one is not None and math.isfinite(one)) for one in values)
        return value if all(fit) else None
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return parse(kind, value, wording, f"{name}.")  # type: ignore[arg-type]
    # TOML's 1 is a valid rate; true is not, though bool is a subclass of int in Python.
    if origin is not None or (isinstance(value, bool) and kind is not bool):
        return None
    if kind is float and isinstance(value, int):
        # float() of a larger integer raises OverflowError.
        return float(value) if abs(value) <= sys.float_info.max else None
    return value if isinstance(value, kind) else None


def _check_number(name: str, value: object, bounds: Mapping[str, Any], wording: Wording) -> None:
    """Raise the wording's error for a number that is not finite or outside its bounds."""
    if not isinstance(value, int | float):
        return
    least = bounds.get("min", -math.inf)
    # Python's integers are unbounded, but every count becomes an int64 sooner or later.
    most = bounds.get("max", MOST_INT if isinstance(value, int) else math.inf)
    if isinstance(value, float) and not math.isfinite(value):
        complaint = "not a finite number"
    elif value < least:
        complaint = f"too small: at least {least} is allowed"
    elif value > most:
        complaint = f"too large: at most {most} is allowed"
    elif "multiple" in bounds and value % bounds["multiple"]:
        complaint = f"no multiple of {bounds['multiple']}: only these are allowed"
    else:
        return
    raise wording.error(f"{wording.subject}{name} = {value} is {complaint}. Correct the value")
