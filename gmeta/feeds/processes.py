"""A rank's batches, read and arranged by processes beside it (worker.py).

Threads that read and arrange take turns with the one that launches a step's kernels: an interpreter
runs the Python of one thread at a time. Of a batch from a process the rank copies one block, from
shared memory into the memory that goes to the device, and no thread waits for that. The processes
end with their connections: the system closes these when a rank ends, however it does, and nothing
is left behind.
"""

import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch

from gmeta.batches.accumulate import MicroBatches
from gmeta.batches.ahead import mapped_ahead
from gmeta.batches.episodes import Episodes
from gmeta.batches.shared import out_of_block
from gmeta.config import TrainConfig
from gmeta.errors import GMetaError
from gmeta.feeds.shared_block import SharedBlock
from gmeta.feeds.worker import Place, Work
from gmeta.parallel.ranks import Ranks

if TYPE_CHECKING:
    from gmeta.parallel.sharding import ShardedLearner

BLOCKS = 3  # of each process: batches that are made and not yet copied
MOST_UNASKED = 4  # eight were no faster on an H200
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
END_TIMEOUT_S = 10.0  # of a process whose connection has ended: it is exiting
# Who wants the job to end tells the ranks, which may take a last step and save it first: a signal
# to all processes of a job is for them.
_PROGRAM = (
    "import signal, sys; "
    "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "from gmeta.feeds.worker import work; work(*map(int, sys.argv[1:]))"
)


def number_of_processes(asked: int, device: torch.device, is_local: bool) -> int:
    """Return `asked`, or what data.processes = -1 is for a rank that computes on this device and
    reads from a disk, or from a store that is further away.
    """
    if asked >= 0 or device.type == "cpu":
        return max(asked, 0)
    # Batches are drawn from the same blocks, so each process reads them all: the page cache serves
    # that, a store would have to send them once for each.
    return min(MOST_UNASKED if is_local else 1, _cores_of_rank() - 1)


def _cores_of_rank() -> int:
    """Count the cores that this process may use, and the CPU time of its container, as a rank's
    share of those of its host.
    """
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no container's quota, or none that is told there
        quota_us, period_us = map(int, _QUOTA.read_text().split())
        cores = min(cores, quota_us // period_us)
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@dataclass(frozen=True)
class _Worker:
    process: "subprocess.Popen[bytes]"
    connection: Connection
    blocks: list[SharedBlock]
    turns: Iterator[SharedBlock]

    @classmethod
    def start(cls) -> "_Worker":
        ours, theirs = Pipe()
        blocks = [SharedBlock.make() for _ in range(BLOCKS)]
        with theirs:
            passed = [theirs.fileno(), *(block.fileno() for block in blocks)]
            # Modules are found where this process finds them, and (-P) nowhere else. What it does
            # needs no GPU, and would take memory of one.
            own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *map(str, passed)],
                pass_fds=passed,
                env={**os.environ, **own, "PYTHONPATH": os.pathsep.join(sys.path)},
                # A session of its own: the terminal's Ctrl-C is for the rank.
                start_new_session=True,
            )
        return cls(process, ours, blocks, cycle(blocks))

    def end(self) -> None:
        """End it; what it holds is read again by whoever needs it."""
        # First the process: a thread may be waiting for what it says.
        self.process.kill()
        self.process.wait()
        self.connection.close()
        for block in self.blocks:
            block.close()


@final
class Processes:
    """So many processes, which make the batches of a rank in turns."""

    def __init__(self, number: int, config: TrainConfig, ranks: Ranks) -> None:
        """Start them; `episodes` says what to do."""
        self._config, self._ranks = config, ranks
        self._workers = [_Worker.start() for _ in range(number)]
        self._turns = cycle(self._workers)
        self._is_told = False
        self.wait_s = 0.0
        # Also where nobody closes it, as the run could not begin.
        self._close = weakref.finalize(self, _end, list(self._workers))

    def episodes(
        self, local: "ShardedLearner", epoch: int, first_step: int, num_steps: int
    ) -> Iterator[Episodes | MicroBatches]:
        """Yield the batches of an epoch of so many steps, from `first_step` on, as the learner and
        its exchange take them. Epochs follow one another: those behind the first are under way
        before anybody asks.

        Raises:
            GMetaError, MetaIOError, OSError: as reading raises; or a process has ended.
        """
        if not self._is_told:
            self._is_told = True
            self._tell(local, epoch, first_step)
        places = ((epoch, step) for step in range(first_step, num_steps))
        # A thread receives the next one while a step is taken.
        return mapped_ahead(self._next, places, 1, self._waited)

    def _waited(self, seconds: float) -> None:
        self.wait_s += seconds

    def _tell(self, local: "ShardedLearner", epoch: int, step: int) -> None:
        rank, world_size, of = self._ranks.rank, self._ranks.world_size, len(self._workers)
        how = local.learner.arranging(), local.exchange.planner
        work = Work(self._config, *how, rank, world_size, epoch, step, 0, of)
        for index, worker in enumerate(self._workers):
            try:
                worker.connection.send(replace(work, index=index))
            except ConnectionError as error:
                raise self._ended(worker) from error

    def _next(self, place: Place) -> Episodes | MicroBatches:
        """Return the batch of this place in the run, which is the next one."""
        worker = next(self._turns)
        try:
            told = worker.connection.recv()
            if isinstance(told, Exception):
                raise told
            made_for, of_batch = told
            assert made_for == place, f"the batch of {made_for}, where that of {place} was due"
            on_gpu = self._ranks.device.type == "cuda"
            block = torch.empty(of_batch.num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
            block.copy_(next(worker.turns).first(of_batch.num_bytes))
            worker.connection.send_bytes(b"")  # it is free
        except (EOFError, ConnectionError) as error:
            raise self._ended(worker) from error
        return out_of_block(of_batch, block)

    def _ended(self, worker: _Worker) -> GMetaError:
        """Return what to say of a process that ended before its work was done."""
        try:
            code = worker.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        else:
            how = f"ended with exit code {code}; what it wrote stands above"
            if code < 0:
                how = f"was ended by {signal.Signals(-code).name} (exit code {code})"
        return GMetaError(
            f"process {worker.process.pid}, one of data.processes = {len(self._workers)} that make "
            f"the batches of rank {self._ranks.rank}, {how}. If memory ran out, lower "
            "data.processes, or set it to 0 for threads; --resume goes on from the newest "
            "checkpoint"
        )

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._close()


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()
