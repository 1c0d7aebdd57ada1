"""The options that every command has: how much it prints, how, and whether its result is JSON."""

import os
from typing import Annotated, Any

import typer

from gmeta.platform import verbosity

PANEL = "Output"  # of the help
# Commands that print a result; `runs` and `shards` have a --json of their own.
WITH_JSON = (
    *("prepare", "inspect", "train", "plan", "tune", "evaluate", "export", "adapt", "predict"),
    *("channel judge", "channel promote", "channel rollback", "channel publish", "sim run"),
)


# Any stands for click's types, as in load_command.
def with_options(command: Any, name: str) -> Any:
    """Return the command, and all below it, with -q, -v, --plain; for one with a result --json."""
    for below in getattr(command, "commands", {}).values():
        with_options(below, name)
    if not hasattr(command, "commands"):
        alone = typer.Typer(add_completion=False)
        alone.command()(_declare_options)
        options = typer.main.get_command(alone).params[: 4 if name in WITH_JSON else 3]
        for option in options:
            # The command's function has no parameters for them.
            option.expose_value = False
            # Set before any other option is looked at, whose errors follow it.
            option.is_eager = True
        command.params += options
    return command


def _set_verbosity(context: Any, variable: str, value: str) -> None:
    """Set how much the command prints. Fails for -q together with -v."""
    # The options of a call share context.meta: another value of the variable contradicts the first.
    if context.meta.setdefault(variable, value) != value:
        context.fail("--quiet and --verbose are given, which say the opposite: leave one out")
    # In the environment, so that ranks and other processes of the command have it too.
    os.environ[variable] = value
    if value == verbosity.VERBOSE:
        os.environ.setdefault("GMETA_TRACEBACK", "1")


def _set_quiet(context: typer.Context, is_given: bool) -> None:
    if is_given:
        _set_verbosity(context, verbosity.VERBOSITY_VARIABLE, verbosity.QUIET)


def _set_verbose(context: typer.Context, is_given: bool) -> None:
    if is_given:
        _set_verbosity(context, verbosity.VERBOSITY_VARIABLE, verbosity.VERBOSE)


def _set_plain(context: typer.Context, is_given: bool) -> None:
    if is_given:
        _set_verbosity(context, verbosity.PLAIN_VARIABLE, "1")


def _set_json(context: typer.Context, is_given: bool) -> None:
    if is_given:
        _set_verbosity(context, verbosity.JSON_VARIABLE, "1")
    if verbosity.is_json():
        context.with_resource(verbosity.stdout_for_result())


def _declare_options(
    quiet: Annotated[
        bool,
        typer.Option(
            *("-q", "--quiet"),
            callback=_set_quiet,
            help="say nothing but results and errors",
            rich_help_panel=PANEL,
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            *("-v", "--verbose"),
            callback=_set_verbose,
            help="say more; tracebacks of errors too",
            rich_help_panel=PANEL,
        ),
    ] = False,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            callback=_set_plain,
            help="for logs: a line an event, no colours, no bars",
            rich_help_panel=PANEL,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            callback=_set_json,
            help="print the result as one JSON object, all else on standard error",
            rich_help_panel=PANEL,
        ),
    ] = False,
) -> None:
    """Declare the options; this function is never called."""
