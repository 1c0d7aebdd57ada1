"""A rank's batches, read and arranged by processes beside it (worker.py).

Threads that read and arrange take turns with the one that launches a step's kernels: an interpreter
runs the Python of one thread at a time. For a batch from a process the rank copies one block, from
shared memory into the memory that goes to the device, and no thread waits for that. It asks each
process for several, so that one is made while others wait to be taken, and may drop what it asked
for. The processes end with their connections: the system closes these when a rank ends, however it
does, and nothing is left behind.
"""

import os
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, final

import torch

from gmeta.batches.accumulate import MicroBatches
from gmeta.batches.episodes import Episodes
from gmeta.batches.shared import Told, out_of_block
from gmeta.errors import GMetaError
from gmeta.feeds.asked import Answer, Asked, BatchSettings, Work, places_from
from gmeta.feeds.shared_block import SharedBlock
from gmeta.parallel.ranks import Ranks
from metaio.format.dataset import Dataset

if TYPE_CHECKING:
    from gmeta.parallel.sharded_learner import ShardedLearner

BLOCKS = 3  # of each process: batches that were asked for and not yet taken
MOST_UNASKED = 4  # eight were no faster on an H200
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
END_TIMEOUT_S = 10.0  # of a process whose connection has ended: it is exiting
# Whoever wants the job to end tells the ranks, which may take a last step and save it first: a
# signal to all processes of a job is for them.
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
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Let go of what it had; no thread waits for it any more."""
        self.connection.close()
        for block in self.blocks:
            block.close()


@final
class Processes:
    """Processes that make the batches of a rank in turns."""

    def __init__(self, number: int, settings: BatchSettings, ranks: Ranks) -> None:
        """Start `number` processes; `made` tells them what to do."""
        self._settings, self._ranks = settings, ranks
        self._workers = [_Worker.start() for _ in range(number)]
        self._turns = cycle(self._workers)
        self.number = number
        self._is_told = False
        self._asked: deque[tuple[_Worker, Asked]] = deque()  # and not yet received
        self._coming: deque[Future[Episodes | MicroBatches]] = (
            deque()
        )  # received, and not yet taken
        self._shares: Iterator[Episodes | MicroBatches] | None = None
        self._receiver = ThreadPoolExecutor(1, "receive", ranks.enter_thread)
        self.wait_s = 0.0
        self.num_tasks_composed = 0  # of batches that were asked for, also of those nobody took
        self._made_s = 0.0  # what these took
        # Also where nobody closes it, as the run could not begin.
        self._close = weakref.finalize(self, _end, list(self._workers), self._receiver)

    def episodes(
        self, local: "ShardedLearner", epoch: int, first_step: int, num_steps: int
    ) -> Iterator[Episodes | MicroBatches]:
        """Return the batches of an epoch of `num_steps` steps, from `first_step` on, of a rank
        whose share is fixed. Epochs follow one another: those behind the first are under way before
        anybody asks.

        Raises:
            GMetaError, MetaIOError, OSError: as reading raises; or a process has ended.
        """
        if self._shares is None:
            places = places_from((epoch, first_step), num_steps, self._settings.run.epochs)
            num_parts = self._settings.num_parts
            asks = (Asked(place, None, num_parts) for place in places)
            self._shares = self.made(local, asks, BLOCKS * self.number)
        return islice(self._shares, num_steps - first_step)

    def made(
        self, local: "ShardedLearner", asks: Iterator[Asked], batches_ahead: int
    ) -> Generator[Episodes | MicroBatches]:
        """Yield the batch of each of `asks`, as the learner and its exchange take it. They are
        drawn in the caller's thread, `batches_ahead` ahead. What an earlier call drew and nobody
        took is dropped.

        Raises:
            GMetaError, MetaIOError, OSError: as reading raises; or a process has ended.
        """
        assert batches_ahead <= BLOCKS * self.number, "a block is written before it is read"
        if not self._is_told:
            self._tell(local)
        began_s = perf_counter()
        self._receive(len(self._asked))  # what their processes say next is still about them
        wait(self._coming)
        self._coming.clear()
        self.wait_s += perf_counter() - began_s
        while True:
            while len(self._asked) + len(self._coming) < batches_ahead and (
                asked := next(asks, None)
            ):
                self._ask(next(self._turns), asked)
            # While a step is taken the next one is copied, and no more: what is used soon after it
            # was copied is still in the core's caches.
            self._receive(2 - len(self._coming))
            if not self._coming:
                return
            began_s = perf_counter()
            made = self._coming.popleft().result()
            self.wait_s += perf_counter() - began_s
            yield made

    @property
    def busy_s(self) -> float:
        """Return the seconds that the batches that were asked for have taken if all processes were
        at work at all times.
        """
        return self._made_s / self.number

    def _tell(self, local: "ShardedLearner") -> None:
        """Tell the processes how batches are made."""
        self._is_told = True
        how = self._settings, local.learner.arranging(), local.exchange.planner
        work = Work(*how, self._ranks.rank, self._ranks.world_size, self.number)
        for worker in self._workers:
            self._send(worker, work)

    def _send(self, worker: _Worker, told: Work | Asked) -> None:
        try:
            worker.connection.send(told)
        except ConnectionError as error:
            raise self._ended(worker) from error

    def _ask(self, worker: _Worker, asked: Asked) -> None:
        self._send(worker, asked)
        self._asked.append((worker, asked))

    def _receive(self, most: int) -> None:
        """Receive up to `most` of the batches that were asked for, in their order."""
        for _ in range(min(most, len(self._asked))):
            self._coming.append(self._receiver.submit(self._answer, *self._asked.popleft()))

    def _answer(self, worker: _Worker, asked: Asked) -> Episodes | MicroBatches:
        try:
            answer: Answer = worker.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._ended(worker) from error
        assert answer.place == asked.place, f"{answer.place}, where {asked.place} was asked for"
        block = next(worker.turns)
        if isinstance(answer.what, Exception):
            raise answer.what
        made = self._copied(answer.what, block)
        self._made_s += answer.seconds
        self.num_tasks_composed += made.task_T.numel()
        return made

    def _copied(self, told: Told, block: SharedBlock) -> Episodes | MicroBatches:
        """Return the batch that stands in a block."""
        on_gpu = self._ranks.device.type == "cuda"
        copy = torch.empty(told.num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        copy.copy_(block.first(told.num_bytes))
        return out_of_block(told, copy)

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
            f"process {worker.process.pid}, one of data.processes = {self.number} that make "
            f"the batches of rank {self._ranks.rank}, {how}. If memory ran out, lower "
            "data.processes, or set it to 0 for threads; --resume goes on from the newest "
            "checkpoint"
        )

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._close()


def processes_of(settings: BatchSettings, dataset: Dataset, ranks: Ranks) -> Processes | None:
    """Return the processes that make a rank's batches; None: its threads do."""
    number = number_of_processes(settings.data.processes, ranks.device, dataset.is_local)
    return Processes(number, settings, ranks) if number else None


def _end(workers: list[_Worker], receiver: ThreadPoolExecutor) -> None:
    # First the processes: the thread may be waiting for what they say.
    for worker in workers:
        worker.end()
    receiver.shutdown()
    for worker in workers:
        worker.close()
