"""Writes a resolved config as TOML, to read, copy and train."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from gmeta.config.train_config import TrainConfig, config_from_dict

_BARE = re.compile("[A-Za-z0-9_-]+")


def format_config(
    config: TrainConfig, header: str, tuned_keys: Collection[str] = (), every: bool = False
) -> str:
    """Return the config as TOML with a comment: no defaults but `tuned_keys`, or `every` value."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    names = {part: {"name": getattr(config, part).name} for part in ("model", "algorithm")}
    defaults = {**config_from_dict(names).by_key(), **TrainConfig().by_key()}
    table = ""
    for key, value in config.by_key().items():
        if every or key not in defaults or value != defaults[key] or key in tuned_keys:
            # An option, of somebody's own, may be called what TOML wants in quotes.
            section, _, name = key.partition(".")
            if name.startswith("options."):
                section, name = f"{section}.options", name.removeprefix("options.")
                name = name if _BARE.fullmatch(name) else format_toml_value(name)
            if section != table:
                lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
                table = section
            comment = "  # tuned" if key in tuned_keys else ""
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
