"""The options that every command has: how much it says, and whether its result is JSON."""

import os
from typing import Annotated, Any

import typer

from gmeta.platform.verbosity import (
    JSON_VARIABLE,
    QUIET,
    VARIABLE,
    VERBOSE,
    is_json,
    stdout_for_result,
)

# Those that print what they found, made or decided; `runs` and `shards` have a --json of their own.
WITH_JSON = (
    *("prepare", "inspect", "train", "plan", "tune", "evaluate", "export", "adapt", "predict"),
    *("judge", "promote", "rollback", "publish", "antdt-sim"),
)


def with_options(command: Any, name: str) -> Any:
    """Return the command, and all below it, with -q, -v and, where it prints a result, --json.

    Any stands for click's types, as in load_command.
    """
    for below in getattr(command, "commands", {}).values():
        with_options(below, name)
    if not hasattr(command, "commands"):
        command.params += _options()[: 3 if name in WITH_JSON else 2]
    return command


def _talk(context: Any, variable: str, value: str) -> None:
    """Set how the command talks, in the environment: its ranks and processes hear of it, too."""
    if context.meta.setdefault(variable, value) != value:
        context.fail("--quiet and --verbose are given, which say the opposite: leave one out")
    os.environ[variable] = value
    if value == VERBOSE:
        os.environ.setdefault("GMETA_TRACEBACK", "1")


def _quiet(context: typer.Context, is_given: bool) -> None:
    if is_given:
        _talk(context, VARIABLE, QUIET)


def _verbose(context: typer.Context, is_given: bool) -> None:
    if is_given:
        _talk(context, VARIABLE, VERBOSE)


def _json(context: typer.Context, is_given: bool) -> None:
    if is_given:
        _talk(context, JSON_VARIABLE, "1")
    if is_json():
        context.with_resource(stdout_for_result())


def _only_options(
    quiet: Annotated[
        bool,
        typer.Option("-q", "--quiet", callback=_quiet, help="say nothing but results and errors"),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "-v", "--verbose", callback=_verbose, help="say more; tracebacks of errors too"
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            callback=_json,
            help="print the result as one JSON object, all else on standard error",
        ),
    ] = False,
) -> None:
    """Hold the options; nobody calls it."""


def _options() -> list[Any]:
    """Return the options as click knows them, which hand the command no value."""
    alone = typer.Typer(add_completion=False)
    alone.command()(_only_options)
    options = typer.main.get_command(alone).params
    for option in options:
        option.expose_value = False
        option.is_eager = True  # set before another option of the command is looked at
    return options
