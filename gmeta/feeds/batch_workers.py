"""A rank's batches, read and collated by processes beside it (worker.py)."""

import logging
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

_log = logging.getLogger(__name__)

# Threads that read and collate take turns with the one that launches a step's kernels: an
# interpreter runs one thread's Python at a time. For a batch from a process the rank copies one
# block, from shared memory into the memory that goes to the device, and no thread waits for that.
BLOCKS = 3  # of each process: one is written while others wait for the rank
MOST_BY_DEFAULT = 4  # eight were no faster on an H200
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
SILENT_S = 30.0
SILENT = (
    "process %d, one of data.processes = %d, has made no batch for %g s, and this rank waits for "
    "it: see whether it is stopped (kill -CONT %d), or its disk hangs"
)
END_TIMEOUT_S = 10.0  # of a process whose connection has ended: it is exiting
# A signal to all processes of a job is for the ranks, which may take a last step and save it.
_PROGRAM = (
    "import signal, sys; "
    "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "from gmeta.feeds.worker import work; work(*map(int, sys.argv[1:]))"
)


def resolve_num_processes(configured: int, device: torch.device, is_local: bool) -> int:
    """Return the number of processes of a rank on this device; `is_local`: its data is on disk."""
    if configured >= 0 or device.type == "cpu":
        return max(configured, 0)
    # Each process reads all blocks: the page cache serves that, a store would send them to each.
    return min(MOST_BY_DEFAULT if is_local else 1, _cores_of_rank() - 1)


def _cores_of_rank() -> int:
    # A container's CPU time may be less than its cores; ranks of a host share both.
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no container, or no quota
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
            # The same modules as here, and (-P) no others. A GPU would only cost memory.
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
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.connection.close()
        for block in self.blocks:
            block.close()


@final
class BatchWorkers:
    """Processes that make the batches of a rank in turns."""

    # They end with their connections, which the system closes when a rank ends, in any way.
    def __init__(self, number: int, settings: BatchSettings, ranks: Ranks) -> None:
        """Start `number` processes; `make_batches` sends them the work."""
        self._settings, self._ranks = settings, ranks
        self._workers = [_BatchWorker.start() for _ in range(number)]
        self._turns = cycle(self._workers)
        self.number = number
        self._has_work = False
        self._requested: deque[tuple[_BatchWorker, BatchRequest]] = deque()  # and not yet received
        self._coming: deque[Future[Episodes | MicroBatches]] = deque()  # received, not yet used
        self._shares: Iterator[Episodes | MicroBatches] | None = None
        # One thread: replies come in the order of the requests.
        self._receiver = ThreadPoolExecutor(1, "receive", ranks.enter_thread)
        self.wait_s = 0.0
        self.num_tasks_composed = 0  # of all received batches, also of dropped ones
        self._made_s = 0.0  # the processes' time for these
        # Also if the run could not begin, and never closes this.
        self._close = weakref.finalize(self, _end_workers, list(self._workers), self._receiver)

    def episodes(
        self, local: "ShardedLearner", epoch: int, first_step: int, num_steps: int
    ) -> Iterator[Episodes | MicroBatches]:
        """Return the batches of an epoch, from `first_step` on, of a rank with a fixed share."""
        if self._shares is None:
            # Epochs follow one another: those after the first are under way before they are needed.
            places = places_from((epoch, first_step), num_steps, self._settings.run.epochs)
            num_parts = self._settings.num_parts
            requests = (BatchRequest(place, None, num_parts) for place in places)
            self._shares = self.make_batches(local, requests, BLOCKS * self.number)
        return islice(self._shares, num_steps - first_step)

    def make_batches(
        self, local: "ShardedLearner", requests: Iterator[BatchRequest], batches_ahead: int
    ) -> Generator[Episodes | MicroBatches]:
        """Yield each request's batch as the learner and its exchange take it. The caller's thread
        draws requests, `batches_ahead` ahead; what an earlier call drew is dropped."""
        assert batches_ahead <= BLOCKS * self.number, "a block is written before it is read"
        if not self._has_work:
            self._send_work(local)
        began_s = perf_counter()
        self._receive(len(self._requested))  # the processes' next replies are still about these
        wait(self._coming)
        self._coming.clear()
        self.wait_s += perf_counter() - began_s
        while True:
            while len(self._requested) + len(self._coming) < batches_ahead and (
                request := next(requests, None)
            ):
                self._request(next(self._turns), request)
            # One batch is copied while a step runs: later ones would leave the core's caches again.
            self._receive(2 - len(self._coming))
            if not self._coming:
                return
            began_s = perf_counter()
            batch = self._coming.popleft().result()
            self.wait_s += perf_counter() - began_s
            yield batch

    @property
    def busy_s(self) -> float:
        """Return the seconds of the batches so far, as if all processes had worked all the time."""
        return self._made_s / self.number

    def _send_work(self, local: "ShardedLearner") -> None:
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
        for _ in range(min(most, len(self._requested))):
            worker, request = self._requested.popleft()
            self._coming.append(self._receiver.submit(self._receive_batch, worker, request))

    def _receive_batch(
        self, worker: _BatchWorker, request: BatchRequest
    ) -> Episodes | MicroBatches:
        silent_s = min(SILENT_S, self._settings.run.collective_timeout_s / 2)
        try:
            # Where this rank waits for ever, others lose contact with it and cannot name the cause.
            if not worker.connection.poll(silent_s):
                _log.warning(SILENT, worker.process.pid, self.number, silent_s, worker.process.pid)
            reply: BatchReply = worker.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._describe_exit(worker) from error
        assert reply.place == request.place, f"{reply.place}, where {request.place} was asked for"
        # Also for a batch that failed: the process has had its turn with that block.
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
        on_gpu = self._ranks.device.type == "cuda"
        # Into pinned memory of its own: the process writes the next batch into the block.
        copy = torch.empty(description.num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        copy.copy_(block.first(description.num_bytes))
        return read_from_block(description, copy)

    def _describe_exit(self, worker: _BatchWorker) -> GMetaError:
        try:
            # Its connection closes a little before it ends.
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
    # First the processes: the thread may be waiting for their replies.
    for worker in workers:
        worker.end()
    receiver.shutdown()
    for worker in workers:
        worker.close()
