"""The `gmeta` command: its subcommands, and how an error becomes one line and an exit code."""

import codecs
import difflib
import importlib
import io
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from gmeta import __version__
from gmeta.cli.commands import error_messages
from gmeta.cli.commands.verbosity_options import with_options
from gmeta.errors import UserError, is_of_memory
from gmeta_keys.translate_errors import translate_errors

# Each with its help's first sentence for `gmeta --help`, by panel. A command's module is imported
# only when the command runs: the data-shard service must start without torch, and the help of
# `prepare` must not take seconds.
PANELS = {
    "Prepare": {
        "init": (
            "Write a first schema and config, with comments, from looking at a log's first rows."
        ),
        "fetch": "Copy what is new in a Kafka topic into the next partition of a log.",
        "prepare": "Turn raw tables into a dataset of tasks, each with a support and a query set.",
        "inspect": "Show what a dataset, stream, run, checkpoint, exported model or channel holds.",
    },
    "Train": {
        "train": "Train a model; on several ranks with --nproc-per-node, or under torchrun.",
        "plan": (
            "Show where training would put tables on GPUs that are not here, and what a step "
            "would cost."
        ),
        "tune": "Choose settings by short runs that are scored on the validation split.",
        "config": (
            "Show a config with every key resolved, as TOML to copy; without one, list every key."
        ),
        "runs": (
            "List runs with how far they came and their best validation; compare some that are "
            "named."
        ),
        "evaluate": (
            "Adapt to every unseen task's support set and score its query set, before and after."
        ),
    },
    "Serve": {
        "export": (
            "Make a trained run one folder that adapts and predicts alone: gmeta.load(OUT)."
        ),
        "adapt": (
            "Adapt to every task of SUPPORT, and write each task's state, which model.task(STATE)"
            " reads."
        ),
        "predict": "Adapt to every task of QUERY by its rows in SUPPORT, and predict its rows.",
        "score": "Score an exported model on a prepared dataset, as it would answer when served.",
        "serve": (
            "Answer the Open Inference Protocol with an exported model that adapts to each "
            "request's task."
        ),
    },
    "Deliver": {
        "channel judge": (
            "Compare a run with the model that a channel serves, on tasks that neither was trained "
            "on."
        ),
        "channel promote": "Make a run's model, or an export, the one that a channel serves.",
        "channel rollback": "Let a channel serve an earlier version again.",
        "channel publish": (
            "Copy a channel, or a stream, to a URL, from where other machines follow it."
        ),
        "follow": (
            "Turn closed partitions of a log into increments, train on each, judge it and promote "
            "it."
        ),
    },
    "Operate": {
        "install-torchrec": (
            "Install torchrec and fbgemm into this environment, in the versions that fit its torch."
        ),
        "shard-service": (
            "Hand out the shards of a job's data to its workers, each exactly once an epoch."
        ),
        "shards": "Look into and operate a running data-shard service; audit checkpoints offline.",
        "sim run": (
            "Show how long a job takes with each way of dealing with stragglers, in simulated time."
        ),
        "sim replay": (
            "Decide once more from the logged inputs, and say where it comes out differently."
        ),
    },
}
COMMANDS = {name: text for panel in PANELS.values() for name, text in panel.items()}
# The first words of commands with two.
GROUPS = {
    "channel": "Judge, promote, roll back and publish the versions that servers follow.",
    "sim": "Simulate a job's stragglers; replay what the data-shard service decided about them.",
}
_PANEL_OF = {name.split()[0]: panel for panel, names in PANELS.items() for name in names}
# Commands whose module in gmeta.cli.commands has another name.
MODULES = {
    "predict": "export",
    **{name: "delivery" for name in COMMANDS if name.startswith("channel ")},
}
RENAMED = {
    **{name: f"channel {name}" for name in ("judge", "promote", "rollback", "publish")},
    **{"antdt-sim": "sim run", "antdt-replay": "sim replay"},
}
# What other tools call these commands: the suggestion for a word that is unknown here.
ELSEWHERE = {"sweep": "tune", "fit": "train"}


# Any stands for click's types: some versions of typer bring a click of their own.
def load_command(name: str) -> Any:
    """Import a subcommand's module and return the command with its options."""
    own_name = MODULES.get(name, name.replace("-", "_").replace(" ", "_"))
    module = importlib.import_module(f"gmeta.cli.commands.{own_name}")
    word = name.split()[-1]
    imported: Any = getattr(module, word.replace("-", "_"))
    if isinstance(imported, typer.Typer):
        command = typer.main.get_command(imported)
        command.name = name
        return with_options(command, name)
    alone = typer.Typer(rich_markup_mode="rich", add_completion=False)
    alone.command(word)(imported)
    return with_options(typer.main.get_command(alone), name)


class _LazyCommand(typer.core.TyperCommand):
    full_name: str

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        # Click makes the context of the command that runs alone, so only its module is imported.
        return load_command(self.full_name).make_context(info_name, args, parent, **extra)


class _InterruptedError(Exception):
    """Ctrl-C under a name that typer lets pass."""


class _Subcommands(typer.core.TyperGroup):
    # The group's own name and a space; nothing for `gmeta` itself.
    prefix = ""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            # On KeyboardInterrupt typer would end silently, without the line that says what is
            # kept.
            raise _InterruptedError from error

    def list_commands(self, ctx: Any) -> list[str]:
        own = [name.removeprefix(self.prefix) for name in COMMANDS if name.startswith(self.prefix)]
        return list(dict.fromkeys(name.split()[0] for name in own))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        name = self.prefix + cmd_name
        shown: Any = {"rich_markup_mode": "rich", "rich_help_panel": _PANEL_OF.get(name)}
        if name in GROUPS:
            group = _Subcommands(name=name, help=GROUPS[name], no_args_is_help=True, **shown)
            group.prefix = f"{name} "
            return group
        if name in COMMANDS:
            command = _LazyCommand(cmd_name, help=COMMANDS[name], **shown)
            command.full_name = name
            return command
        # A shell that completes the line is told nothing of it.
        if ctx.resilient_parsing:
            return None
        if name in RENAMED:
            raise UserError(f"gmeta {name} is gmeta {RENAMED[name]} now")
        meant = {**{word: self.prefix + word for word in self.list_commands(ctx)}, **ELSEWHERE}
        near = difflib.get_close_matches(cmd_name, [*meant, *RENAMED], n=1)
        hint = (
            f"did you mean {({**RENAMED, **meant})[near[0]]!r}?"
            if near
            else f"`gmeta {self.prefix}--help` lists all commands"
        )
        return ctx.fail(f"no such command {cmd_name!r}: {hint}")


app = typer.Typer(
    name="gmeta",
    cls=_Subcommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted and "--json" in sys.argv:
        described = importlib.import_module("gmeta.cli.commands.versions").describe_versions()
        typer.echo(json.dumps(described))
        raise typer.Exit
    if wanted:
        typer.echo(f"gmeta {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="show the version and exit; with --json those of packages and file formats, too",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", hidden=True)] = False,
) -> None:
    """Meta-learning recommenders: prepare logs, train on many ranks, evaluate on cold starts."""


# What tables are printed with, and the like in ASCII.
_PLAIN = str.maketrans(dict(zip("\N{MINUS SIGN}\N{EN DASH}\N{EM DASH}↑↓≥", "---^v>", strict=True)))


def _degrade(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return what stands on a stream in place of characters that its encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    try:
        # A file name's bytes that are no text, as they are on the disk.
        return text.encode("ascii", "surrogateescape"), error.end
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode("ascii", "backslashreplace").decode(), error.end


def _open_streams() -> None:
    """Open /dev/null for each missing standard stream; let others carry what their encoding can."""
    codecs.register_error("gmeta", _degrade)
    for name in ("stdin", "stdout", "stderr"):
        # Else the next file that is opened would get the stream's number, and what a library prints
        # would be written into that file.
        if getattr(sys, name) is None:
            # The lowest free number is the stream's own, as lower ones are open by now.
            number = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))
    for stream in (sys.stdout, sys.stderr):
        # Else hours of work end in a traceback where a character of a result is not in ASCII.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="gmeta")


def main(work: Callable[[], object] = app) -> None:
    """Run the command line, or other work in its place, and end the process with its exit code."""
    _open_streams()
    try:
        with translate_errors(_FaultError):
            _run(work)
    except _FaultError as fault:
        error = fault.args[0]
        sys.excepthook(type(error), error, error.__traceback__)
        # A normal exit may abort, as a collective may be under way.
        _exit_now(1)


class _FaultError(Exception):
    """A defect, or an error that is to be shown with its traceback."""


def _run(work: Callable[[], object]) -> None:
    try:
        work()
        _exit_now(0)
    except SystemExit as done:
        # A text in place of a code, as of sys.exit("..."), counts as 1.
        _exit_now(done.code if isinstance(done.code, int) else int(done.code is not None))
    except error_messages.reportable_errors() as error:
        # main shows the error with its traceback.
        if os.environ.get("GMETA_TRACEBACK"):
            raise
        error_messages.wait_for_other_ranks(error)
        # Exit codes: 2, the user can correct it; 1, a failure; 3, `prepare --extend` does not trust
        # the rows.
        _exit_with_error(*error_messages.format_error(error))
    # torch raises a RuntimeError where a GPU's memory runs out.
    except (MemoryError, RuntimeError) as error:
        if os.environ.get("GMETA_TRACEBACK") or not is_of_memory(error):
            raise
        _exit_with_error(
            f"out of memory: {(str(error).splitlines() or [''])[0]}. Less is needed with narrower "
            "or smaller tables (model.embedding_dim, hash), smaller steps (data.tasks_per_step, "
            "outer.accumulate_steps) or more ranks",
            1,
        )
    except (KeyboardInterrupt, _InterruptedError) as error:
        # 130 is a shell's code for SIGINT: 128 + 2.
        if os.environ.get("RANK", "0") != "0":
            # Every rank is interrupted: rank 0 alone prints it.
            _exit_now(130)
        notes = error_messages.join_notes(error.__cause__ or error)
        _exit_with_error(
            f"interrupted: what was committed stays, what was half-written is dropped{notes}", 130
        )


def _exit_with_error(message: str, code: int) -> None:
    error_messages.write_error(message)
    _exit_now(code)


def _exit_now(code: int) -> None:
    """End the process at once: what a command wrote is durable by now."""
    # Not sys.exit: it would wait for ranks that are in a collective, and in about 1 run of 15 a
    # native thread of the libraries aborts the interpreter on its way out ("terminate called
    # without ...").
    logging.shutdown()
    # os._exit runs no exit handlers: the fork server's folder is removed here.
    if "gmeta.platform.forking" in sys.modules:
        sys.modules["gmeta.platform.forking"].remove_folder()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
