"""Config files of training and the data-shard service: their keys, and what is said of mistakes."""

import dataclasses
import difflib
import json
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from gmeta.errors import ConfigError
from gmeta_keys import Wording, parse

Settings = TypeVar("Settings")


def flatten_sections(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a config's sections by section.key, or section.options.key."""
    found: dict[str, Any] = {}
    for part, keys in sections.items():
        found |= {f"{part}.{name}": value for name, value in keys.items() if name != "options"}
        options = keys.get("options", {})
        found |= {f"{part}.options.{name}": value for name, value in options.items()}
    return found


def describe_settings(kind: Any) -> list[tuple[str, str, str]]:
    """Return (section.key, default as JSON, help) of each key of a dataclass of sections."""
    return [
        line
        for section, fields in get_type_hints(kind).items()
        for line in describe_keys(fields, section)
    ]


def describe_keys(kind: Any, prefix: str) -> list[tuple[str, str, str]]:
    """Return (prefix.key, default as JSON, help) of every key of a dataclass, in order."""
    hints = get_type_hints(kind)
    return [
        (
            f"{prefix}.{item.name}",
            json.dumps(_default(item)),
            _with_allowed(item.metadata, hints[item.name]),
        )
        for item in dataclasses.fields(kind)
    ]


def _default(item: dataclasses.Field[Any]) -> Any:
    has_maker = item.default_factory is not dataclasses.MISSING
    return item.default_factory() if has_maker else item.default  # type: ignore[operator]


def _with_allowed(key: Mapping[str, Any], hint: Any) -> str:
    """Return the help of a key, with its bounds, and the values allowed unless it names them."""
    text: str = key["help"]
    choices = choices_of(hint)
    if not all(re.search(rf"\b{re.escape(choice)}\b", text) for choice in choices):
        return f"{text} (one of {', '.join(choices)})"
    if "min" not in key:
        return text
    each = "each " if get_origin(hint) is tuple else ""
    least, *most = (f"{key[end]:,}".removesuffix(".0") for end in ("min", "max") if end in key)
    return f"{text} ({each}{least} to {most[0]})" if most else f"{text} ({each}at least {least})"


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the texts that a key's type names, beside which it may allow others."""
    parts = (hint,) if get_origin(hint) is Literal else get_args(hint)
    return tuple(text for one in parts if get_origin(one) is Literal for text in get_args(one))


def settings_from_dict(kind: type[Settings], raw: Mapping[str, Any]) -> Settings:
    """Return the dataclass `kind` from nested dicts, as TOML or JSON gives them. Raises
    ConfigError: an unknown key, a wrong type, or a value outside its bounds."""
    return parse(kind, raw, WORDING)


def _wrong_type(key: str, hint: Any, value: object) -> str:
    if dataclasses.is_dataclass(hint):
        return f"{key} = {value!r} is a value, not a section. Write [{key}] in the config"
    if known := choices_of(hint):
        near = difflib.get_close_matches(str(value), known, n=1)
        meant = f". Did you mean {near[0]}?" if near and isinstance(value, str) else ""
        return f"{key} = {value!r} is not allowed: choose one of {', '.join(known)}{meant}"
    if get_origin(hint) is tuple:
        return f"{key} = {value!r} is not a list. Write e.g. {key} = [...]"
    if get_origin(hint) is dict:
        kind = "numbers" if get_args(hint)[1] is float else "texts"
        return f"{key} = {value!r} is not a table of {kind}. Write e.g. {key}.NAME = ..."
    return f"{key} = {value!r} is not of type {_type_name(hint)}. Correct the value"


def _type_name(hint: Any) -> str:
    """Return what a reader of a config calls the type; of several, each."""
    if get_origin(hint) is types.UnionType:
        return " or ".join(map(_type_name, get_args(hint)))
    return "list" if get_origin(hint) is tuple else str(hint.__name__)


WORDING = Wording(ConfigError, subject="", known="known", wrong_type=_wrong_type)
