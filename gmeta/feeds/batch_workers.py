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

from gmeta.data.accumulate import MicroBatches
from gmeta.data.episodes import Episodes
from gmeta.data.shared_batch import BlockDescription, read_from_block
from gmeta.distributed.ranks import Ranks
from gmeta.errors import GMetaError
from gmeta.feeds.batch_request import (
    BatchReply,
    BatchRequest,
    BatchSettings,
    BatchWork,
    places_from,
)
from gmeta.feeds.shared_block import SharedBlock
from metaio.format.dataset import Dataset

if TYPE_CHECKING:
    from gmeta.distributed.sharded_learner import ShardedLearner

BLOCKS = 3  # of each process: batches that were asked for and not yet taken
MOST_BY_DEFAULT = 4  # eight were no faster on an H200
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
END_TIMEOUT_S = 10.0  # of a process whose connection has ended: it is exiting
# Whoever wants the job to end tells the ranks, which may take a last step and save it first: a
# signal to all processes of a job is for them.
_PROGRAM = (
    "import signal, sys; "
    "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "from gmeta.feeds.worker import work; work(*map(int, sys.argv[1:]))"
)


def resolve_num_processes(configured: int, device: torch.device, is_local: bool) -> int:
    """Return `asked`, or what data.processes = -1 is for a rank that computes on this device and
    reads from a disk, or from a store that is further away."""
    if configured >= 0 or device.type == "cpu":
        return max(configured, 0)
    # Batches are drawn from the same blocks, so each process reads them all: the page cache serves
    # that, a store would have to send them once for each.
    return min(MOST_BY_DEFAULT if is_local else 1, _cores_of_rank() - 1)


def _cores_of_rank() -> int:
    """Count the cores that this process may use, and the CPU time of its container, as a rank's
    share of those of its host."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no container's quota, or none that is told there
        quota_us, period_us = map(int, _QUOTA.read_text().split())
        cores = min(cores, quota_us // period_us)
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@dataclass(frozen=True)
class _BatchWorker:
    process: "subprocess.Popen[bytes]"
    connection: Connection
    blocks: list[SharedBlock]
    turns: Iterator[SharedBlock]

    @classmethod
    def start(cls) -> "_BatchWorker":
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
class BatchWorkers:
    """Processes that make the batches of a rank in turns."""

    def __init__(self, number: int, settings: BatchSettings, ranks: Ranks) -> None:
        """Start `number` processes; `made` tells them what to do."""
        self._settings, self._ranks = settings, ranks
        self._workers = [_BatchWorker.start() for _ in range(number)]
        self._turns = cycle(self._workers)
        self.number = number
        self._has_work = False
        self._requested: deque[tuple[_BatchWorker, BatchRequest]] = deque()  # and not yet received
        self._coming: deque[Future[Episodes | MicroBatches]] = (
            deque()
        )  # received, and not yet taken
        self._shares: Iterator[Episodes | MicroBatches] | None = None
        self._receiver = ThreadPoolExecutor(1, "receive", ranks.enter_thread)
        self.wait_s = 0.0
        self.num_tasks_composed = 0  # of batches that were asked for, also of those nobody took
        self._made_s = 0.0  # what these took
        # Also where nobody closes it, as the run could not begin.
        self._close = weakref.finalize(self, _end_workers, list(self._workers), self._receiver)

    def episodes(
        self, local: "ShardedLearner", epoch: int, first_step: int, num_steps: int
    ) -> Iterator[Episodes | MicroBatches]:
        """Return the batches of an epoch of `num_steps` steps, from `first_step` on, of a rank
        whose share is fixed. Epochs follow one another: those behind the first are under way before
        anybody asks."""
        if self._shares is None:
            places = places_from((epoch, first_step), num_steps, self._settings.run.epochs)
            num_parts = self._settings.num_parts
            requests = (BatchRequest(place, None, num_parts) for place in places)
            self._shares = self.make_batches(local, requests, BLOCKS * self.number)
        return islice(self._shares, num_steps - first_step)

    def make_batches(
        self, local: "ShardedLearner", requests: Iterator[BatchRequest], batches_ahead: int
    ) -> Generator[Episodes | MicroBatches]:
        """Yield the batch of each of `asks`, as the learner and its exchange take it. They are
        drawn in the caller's thread, `batches_ahead` ahead. What an earlier call drew and nobody
        took is dropped."""
        assert batches_ahead <= BLOCKS * self.number, "a block is written before it is read"
        if not self._has_work:
            self._send_work(local)
        began_s = perf_counter()
        self._receive(len(self._requested))  # what their processes say next is still about them
        wait(self._coming)
        self._coming.clear()
        self.wait_s += perf_counter() - began_s
        while True:
            while len(self._requested) + len(self._coming) < batches_ahead and (
                request := next(requests, None)
            ):
                self._request(next(self._turns), request)
            # While a step is taken the next one is copied, and no more: what is used soon after it
            # was copied is still in the core's caches.
            self._receive(2 - len(self._coming))
            if not self._coming:
                return
            began_s = perf_counter()
            batch = self._coming.popleft().result()
            self.wait_s += perf_counter() - began_s
            yield batch

    @property
    def busy_s(self) -> float:
        """Return the seconds that the batches that were asked for have taken if all processes were
        at work at all times."""
        return self._made_s / self.number

    def _send_work(self, local: "ShardedLearner") -> None:
        """Tell the processes how batches are made."""
        self._has_work = True
        options = self._settings, local.learner.collate_options(), local.exchange.planner
        work = BatchWork(*options, self._ranks.rank, self._ranks.world_size, self.number)
        for worker in self._workers:
            self._send(worker, work)

    def _send(self, worker: _BatchWorker, message: BatchWork | BatchRequest) -> None:
        try:
            worker.connection.send(message)
        except ConnectionError as error:
            raise self._describe_exit(worker) from error

    def _request(self, worker: _BatchWorker, request: BatchRequest) -> None:
        self._send(worker, request)
        self._requested.append((worker, request))

    def _receive(self, most: int) -> None:
        """Receive up to `most` of the batches that were asked for, in their order."""
        for _ in range(min(most, len(self._requested))):
            self._coming.append(
                self._receiver.submit(self._receive_batch, *self._requested.popleft())
            )

    def _receive_batch(
        self, worker: _BatchWorker, request: BatchRequest
    ) -> Episodes | MicroBatches:
        try:
            reply: BatchReply = worker.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._describe_exit(worker) from error
        assert reply.place == request.place, f"{reply.place}, where {request.place} was asked for"
        block = next(worker.turns)
        if isinstance(reply.result, Exception):
            raise reply.result
        batch = self._copy_from_block(reply.result, block)
        self._made_s += reply.seconds
        self.num_tasks_composed += batch.task_T.numel()
        return batch

    def _copy_from_block(
        self, description: BlockDescription, block: SharedBlock
    ) -> Episodes | MicroBatches:
        """Return the batch that stands in a block."""
        on_gpu = self._ranks.device.type == "cuda"
        copy = torch.empty(description.num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        copy.copy_(block.first(description.num_bytes))
        return read_from_block(description, copy)

    def _describe_exit(self, worker: _BatchWorker) -> GMetaError:
        """Return what to say of a process that ended before its work was done."""
        try:
            code = worker.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            ending = "closed its connection"
        else:
            ending = f"ended with exit code {code}; what it wrote stands above"
            if code < 0:
                ending = f"was ended by {signal.Signals(-code).name} (exit code {code})"
        return GMetaError(
            f"process {worker.process.pid}, one of data.processes = {self.number} that make "
            f"the batches of rank {self._ranks.rank}, {ending}. If memory ran out, lower "
            "data.processes, or set it to 0 for threads; --resume goes on from the newest "
            "checkpoint"
        )

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._close()


def start_workers(settings: BatchSettings, dataset: Dataset, ranks: Ranks) -> BatchWorkers | None:
    """Return the processes that make a rank's batches; None: its threads do."""
    number = resolve_num_processes(settings.data.processes, ranks.device, dataset.is_local)
    return BatchWorkers(number, settings, ranks) if number else None


def _end_workers(workers: list[_BatchWorker], receiver: ThreadPoolExecutor) -> None:
    # First the processes: the thread may be waiting for what they say.
    for worker in workers:
        worker.end()
    receiver.shutdown()
    for worker in workers:
        worker.close()
