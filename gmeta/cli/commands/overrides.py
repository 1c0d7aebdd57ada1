"""The argument of commands by which values of a training config are replaced."""

from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from gmeta.config.train_config import TrainConfig

METAVAR = "[SECTION.KEY=VALUE]..."


def complete_override(context: typer.Context, incomplete: str) -> list[str]:
    """Return all that a shell may complete an override to: every key with each value that it has
    to choose from; behind `KEY=`, which bash takes for words of their own, the values alone."""
    values = {
        f"{section}.{name}": _choices(hint)
        for section, fields in get_type_hints(TrainConfig).items()
        for name, hint in get_type_hints(fields).items()
    }
    before = [word for word in context.params.get("overrides") or () if word != "="]
    if before and before[-1] in values:
        return list(values[before[-1]])
    return [f"{key}={value}" for key in values for value in values[key] or ("",) if incomplete]


def _choices(hint: Any) -> tuple[str, ...]:
    if hint is bool:
        return ("true", "false")
    return tuple(map(str, get_args(hint))) if get_origin(hint) is Literal else ()


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar=METAVAR, help="replace values of the config", autocompletion=complete_override
    ),
]
