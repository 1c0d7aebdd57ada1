"""Ranks that torchrun's agent forks from one process with everything imported: a restart of all
ranks takes tenths of a second, where fresh interpreters import for seconds, all at once."""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gmeta.platform.forking import forking_context, let_server_end, server_pid, start

# For ranks: the process here that starts them.
AGENT_PID_VARIABLE = "GMETA_AGENT_PID"
# For ranks: two files of memory that outlives them, for what they did and for another node's.
MEMORY_VARIABLE = "GMETA_RANK_MEMORY"
_PROGRAM = "gmeta"  # what a forked rank runs: `python -m gmeta ARGUMENTS`


class RankProcess:
    """A rank, with as much of subprocess.Popen as torchrun's agent asks of it."""

    def __init__(
        self,
        preload: Sequence[str],
        arguments: Sequence[str],
        env: Mapping[str, str],
        files: Sequence[str | None],
    ) -> None:
        """Fork `gmeta ARGUMENTS` with this environment, stdout and stderr in `files` if any. Raises
        GMetaError: no process can be forked."""
        context = forking_context(preload)
        # Linux tells a rank of the end of the server, which ends with the agent.
        env = {**env, AGENT_PID_VARIABLE: str(server_pid())}
        ready, sign = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_rank, args=(arguments, env, files, sign))
        start(self._process)
        sign.close()
        with ready, suppress(EOFError):
            ready.recv()  # from here on it leads the group that the agent signals
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, below 0 for a signal; None as long as it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
        return code


def _run_rank(
    arguments: Sequence[str], env: Mapping[str, str], files: Sequence[str | None], sign: Connection
) -> None:
    """Become the rank, from its environment to its exit."""
    os.setsid()
    sign.send(None)
    sign.close()
    let_server_end()  # or no rank would hear that the agent is gone
    for number, path in enumerate(files, start=1):
        if path is not None:
            opened = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(opened, number)
            os.close(opened)
    if sys.platform == "linux":
        # For ps and top: else a rank would have the server's name.
        Path("/proc/self/comm").write_text(f"gmeta-rank-{env['RANK']}")
    os.environ.clear()
    os.environ.update(env)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if "OMP_NUM_THREADS" in env:
        # Here, as the server needs no torch: torch read it, or the lack of it, as it was imported.
        import torch

        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.argv = [_PROGRAM, *arguments]
    runpy.run_module(_PROGRAM, run_name="__main__", alter_sys=True)


@contextmanager
def fork_ranks(preload: Sequence[str]) -> Iterator[None]:
    """Have torchrun's agent fork the ranks of `gmeta` that it starts in the block, from a process
    that has the modules `preload` imported; other commands it starts as ever."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    handler: Any = subprocess_handler
    popen, close = handler.Popen, handler.SubprocessHandler.close
    memory: dict[str, str] = {}  # by rank on this node

    def begin_rank(
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: TextIOWrapper | None,
        stderr: TextIOWrapper | None,
        **asked: Any,
    ) -> Any:
        interpreter, *words = (each for each in args if each != "-u")
        if [interpreter, *words[:2]] != [sys.executable, "-m", _PROGRAM]:
            # As with --no-python, or bound to a part of the host's memory by numactl.
            return popen(args=args, env=env, stdout=stdout, stderr=stderr, **asked)
        place = env["LOCAL_RANK"]
        if place not in memory and sys.platform == "linux":
            made = (os.memfd_create("gmeta-rank") for _ in range(2))
            memory[place] = ":".join(f"/proc/{os.getpid()}/fd/{each}" for each in made)
        env = {**env, MEMORY_VARIABLE: memory.get(place, "")}
        files = [None if file is None else file.name for file in (stdout, stderr)]
        return RankProcess(preload, words[2:], env, files)

    def close_quietly(rank: Any, death_sig: signal.Signals | None = None) -> None:
        # The agent signals the process group of each rank as it ends the job. If a group is gone
        # already, the job would report that failure in place of its first rank's.
        with suppress(ProcessLookupError):
            close(rank, death_sig)

    handler.Popen, handler.SubprocessHandler.close = begin_rank, close_quietly
    try:
        yield
    finally:
        handler.Popen, handler.SubprocessHandler.close = popen, close
