"""Writes a resolved config as TOML, to read, copy and train."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from gmeta.config.train_config import TrainConfig


def format_config(
    config: TrainConfig, header: str, tuned_keys: Collection[str] = (), every: bool = False
) -> str:
    """Return the config as TOML under a comment: what is not a default, `tuned_keys`, or `every`
    value."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    resolved, defaults = config.to_json(), TrainConfig().to_json()
    for section in dataclasses.fields(config):
        kept = [
            (name, value)
            for name, value in resolved[section.name].items()
            if every
            or value != defaults[section.name][name]
            or f"{section.name}.{name}" in tuned_keys
        ]
        if kept:
            lines += ["", f"[{section.name}]"] if lines else [f"[{section.name}]"]
        for name, value in kept:
            comment = "  # tuned" if f"{section.name}.{name}" in tuned_keys else ""
            lines.append(f"{name} = {format_toml_value(value)}{comment}")
    return "\n".join(lines) + "\n"


def format_toml_value(value: Any) -> str:
    """Return a value of a config on one line of TOML."""
    if isinstance(value, str):
        # JSON's escapes are valid in TOML, which wants DEL escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_toml_value, value))}]"
    if isinstance(value, Mapping):
        pairs = (
            f"{format_toml_value(name)} = {format_toml_value(each)}" for name, each in value.items()
        )
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, bool | int | float):
        # 1e-05 is TOML too.
        return json.dumps(value)
    raise TypeError(f"TOML has no value for {value!r}")
