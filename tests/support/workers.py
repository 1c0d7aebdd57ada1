"""pytest-xdist's workers, forked from the tests' server: one process imports for all."""

import os
import sys
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from typing import Any

from execnet import gateway_io
from execnet.gateway_base import ExecModel, Popen2IO

from tests.support.forked import Forked, fork_from_the_server_of_the_tests
from tests.support.processes import with_imports_ready


class ForkedIO(Popen2IO):
    """What execnet asks of the process of a worker, and the pipes to it."""

    def __init__(self, execmodel: ExecModel) -> None:
        (its_stdin, to_worker), (from_worker, its_stdout) = os.pipe(), os.pipe()
        self._worker = Forked(_serve, DupFd(its_stdin), DupFd(its_stdout), DupFd(2))
        for fd in (its_stdin, its_stdout):
            os.close(fd)
        super().__init__(os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb"), execmodel)

    def wait(self) -> int | None:
        """Return its exit code, once it has one."""
        return self._worker.wait()

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self._worker.kill()


def fork_workers() -> None:
    """Have pytest-xdist fork its workers, in place of starting fresh interpreters."""
    nobody = os.open(os.devnull, os.O_WRONLY)
    screen = {fd: os.dup(fd) for fd in (1, 2)}
    for fd in screen:
        os.dup2(nobody, fd)  # what ranks say that no test listens to
    try:
        with_imports_ready()
        forkserver.ensure_running()
    finally:
        for fd, kept in screen.items():
            os.dup2(kept, fd)
            os.close(kept)
        os.close(nobody)
    io: Any = gateway_io
    io.create_io = lambda spec, execmodel: ForkedIO(execmodel)


def _serve(*streams: Any) -> None:
    """Do what execnet has a fresh interpreter do."""
    for fd, given in enumerate(streams):
        received = given.detach()
        os.dup2(received, fd)
        os.close(received)
    fork_from_the_server_of_the_tests()
    sys.stdin = os.fdopen(0, closefd=False)
    exec(eval(sys.stdin.readline()), {})
