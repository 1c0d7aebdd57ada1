"""Method: a stage of the loop is killed at the n-th change that it makes to the disk. What changes
the disk is what the interpreter reports of it (PEP 578); files that native code writes lie in
folders that such events make and name. A stage is forked with everything imported and killed with
SIGKILL: no cleanup runs, as in a power cut of the process. What every such kill leaves, one run
shows that is stopped at each change, with all its threads, while a copy is made. It is taken up in
the process of the test, which costs half of another fork."""

import os
import resource
import runpy
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import typer

from gmeta.cli.main import app
from gmeta.pipeline.stage_process import find_command
from tests.support.commands import environment, gmeta
from tests.support.processes import with_imports_ready
from tests.support.waiting import PATIENCE_S, wait_until

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "shutil.rmtree"}


def killed_at(arguments: list[str], root: Path, event: int, notes: Path) -> int:
    """Run a stage killed at its `event`-th change below `root`; its exit code, -9 where it was."""
    process = with_imports_ready().Process(
        target=_become, args=(tuple(arguments), str(root), event, str(notes), environment())
    )
    process.start()
    with _to_its_end(process):
        pass
    return process.exitcode or 0


def left_at_each_change(arguments: list[str], root: Path, copies: Path) -> list[Path]:
    """Run a stage to its end; what a kill before each change had left, as folders."""
    context = with_imports_ready()
    found: list[Path] = []
    stops, sign = context.Pipe(duplex=False)
    process = context.Process(
        target=_become, args=(tuple(arguments), str(root), 0, os.devnull, environment(), sign)
    )
    process.start()
    pid = process.pid
    assert pid is not None
    sign.close()
    with _to_its_end(process), suppress(EOFError):
        while stops.poll(PATIENCE_S):  # also where it has ended
            stops.recv_bytes()
            wait_until(lambda: _stands_still(pid), "the stage stops", pause_s=0.001)
            found.append(copies / str(len(found)))
            # What has another name is of the snapshot, or whole: see restored.
            shutil.copytree(root, found[-1], copy_function=_copied)
            with suppress(ProcessLookupError):  # it ends while a thread was about to stop
                os.kill(pid, signal.SIGCONT)
    assert process.exitcode == 0, (process.exitcode, len(found))
    return found


@contextmanager
def _to_its_end(process: BaseProcess) -> Iterator[None]:
    """Waits for a process behind the block. What hangs, or stands still, fails and is killed."""
    try:
        yield
        process.join(PATIENCE_S)
        assert process.exitcode is not None, f"it hangs for {PATIENCE_S:.0f} s"
    finally:
        process.kill()
        process.join()


def _stands_still(pid: int) -> bool:
    """Tell whether all threads are stopped, or the process has ended."""
    try:
        states = [
            (thread / "stat").read_text().rpartition(") ")[2][0]
            for thread in Path(f"/proc/{pid}/task").iterdir()
        ]
    except (FileNotFoundError, ProcessLookupError):  # a thread has ended, or all of them
        return not Path(f"/proc/{pid}").exists()
    return set(states) <= set("TZ")


def taken_up(arguments: list[str], log: Path) -> int:
    """A stage as the loop runs it, in this process; training in another, which it changes."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if arguments[0] == "train":
        done = gmeta(*arguments)
        log.write_text(done.stdout + done.stderr)
        return done.returncode
    try:
        code = app(find_command(arguments), standalone_mode=False)
    except typer.Exit as ended:
        code = ended.exit_code
    return int(code or 0)


def restored(snapshot: Path, root: Path) -> None:
    """Make `root` what the snapshot is."""
    shutil.rmtree(root, ignore_errors=True)
    # Links: no stage changes a file in place, but for logs, which are copied.
    shutil.copytree(snapshot, root, copy_function=_linked)


def _copied(source: str, target: str) -> None:
    if os.stat(source).st_nlink > 1:
        _linked(source, target)
    else:
        shutil.copy2(source, target)


def _linked(source: str, target: str) -> None:
    if source.endswith((".log", ".jsonl", ".lock")):
        shutil.copy2(source, target)
    else:
        os.link(source, target)


def _become(
    arguments: tuple[str, ...], root: str, last: int, notes: str, env: Mapping[str, str],
    sign: Connection | None = None,
) -> None:  # fmt: skip
    os.environ.clear()
    os.environ.update(env)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    seen, one_at_a_time = 0, threading.Lock()

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event == "open":
            if not isinstance(args[2], int) or not args[2] & _WRITES:
                return
        elif event not in _CHANGES:
            return
        if isinstance(args[0], str | os.PathLike) and os.fspath(args[0]).startswith(root):
            seen += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)
            if sign is not None:
                with one_at_a_time:
                    sign.send_bytes(b"here")
                    os.kill(os.getpid(), signal.SIGSTOP)

    leave = os._exit

    def told(code: int) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        own = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(own, f"{seen} {used.ru_utime + used.ru_stime:.3f}".encode())
        leave(code)

    os._exit = told  # type: ignore[assignment]
    sys.argv = ["gmeta", *find_command(arguments)]
    sys.addaudithook(watch)
    runpy.run_module("gmeta", run_name="__main__", alter_sys=True)
