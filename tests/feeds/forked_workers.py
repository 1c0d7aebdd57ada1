"""Processes that make batches, forked with everything imported: a fresh interpreter takes a second
to import torch. They run the same program on the same descriptors; nothing else differs, and one
test starts fresh ones all the same."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any
from unittest import mock

from gmeta.feeds import batch_workers as processes
from tests.support.forked import Forked, fork_from_the_server_of_the_tests

_started: list["ForkedWorker"] = []  # by this process


class ForkedWorker(Forked):
    """As much of Popen as is asked of it."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:  # fmt: skip
        assert start_new_session
        *python, program = command[: -len(pass_fds)]
        assert python == [sys.executable, "-P", "-c"]
        assert command[-len(pass_fds) :] == [str(descriptor) for descriptor in pass_fds]
        fork_from_the_server_of_the_tests()
        passed = [_Passed(descriptor) for descriptor in (1, 2, *pass_fds)]
        super().__init__(_become, program, passed, dict(env), os.getcwd())
        _started.append(self)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


class _Passed:
    """A descriptor, which has another number in the process that it is passed to."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (DupFd(self.descriptor),)


def _arrived(passed: Any) -> _Passed:
    return _Passed(passed.detach())


def _become(program: str, passed: list[_Passed], env: dict[str, str], folder: str) -> None:
    """The program, as a fresh interpreter would run it."""
    os.setsid()
    out, err, *given = [one.descriptor for one in passed]
    for number, descriptor in enumerate((out, err), start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[:] = env["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["-c", *map(str, given)]
    exec(program, {"__name__": "__main__"})


@contextmanager
def forking() -> Iterator[None]:
    """Inside, ranks of this process fork what makes their batches."""
    instead = SimpleNamespace(Popen=ForkedWorker, TimeoutExpired=subprocess.TimeoutExpired)
    with mock.patch.object(processes, "subprocess", instead):
        yield


def with_forked_workers(work: Callable[..., Any]) -> Callable[..., Any]:
    """Have a rank that does this fork what makes its batches."""

    @functools.wraps(work)
    def forked(*given: Any) -> Any:
        with forking():
            return work(*given)

    return forked


def running_workers() -> list[int]:
    """The processes that this one has started so and that have not ended, the newest last."""
    return [worker.pid for worker in _started if worker.poll() is None]
