"""Method: a stage of the loop is killed at the n-th change that it makes to the disk. What changes
the disk is what the interpreter reports of it (PEP 578); files that native code writes lie in
folders that such events make and name. A stage is forked with everything imported and killed with
SIGKILL: no cleanup runs. What every such kill leaves, one run shows that is stopped at each change,
with all its threads, while a copy is made. It is taken up in the process of the test, which costs
half of another fork. A power cut leaves the same names, as file systems keep the order of these,
but of a file only what fsync was called for since it was last written."""

import os
import runpy
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import typer

from gmeta.cli.main import app
from gmeta.pipeline.stage_process import find_command
from tests.support.commands import environment, gmeta
from tests.support.processes import with_imports_ready
from tests.support.waiting import PATIENCE_S, wait_until

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "shutil.rmtree"}


class Left(NamedTuple):
    """What a kill leaves, as a folder, and the files in it whose data a power cut would take."""

    folder: Path
    unsynced: list[Path]


def killed_at(arguments: list[str], root: Path, event: int) -> int:
    """Run a stage killed at its `event`-th change below `root`; its exit code, -9 where it was."""
    process = with_imports_ready().Process(
        target=_become, args=(tuple(arguments), str(root), event, os.devnull, environment())
    )
    process.start()
    with _to_its_end(process):
        pass
    return process.exitcode or 0


def left_at_each_change(arguments: list[str], root: Path, copies: Path) -> list[Left]:
    """Run a stage to its end; what a kill before each change had left, and last what it left."""
    context = with_imports_ready()
    found: list[Left] = []
    notes = copies / "synced"
    notes.write_text("".join(f"{_state_of(path)}\n" for path in root.rglob("*")))

    def copied() -> Left:
        folder = copies / str(len(found))
        # What has another name is of the snapshot, or whole: see restored.
        shutil.copytree(root, folder, copy_function=_copied)
        synced = set(notes.read_text().splitlines())
        files = [path for path in root.rglob("*") if path.is_file() and path.stat().st_size]
        return Left(
            folder, [path.relative_to(root) for path in files if _state_of(path) not in synced]
        )

    stops, sign = context.Pipe(duplex=False)
    process = context.Process(
        target=_become, args=(tuple(arguments), str(root), 0, str(notes), environment(), sign)
    )
    process.start()
    pid = process.pid
    assert pid is not None
    sign.close()
    with _to_its_end(process), suppress(EOFError):
        while stops.poll(PATIENCE_S):  # also where it has ended
            stops.recv_bytes()
            wait_until(lambda: _stands_still(pid), "the stage stops", pause_s=0.001)
            found.append(copied())
            with suppress(ProcessLookupError):  # it ends while a thread was about to stop
                os.kill(pid, signal.SIGCONT)
    assert process.exitcode == 0, (process.exitcode, len(found))
    return [*found, copied()]


def _state_of(path: Path | int) -> str:
    """What another write into a file changes."""
    found = os.stat(path)
    return f"{found.st_ino} {found.st_mtime_ns} {found.st_size}"


def cut_power(left: Left, root: Path, keeps_length: bool) -> None:
    """Make `root` what a power cut leaves: unsynced files are zeros, or the first half is there."""
    restored(left.folder, root)
    for name in left.unsynced:
        content = (root / name).read_bytes()
        (root / name).unlink()  # it may be a link to the snapshot's
        lost = bytes(len(content)) if keeps_length else content[: len(content) // 2]
        (root / name).write_bytes(lost)


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


def fail_while(flag: str, root: str, notes: str) -> None:
    """From now on no file below `root` is made by this process while `flag` is there, which has the
    error's number and by how many seconds the wall clock is wrong; each failure is a byte in
    `notes`."""
    now = time.time

    def trouble() -> tuple[int, float]:
        with suppress(FileNotFoundError):
            number, jump_s = Path(flag).read_text().split()
            return int(number), float(jump_s)
        return 0, 0.0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if not (_is_opened_to_write(event, args) or event in ("os.mkdir", "os.rename")):
            return
        if _is_below(args[0], root) and (number := trouble()[0]):
            with open(notes, "a") as file:
                file.write(".")
            raise OSError(number, os.strerror(number), args[0])

    sys.addaudithook(watch)
    time.time = lambda: now() + trouble()[1]


def _is_opened_to_write(event: str, args: tuple[Any, ...]) -> bool:
    return event == "open" and isinstance(args[2], int) and bool(args[2] & _WRITES)


def _is_below(path: object, root: str) -> bool:
    return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(root)


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
    arguments: tuple[str, ...], root: str, last: int, synced: str, env: Mapping[str, str],
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
        if not (_is_opened_to_write(event, args) or event in _CHANGES):
            return
        if _is_below(args[0], root):
            seen += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)
            if sign is not None:
                with one_at_a_time:
                    sign.send_bytes(b"here")
                    os.kill(os.getpid(), signal.SIGSTOP)

    flush = os.fsync

    def noted(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        flush(number)
        with open(synced, "a") as notes:
            notes.write(f"{_state_of(number)}\n")

    os.fsync = os.fdatasync = noted
    sys.argv = ["gmeta", *find_command(arguments)]
    sys.addaudithook(watch)
    runpy.run_module("gmeta", run_name="__main__", alter_sys=True)
