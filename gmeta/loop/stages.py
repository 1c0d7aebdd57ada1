"""A stage: one command of gmeta in a process of its own, forked from one that has imported torch.

It ends with the process that asked for it, however that dies.
"""

import multiprocessing as mp
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

# Imported once, not by every stage: seconds of the commands, and tenths of a second of what they
# import only once they need it. A name that a later release of a package lacks is passed over.
_PRELOADED = [
    "gmeta.cli",
    "gmeta.commands.delivery",
    "gmeta.commands.export",
    "gmeta.commands.prepare",
    "gmeta.commands.score",
    "gmeta.commands.train",
    "gmeta.commands.work.delivery",
    "gmeta.commands.work.export",
    "gmeta.commands.work.score",
    "gmeta.commands.work.train",
    "dateutil.relativedelta",
    "fsspec.implementations.chained",
    "fsspec.implementations.local",
    "numpy.ctypeslib",
    "numpy.ma",
    "pyarrow.dataset",
    "pydantic.fields",
    "pydantic.plugin._loader",
    "pydantic.type_adapter",
    "rich._emoji_codes",
    "torch.distributed.optim",
    "torch.profiler",
    "torch.utils.serialization",
    "torch.utils.tensorboard",
    "typer._adapters",
    "typer._click.decorators",
    "zoneinfo",
    "gmeta.loop.hidden_from_gc",
]


def run_stage(arguments: Sequence[str], log: Path) -> int:
    """Run `gmeta ARGUMENTS` with its output in the file `log`, and return its exit code."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    log.parent.mkdir(parents=True, exist_ok=True)
    # Nothing is ever sent: its end tells the stage that this process has died.
    stages_side, own_side = context.Pipe(duplex=False)
    process = context.Process(target=_become, args=(tuple(arguments), str(log), stages_side))
    process.start()
    stages_side.close()
    try:
        process.join()
    finally:
        if process.is_alive():  # Ctrl-C
            process.terminate()
            process.join()
        own_side.close()
    return process.exitcode or 0


def last_line(log: Path) -> str:
    """Return the last line of a stage's output: of one that failed, why."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    told = [line.strip() for line in lines if line.strip()]
    return told[-1] if told else "it said nothing"


def _become(arguments: tuple[str, ...], log: str, parent: Connection) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with Path(log).open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = ["gmeta", *arguments]
    # As `python -m gmeta` does: the command line ends the process with its exit code.
    runpy.run_module("gmeta", run_name="__main__", alter_sys=True)


def _end_with(parent: Connection) -> None:
    """End this process, and the ranks that it started, when the one that asked for it dies."""
    with suppress(EOFError, OSError):
        parent.recv()
    os.kill(os.getpid(), signal.SIGTERM)
