"""The `gmeta` command: subcommands, and how an error becomes one line and an exit code.

Exit code 2: the user can mend it. 1: a failure. No traceback for either; GMETA_TRACEBACK=1 shows
it.
"""

import importlib
import logging
import os
import sys
from typing import Any

import typer

from gmeta.commands.telling import told, told_errors, write_error

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
    except told_errors() as error:
        if os.environ.get("GMETA_TRACEBACK"):
            raise
        _fail(*told(error))
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


def _is_of_memory(error: Exception) -> bool:
    """Whether memory ran out: torch says so in a RuntimeError."""
    told = str(error)
    return isinstance(error, MemoryError) or "out of memory" in told or "allocate memory" in told


def _fail(message: str, code: int) -> None:
    write_error(message)
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
