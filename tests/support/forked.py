"""`python -m PROGRAM` in processes that are forked with everything imported: so are the ranks that
`gmeta` starts. A fresh interpreter imports for seconds, three of them a run of two ranks; nothing
else differs, and some tests start a fresh one all the same."""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from gmeta.distributed.forked_ranks import AGENT_PID_VARIABLE
from tests.support.processes import with_imports_ready
from tests.support.waiting import PATIENCE_S

SOURCE_ROOTS = (".", "models", "protos")  # as pyproject.toml has them


class Task(NamedTuple):
    """What a process is to become."""

    program: str  # a module, or the path of a script
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    folder: Path  # of its stdout and stderr
    cwd: Path | None = None
    anew: tuple[str, ...] = ()  # packages that it imports itself, those in `cwd`
    new_session: bool = False
    first: Callable[[], None] | None = None  # called before it begins, by each rank too
    own_server: bool = False  # trials and stages are forked from one that it starts, as a user's


class Forked:
    """A process that begins with everything imported, waited for as one of Popen is."""

    def __init__(self, become: Callable[..., None], *arguments: object) -> None:
        self._process = with_imports_ready().Process(target=become, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, below 0 for a signal; None as long as it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill it alone, and wait for its end."""
        self._process.kill()
        self._process.join()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code


class ForkedProcess(Forked):
    """A program with as much of Popen as is asked of it; its ranks write to the same files."""

    def __init__(self, task: Task) -> None:
        ready, sign = with_imports_ready().Pipe(duplex=False)
        super().__init__(_become, task, sign)
        self._folder = task.folder
        sign.close()
        with ready, suppress(EOFError):
            ready.recv()  # its session is made: a signal to the group reaches it

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
def forked(task: Task) -> Iterator[ForkedProcess]:
    """It runs as long as the block does, and what is left then is killed."""
    process = ForkedProcess(task)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()


def run_forked(
    program: str, *arguments: str | Path, env: Mapping[str, str], cwd: Path | None = None,
    anew: tuple[str, ...] = (), timeout_s: float = 2 * PATIENCE_S,
    first: Callable[[], None] | None = None, own_server: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """As subprocess.run of `python -m PROGRAM ARGUMENTS`."""
    command = tuple(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        task = Task(
            program, command, env, Path(folder), cwd, anew, first=first, own_server=own_server
        )
        with forked(task) as running:
            code = running.wait(timeout_s)
        return subprocess.CompletedProcess(command, code, running.stdout, running.stderr)


def _become(task: Task, sign: Connection) -> None:
    """The program, from its environment to its exit."""
    if task.new_session:
        os.setsid()
    _take_surroundings(task)
    if "RANK" in task.env:
        (task.folder / f"rank-{task.env['RANK']}").write_text(str(os.getpid()))
    sign.send(None)
    sign.close()
    if "tests" not in task.anew:  # else what the fork server has imported is another code
        _fork_others_too(task)
    if task.anew:
        sys.path[:0] = [str(Path(str(task.cwd), root)) for root in SOURCE_ROOTS]
        for name in [name for name in sys.modules if name.partition(".")[0] in task.anew]:
            del sys.modules[name]
    if task.first is not None:
        task.first()
    sys.argv = [task.program, *task.arguments]
    if task.program.endswith(".py"):
        runpy.run_path(task.program, run_name="__main__")
    else:
        runpy.run_module(task.program, run_name="__main__", alter_sys=True)


def _take_surroundings(task: Task) -> None:
    for name, number in (("stdout", 1), ("stderr", 2)):
        # To append: its ranks write to the same files.
        opened = os.open(task.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(task.env)
    os.environ.pop(AGENT_PID_VARIABLE, None)  # a rank's parent is the fork server
    if task.cwd is not None:
        os.chdir(task.cwd)


def fork_from_the_server_of_the_tests() -> None:
    """Also from a process that was forked from it: multiprocessing would start another for it."""
    server: Any = forkserver
    if parent_process() is not None:
        server.ensure_running = server._forkserver.ensure_running = resource_tracker.ensure_running


class _ForkedBeside(ForkServerProcess):
    """What a program forks from a server of its own: a trial, a stage. This one comes from that of
    the tests, with the program's environment, and does not hear Ctrl-C either."""

    def __init__(self, task: Task, **how: Any) -> None:
        super().__init__(**how)
        self._task = task._replace(env=dict(os.environ), cwd=Path.cwd())

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        _take_surroundings(self._task)
        _fork_others_too(self._task)
        if self._task.first is not None:
            self._task.first()
        super().run()


def _fork_others_too(task: Task) -> None:
    """Ranks, trials, stages, and the steps of `gmeta init --run`."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from gmeta.cli.commands import init
    from gmeta.distributed import forked_ranks
    from gmeta.pipeline import stage_process as stages
    from gmeta.tuning import trials

    fork_from_the_server_of_the_tests()

    def rank(args: Sequence[str], env: Mapping[str, str], **asked: object) -> ForkedProcess:
        at = args.index("-m") + 1
        assert args[:at] in ((sys.executable, "-m"), (sys.executable, "-u", "-m")), args
        assert asked == {"stdout": None, "stderr": None, "start_new_session": True}, asked
        program, arguments = args[at], tuple(args[at + 1 :])
        return ForkedProcess(
            task._replace(program=program, arguments=arguments, env=env, new_session=True)
        )

    def call(words: Sequence[str]) -> int:
        assert [*words[:3]] == [sys.executable, "-m", "gmeta"], words
        return ForkedProcess(task._replace(arguments=tuple(words[3:]))).wait()

    class Context(ForkServerContext):
        Process: Any = staticmethod(partial(_ForkedBeside, task))

    if not task.own_server:
        forking: tuple[Any, ...] = (trials, stages)
        for module in forking:
            module.forking_context = lambda preload: Context()
    steps: Any = init
    steps.subprocess = SimpleNamespace(call=call)
    handler: Any = subprocess_handler
    handler.Popen = rank
    if not task.own_server:
        asked: dict[str, Any] = {"stdout": None, "stderr": None, "start_new_session": True}
        ranks: Any = forked_ranks
        ranks.RankProcess = lambda preload, arguments, env, files: rank(
            (sys.executable, "-m", "gmeta", *arguments), env, **asked
        )
    # The agent names its own method for a log, again and again, by a look at all modules for every
    # frame that has no file: a forked process has several of those, and a second went to it.
    rendezvous: Any = dynamic_rendezvous
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
