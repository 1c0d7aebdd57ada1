"""The command line in processes that are forked with everything imported: so are the ranks that it
starts. A fresh interpreter imports for seconds, three of them a run of two ranks; nothing else
differs from `python -m gmeta`, which some tests start all the same.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tests.processes import with_imports_ready


class _Task(NamedTuple):
    arguments: tuple[str, ...]
    env: dict[str, str]
    folder: Path
    cwd: Path | None
    new_session: bool


class ForkedProcess:
    """`gmeta ARGUMENTS`, with as much of Popen as tests and torchrun's agent ask of it; it and its
    ranks write to the files `stdout` and `stderr` of `folder`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        *,
        cwd: Path | None = None,
        new_session: bool = False,
    ) -> None:
        context = with_imports_ready()
        ready, sign = context.Pipe(duplex=False)
        task = _Task(tuple(arguments), dict(env), folder, cwd, new_session)
        self._process = context.Process(target=_become_gmeta, args=(task, sign))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._folder = folder
        sign.close()
        with ready, suppress(EOFError):
            ready.recv()  # its session is made: a signal to the group reaches it

    def poll(self) -> int | None:
        """The exit code, below 0 for a signal; None as long as it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("gmeta", timeout or 0.0)
        return code

    @property
    def stdout(self) -> str:
        """What it and its ranks have printed so far."""
        return (self._folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        """What it and its ranks have complained of so far."""
        return (self._folder / "stderr").read_text()

    def pid_of(self, rank: int) -> int:
        """The process of a rank, the newest where it was started again."""
        return int((self._folder / f"rank-{rank}").read_text())

    def kill(self) -> None:
        """What is left of it and of its ranks."""
        for pid in (self.pid, *(int(path.read_text()) for path in self._folder.glob("rank-*"))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.join()


@contextmanager
def forked_gmeta(
    arguments: Sequence[str], env: Mapping[str, str], folder: Path, cwd: Path | None = None
) -> Iterator[ForkedProcess]:
    """It runs as long as the block does, and what is left then is killed."""
    process = ForkedProcess(arguments, env, folder, cwd=cwd)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()


def _become_gmeta(task: _Task, sign: Connection) -> None:
    """The command line, from its environment to its exit."""
    if task.new_session:
        os.setsid()
    for name, number in (("stdout", 1), ("stderr", 2)):
        # To append: its ranks write to the same files.
        opened = os.open(task.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(task.env)
    if task.cwd is not None:
        os.chdir(task.cwd)
    if "RANK" in task.env:
        (task.folder / f"rank-{task.env['RANK']}").write_text(str(os.getpid()))
    sign.send(None)
    sign.close()
    _fork_ranks_too(task.folder)
    sys.argv = ["gmeta", *task.arguments]
    from gmeta.cli import main

    main()


def _fork_ranks_too(folder: Path) -> None:
    """From the fork server of the tests: multiprocessing would start another for this process."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    server: Any = forkserver
    server._forkserver.ensure_running = resource_tracker.ensure_running

    def forked(args: Sequence[str], env: Mapping[str, str], **asked: object) -> ForkedProcess:
        assert args[:3] == (sys.executable, "-m", "gmeta"), args
        assert asked == {"stdout": None, "stderr": None, "start_new_session": True}, asked
        return ForkedProcess(args[3:], env, folder, new_session=True)

    handler: Any = subprocess_handler
    handler.Popen = forked
