"""The argument by which commands replace values of a training config."""

from typing import Annotated, Any

import typer

from gmeta.config.settings import choices_of
from gmeta.config.train_config import types_of_keys

METAVAR = "[SECTION.KEY=VALUE]..."


def complete_override(context: typer.Context, incomplete: str) -> list[str]:
    """Return what a shell may complete an override to: keys, with their values where listed."""
    values = {key: _choices(hint) for key, hint in types_of_keys().items()}
    # Bash takes KEY, = and VALUE for three words: behind `KEY=` only values are wanted.
    before = [word for word in context.params.get("overrides") or () if word != "="]
    if before and before[-1] in values:
        return list(values[before[-1]])
    return [f"{key}={value}" for key in values for value in values[key] or ("",) if incomplete]


def _choices(hint: Any) -> tuple[str, ...]:
    if hint is bool:
        return ("true", "false")
    return choices_of(hint)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar=METAVAR, help="replace values of the config", autocompletion=complete_override
    ),
]
