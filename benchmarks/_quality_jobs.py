"""Runs `gmeta` commands for benchmarks/quality.py: each once, some at a time, kept in a folder."""

import hashlib
import json
import multiprocessing
import os
import runpy
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

from _common import REPOSITORY, environment
from _socket_paths import keep_socket_paths_short

# Imported once, by the process that all commands are forked from.
PRELOADED = [
    "gmeta.cli.commands.work.evaluation_rank",
    "gmeta.cli.commands.work.training_rank",
    "gmeta.cli.commands.prepare",
]


@dataclass(frozen=True)
class Job:
    """A command that makes the folder `out`; `files` are what it reads beside its arguments, whose
    content tells, with that of the code, whether a kept folder is still what it would make."""

    arguments: tuple[str, ...]
    out: Path
    files: tuple[Path, ...] = ()

    @property
    def stamp(self) -> str:
        """Changes with the command and with what it reads."""
        read = [path.read_text() for path in self.files]
        return hashlib.sha256(json.dumps([self.arguments, read, _code()]).encode()).hexdigest()


@dataclass(frozen=True)
class Ran:
    """How many seconds a command took when it ran, and `where`: date, commit and torch."""

    seconds: float
    where: str


class JobError(RuntimeError):
    """A command failed: its line and where the rest is."""


@cache
def _code() -> str:
    """Changes with any line of what the commands run: a page of figures is of one version."""
    roots = (REPOSITORY / name for name in ("gmeta", "metaio", "models", "protos"))
    files = sorted(path for root in roots for path in root.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def gmeta_processes() -> ForkServerContext:
    """The context whose processes start with gmeta imported."""
    keep_socket_paths_short()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_jobs(jobs: Sequence[Job], at_a_time: int, context: ForkServerContext) -> list[Ran]:
    """Run the jobs, `at_a_time` together; an earlier run is told where its folder was kept.

    Raises:
        JobError: a command failed."""
    with ThreadPoolExecutor(at_a_time) as pool:
        return list(pool.map(lambda job: _run(job, context), jobs))


def _run(job: Job, context: ForkServerContext) -> Ran:
    done = job.out.with_name(f"{job.out.name}.done")
    if done.exists() and job.out.exists():
        kept = json.loads(done.read_text())
        if kept["stamp"] == job.stamp:
            return Ran(kept["seconds"], kept["where"])
    print(f"gmeta {' '.join(job.arguments)}", file=sys.stderr, flush=True)
    done.unlink(missing_ok=True)
    shutil.rmtree(job.out, ignore_errors=True)  # what an interrupted command left is refused
    job.out.parent.mkdir(parents=True, exist_ok=True)
    log = job.out.with_name(f"{job.out.name}.log")
    began = time.perf_counter()
    process = context.Process(target=_command, args=(job.arguments, str(log)))
    process.start()
    process.join()
    told = environment()
    where = f"{told['date']}, {told['commit']}, torch {told['torch']}"
    ran = Ran(time.perf_counter() - began, where)
    if process.exitcode:
        last = (log.read_text().strip().splitlines() or ["nothing was printed"])[-1]
        raise JobError(f"gmeta {' '.join(job.arguments)}: {last} (all of it: {log})")
    temporary = done.with_suffix(".tmp")
    temporary.write_text(json.dumps({"stamp": job.stamp, **asdict(ran)}))
    temporary.replace(done)  # whole or not at all
    return ran


def _command(arguments: Sequence[str], log: str) -> None:
    """`python -m gmeta ARGUMENTS`; it prints to the file."""
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for number in (1, 2):
        os.dup2(opened, number)
    os.close(opened)
    sys.argv = ["gmeta", *arguments]
    runpy.run_module("gmeta", run_name="__main__", alter_sys=True)
