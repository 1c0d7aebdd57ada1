"""Runs a stage: a command of gmeta in a process forked from one that has imported torch."""

import atexit
import os
import runpy
import shlex
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from gmeta.pipeline.stage_outcome import CHANNEL_STAGES
from gmeta.platform.forking import forking_context, start
from gmeta_keys.stop_flag import StopFlag

# Imported once, not by every stage: that saves seconds for the commands, and tenths of a second for
# what they import late. A name that a later release of a package lacks is passed over.
_PRELOADED = [
    "gmeta.cli.main",
    "gmeta.cli.commands.delivery",
    "gmeta.cli.commands.export",
    "gmeta.cli.commands.prepare",
    "gmeta.cli.commands.score",
    "gmeta.cli.commands.train",
    "gmeta.cli.commands.work.channel_changes",
    "gmeta.cli.commands.work.model_export",
    "gmeta.cli.commands.work.export_scores",
    "gmeta.cli.commands.work.training_rank",
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
    "torch.profiler",
    "torch.utils.serialization",
    "torch.utils.tensorboard",
    "typer._adapters",
    "typer._click.decorators",
    "zoneinfo",
    "gmeta.pipeline.preload_last",
]
# Of the line before what each try of a stage says.
_BEGINS = "$ gmeta "


@dataclass(frozen=True)
class _StageProcess:
    """A process that waits for one command, which comes over `orders`."""

    process: BaseProcess
    orders: Connection

    @staticmethod
    def begin() -> "_StageProcess":
        # Stages share the host with the server. Threads that spin until they meet keep cores from
        # those that they wait for: with this count they sleep after 0.2 ms, by default after 17.
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
        context = forking_context(_PRELOADED)
        stages_side, own_side = context.Pipe(duplex=False)
        process = context.Process(target=_wait_and_run, args=(stages_side,))
        start(process)
        # With this end closed a dead stage is noticed: sending raises BrokenPipeError.
        stages_side.close()
        return _StageProcess(process, own_side)


# At most one process, for the next stage.
_waiting: list[_StageProcess] = []
# At most one: stages run one after the other.
_under_way: list[BaseProcess] = []
# Set by a signal: no other stage begins.
_ending = StopFlag()


def find_command(arguments: Sequence[str]) -> list[str]:
    """Return the words behind `gmeta` that run a stage: some are commands of `gmeta channel`."""
    return [*(["channel"] if arguments[0] in CHANNEL_STAGES else []), *arguments]


def run_stage(arguments: Sequence[str], log: Path) -> int:
    """Run a stage, ARGUMENTS[0], with its output in the file `log`, and return its exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # A log that cannot be written fails here: the stage could not say why. On a full disk a file
    # can be opened, not written.
    try:
        with log.open("a") as file:
            file.write(f"{_BEGINS}{shlex.join(arguments)}\n")
    except OSError as error:
        # A write does not name its file.
        raise OSError(error.errno, error.strerror, str(log)) from error
    stage = _send_order((tuple(arguments), str(log)))
    process = stage.process
    _under_way.append(process)
    try:
        # A signal may have come before there was a stage to end.
        if _ending:
            process.terminate()
        # The next stage's process starts while this one works: that saves 25 ms.
        _waiting.append(_StageProcess.begin())
        process.join()
    finally:
        _under_way.clear()
        # After Ctrl-C the stage still runs.
        if process.is_alive():
            process.terminate()
            process.join()
        stage.orders.close()
    return process.exitcode or 0


def end_stage() -> None:
    """Send SIGTERM to the stage that runs, or else to the next one as it begins."""
    _ending.stop()
    # On SIGTERM training writes a checkpoint, from which it goes on the next time.
    for process in _under_way:
        process.terminate()


def _send_order(order: tuple[tuple[str, ...], str]) -> _StageProcess:
    while True:
        stage = _waiting.pop() if _waiting else _StageProcess.begin()
        try:
            stage.orders.send(order)
        except BrokenPipeError:
            stage.orders.close()
            continue
        return stage


@atexit.register
def _end_waiting() -> None:
    # multiprocessing would wait for it at exit.
    while _waiting:
        _waiting.pop().orders.close()


def last_line(log: Path) -> str:
    """Return the last line of a stage's output: of one that failed, the reason."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    lines_with_text = [line.strip() for line in lines if line.strip()]
    if not lines_with_text or lines_with_text[-1].startswith(_BEGINS):
        return "it said nothing, as where the disk of its log is full"
    return lines_with_text[-1]


def _wait_and_run(orders: Connection) -> None:
    try:
        arguments, log = orders.recv()
    except (EOFError, OSError):
        # The parent ended without an order: nothing is left to do.
        os._exit(0)
    threading.Thread(target=_end_with, args=(orders,), daemon=True).start()
    try:
        with Path(log).open("ab") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())
    except OSError:
        # It was written a moment ago: the disk fails, and there is no place to say so.
        os._exit(1)
    sys.argv = ["gmeta", *find_command(arguments)]
    # As `python -m gmeta` does: the command line ends the process with its exit code.
    runpy.run_module("gmeta", run_name="__main__", alter_sys=True)


def _end_with(parent: Connection) -> None:
    """End this process and the ranks that it started when its parent dies, however that happens."""
    with suppress(EOFError, OSError):
        # Nothing is sent: the pipe only ends, with the parent.
        parent.recv()
    # Not os._exit: on SIGTERM training writes a checkpoint and its ranks end.
    os.kill(os.getpid(), signal.SIGTERM)
