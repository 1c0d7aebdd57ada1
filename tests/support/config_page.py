"""Prints docs/config.md, the reference of a training config's keys: make config-page writes it."""

import inspect
from typing import get_type_hints

from gmeta.config.train_config import TrainConfig, describe_config

HEAD = """\
# Config keys

A training config is TOML with these sections; each key is shown with its default.
`gmeta train CONFIG section.key=value ...` replaces any key: the value is TOML, text needs no
quotes. An unknown key is refused with the nearest name. `gmeta config` prints this list.

Other keys: [the monitor and controller](stragglers.md), [a dataset's schema](format.md).
"""


def config_page() -> str:
    """Return the page: the keys of each section, with the help that the code has."""
    rows = describe_config()
    parts = [HEAD]
    for section, kind in get_type_hints(TrainConfig).items():
        meaning = " ".join(inspect.cleandoc(kind.__doc__).split())
        parts.append(f"\n## [{section}]\n\n{meaning}\n\n")
        parts += [
            f"- `{key} = {default}`: {text}\n"
            for key, default, text in rows
            if key.startswith(f"{section}.")
        ]
    return "".join(parts)


if __name__ == "__main__":
    print(config_page(), end="")
