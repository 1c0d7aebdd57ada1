"""The `gmeta` command: subcommands, and how an error becomes one line and an exit code.

Exit code 2: the user can mend it. 1: a failure. No traceback for either; GMETA_TRACEBACK=1 shows
it.
"""

import errno
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console

from gmeta.errors import GMetaError

# Where each subcommand is. Loaded when it is asked for: the data-shard service must start without
# torch, and nobody waits seconds for the help of `prepare`.
COMMANDS = {
    "prepare": ("gmeta.commands.prepare", "prepare"),
    "inspect": ("gmeta.commands.inspect", "inspect"),
    "train": ("gmeta.commands.train", "train"),
    "config": ("gmeta.commands.train", "show_config"),
    "evaluate": ("gmeta.commands.evaluate", "evaluate"),
    "export": ("gmeta.commands.export", "export"),
    "predict": ("gmeta.commands.export", "predict"),
    "shard-service": ("gmeta.commands.shard_service", "shard_service"),
    "shards": ("gmeta.commands.shards", "shards"),
    "antdt-sim": ("gmeta.commands.antdt", "antdt_sim"),
    "antdt-replay": ("gmeta.commands.antdt", "antdt_replay"),
}

METAIO_ERRORS = (("metaio.errors", "MetaIOError"),)
# What the file systems of fsspec raise beside OSError: s3fs, gcsfs, adlfs and http.
STORE_ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("azure.core.exceptions", "AzureError"),
    ("aiohttp", "ClientError"),
)
# The user can mend them: another path, or its permissions.
WRONG_PATHS = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)


class _LazyCommands(typer.core.TyperGroup):
    """A command group that imports a command's module when the command is asked for.

    Any stands for click's types: some versions of typer bring a click of their own.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        found: Any = getattr(importlib.import_module(module), attribute)
        if isinstance(found, typer.Typer):
            command = typer.main.get_command(found)
            command.name = cmd_name
            return command
        alone = typer.Typer(rich_markup_mode="rich", add_completion=False)
        alone.command(cmd_name)(found)
        return typer.main.get_command(alone)


app = typer.Typer(
    name="gmeta",
    cls=_LazyCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def _root() -> None:
    """Meta-learning recommenders: prepare logs, train on many ranks, evaluate on cold starts."""


def main() -> None:
    """Run the command line and end the process with the right exit code."""
    try:
        app()
    except SystemExit as done:
        _leave(done.code if isinstance(done.code, int) else int(done.code is not None))
    except _told_errors() as error:
        if os.environ.get("GMETA_TRACEBACK"):
            raise
        _fail(*_told(error))
    except (MemoryError, RuntimeError) as error:
        if os.environ.get("GMETA_TRACEBACK") or not _is_of_memory(error):
            raise
        _fail(
            f"out of memory: {(str(error).splitlines() or [''])[0]}. Less is needed with narrower "
            "or smaller tables (model.embedding_dim, hash), smaller steps (data.tasks_per_step, "
            "outer.accumulate_steps) or more ranks",
            1,
        )
    except KeyboardInterrupt:
        _fail("interrupted: what was committed stays, what was half-written is dropped", 130)


def _told_errors() -> tuple[type[Exception], ...]:
    """What is told in one line; those of others only if a command has loaded what raises them."""
    return (GMetaError, OSError, *_loaded(METAIO_ERRORS), *_loaded(STORE_ERRORS))


def _loaded(names: Sequence[tuple[str, str]]) -> list[type[Exception]]:
    found = [(sys.modules.get(module), name) for module, name in names]
    return [getattr(module, name) for module, name in found if hasattr(module, name)]


def _told(error: Exception) -> tuple[str, int]:
    """The line to print and the exit code."""
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        if error.errno == errno.ENOSPC:
            return (
                f"no space left on device{where}. "
                "Free some and run again; nothing half-written was kept",
                1,
            )
        return f"{error.strerror or error}{where}", 2 if isinstance(error, WRONG_PATHS) else 1
    if isinstance(error, GMetaError):
        return str(error), error.exit_code
    if isinstance(error, tuple(_loaded(STORE_ERRORS))):
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        return (
            f"a remote store refused or did not answer: {type(error).__name__}: {reason}. "
            "Check the URL, the credentials and the network, then run again",
            1,
        )
    # Of metaio's: a damaged dataset is a failure, a wrong description or input the user can mend.
    return str(error), 1 if type(error).__name__ == "FormatError" else 2


def _is_of_memory(error: Exception) -> bool:
    """Whether memory ran out: torch says so in a RuntimeError."""
    told = str(error)
    return isinstance(error, MemoryError) or "out of memory" in told or "allocate memory" in told


def _fail(message: str, code: int) -> None:
    rank = os.environ.get("RANK")
    prefix = "error" if rank is None else f"error on rank {rank}"
    console = Console(stderr=True, soft_wrap=True)
    with console.capture() as styled:
        console.print(f"[bold red]{prefix}[/]: ", end="")
    # Not through rich, to which brackets in a message are markup; and in one piece, because other
    # ranks write to the same place.
    sys.stderr.write(f"{styled.get()}{message}\n")
    _leave(code)


def _leave(code: int) -> None:
    """End at once: whatever a command wrote is durable by now.

    A normal exit waits for ranks that wait in a collective, and in about 1 run of 15 a native
    thread of the libraries aborts the interpreter on its way out ("terminate called without ...").
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
