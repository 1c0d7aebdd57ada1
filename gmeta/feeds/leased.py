"""Shards that a rank leases from the data-shard service (docs/antdt.md)."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, final

import numpy as np

from gmeta.access.errors import AntdtError, RefusedError
from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.client.stream import UnitRange, UnitStream
from gmeta.antdt.manifests.shard_manifest import (
    MANIFEST_FILE_NAME,
    ShardManifest,
    load_manifest,
    parse_manifest,
)
from gmeta.antdt.model import MAX_EPOCHS, MAX_SHARDS_PER_LEASE_CALL, DatasetSpec
from gmeta.data.accumulate import MicroBatches
from gmeta.data.episodes import Episodes
from gmeta.data.reader import task_cost_of
from gmeta.distributed.collective_errors import run_on_all, run_on_first
from gmeta.distributed.ranks import Ranks, barrier, broadcast_value
from gmeta.errors import UserError
from gmeta.feeds.batch_request import BatchRequest, BatchSettings
from gmeta.feeds.batch_source import BatchSource
from gmeta.feeds.batch_workers import start_workers
from gmeta.feeds.service import connect, service_address, start_embedded_service
from gmeta.runs.logging.logger import Logger, Reading, RunInfo, Status
from metaio.format.dataset import Dataset, Split
from metaio.read.batch import TaskBatch
from metaio.read.episode_lengths import EpisodeLengths
from metaio.read.equal_cost import TaskCost
from metaio.read.reader import DEFAULT_CACHE_BYTES, EpisodeRange, RangeReader

if TYPE_CHECKING:
    from gmeta.distributed.sharded_learner import ShardedLearner

# For a split that a reader holds decoded: small, so that steps mix tasks from all over it.
SMALL_SHARD_TASKS = 16
MIN_SHARDS = 4096  # of a split with enough episodes
# Batches made ahead, by each process where there are some; more only with more threads: the peers
# cannot take them when the data runs out.
PREFETCH_BATCHES = 2
WARN_AFTER_S = 30.0  # without a shard; an operator may have drained the service, and forgotten it
IDLE_PAUSE_S = 0.002  # between empty batches in a row: the others are at their last shards

_log = logging.getLogger("gmeta.feed")

Batch = TypeVar("Batch", TaskBatch, Episodes | MicroBatches)
# Makes a batch of each of the groups, from this step on; draws some groups ahead.
_BatchMaker = Callable[[Iterator[list[UnitRange]], int], Generator[Batch]]


def tasks_per_shard(split_name: str, dataset: Dataset) -> int:
    """Return `data.tasks_per_shard`, or a size that depends on the data alone."""
    split = dataset.split(split_name)
    if int(dataset.block_bytes(split.name).sum()) <= DEFAULT_CACHE_BYTES:
        size = max(1, min(SMALL_SHARD_TASKS, split.num_episodes // MIN_SHARDS))
    else:
        # One block's worth: smaller shards decode a block repeatedly, larger ones mix tasks less.
        size = max(1, split.num_episodes // split.num_blocks)
    # Whole bundles are composed without a look at their ids, in a quarter of the time.
    bundle = split.blocks.bundle_tasks
    return max(size - size % bundle, bundle) if bundle else size


@final
class LivePageLogger(Logger):
    """Readings for the live page of the data-shard service."""

    # `share` is the number of mean tasks that this rank takes for each batch.
    def __init__(self, client: ShardClient) -> None:
        self._client = client
        self._run = ("", 0)

    def begin(self, run: RunInfo) -> None:
        """Tell the page where the run lies and how long it is."""
        self._run = (str(run.folder.resolve()), run.total_steps)
        self._client.report_run("TRAINING", *self._run)

    def log(self, reading: Reading) -> None:
        """Pass the reading to the next heartbeat."""
        self._client.report_metrics(reading.step, reading.scalars())

    def end(self, status: Status) -> None:
        """Tell the page how the run ended."""
        self._client.report_run(status.upper(), *self._run)
        # After an error nobody waits until the client is closed.
        self._client.hurry()


@final
class LeasedBatchSource(BatchSource):
    """Shards leased from the data-shard service: each rank leases the next ones at its own pace."""

    def __init__(
        self,
        settings: BatchSettings,
        dataset: Dataset,
        ranks: Ranks,
        checkpoint: Path | None,
        manifest: str = "",
    ) -> None:
        """Roll the service back to the manifest, or else the checkpoint, on rank 0, then let the
        other ranks join."""
        data, run = settings.data, settings.run
        split = dataset.split(data.train_split)
        self._ranks = ranks
        self._split = split.name
        self.num_steps = -(-split.num_episodes // data.tasks_per_step)
        # A rank without a share would never notice that the service ended an epoch.
        if data.tasks_per_step < ranks.world_size:
            raise UserError(
                f"data.tasks_per_step = {data.tasks_per_step} is less than the {ranks.world_size} "
                "ranks: each needs a task a step to lease shards. Raise it, or start fewer ranks"
            )
        self.share = _share_of(data.tasks_per_step, ranks.rank, ranks.world_size)
        self._costs = _UnitCosts(dataset, split, task_cost_of(data))
        self._num_parts = settings.num_parts
        self._replan = False
        units_per_shard = tasks_per_shard(split.name, dataset)
        self._units_per_shard = units_per_shard
        spec = DatasetSpec(
            split.name,
            split.num_episodes,
            units_per_shard,
            run.seed,
            MAX_EPOCHS,  # the run decides when to stop, and may be resumed for more
            dataset.fingerprint,
            data.shuffle,
        )
        self._lease_wait_s = 0.0
        self._stream: UnitStream | None = None
        self._epoch_ended = False
        self._manifest: ShardManifest | None = None
        # An error of the service that this rank alone met, until all can raise it.
        self._problem: AntdtError | None = None
        with ExitStack() as undo:
            reader = RangeReader(dataset, threads=data.threads, prefetch_batches=PREFETCH_BATCHES)
            self._reader = undo.enter_context(reader)
            address = ""

            def join() -> None:
                self.client = undo.enter_context(connect(address, ranks.rank))

            def begin() -> None:
                nonlocal address
                address = service_address(data) or self._start_service(run.dir, ranks, undo)
                join()
                self._restore(spec, checkpoint, manifest, run.dir)

            run_on_first(begin, ranks)
            # After the roll-back, which ends the generation of workers that registered before it.
            address = broadcast_value(address, ranks)
            run_on_all(join if ranks.rank else lambda: None, ranks)
            self.workers = start_workers(settings, dataset, ranks)
            self.loggers = {"the data-shard service": LivePageLogger(self.client)}
            self._closing = undo.pop_all()
        self._made_by = self.workers or self._reader
        self.batches_ahead = max(PREFETCH_BATCHES, data.threads)
        if self.workers is not None:
            self.batches_ahead = PREFETCH_BATCHES * self.workers.number

    @staticmethod
    def _start_service(run_dir: str, ranks: Ranks, undo: ExitStack) -> str:
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) != ranks.world_size:
            raise UserError(
                f"the {ranks.world_size} ranks are on several machines, and none of them was named "
                "to run the data-shard service. Start `gmeta shard-service` where all reach it and "
                "set data.service = HOST:PORT"
            )
        return undo.enter_context(start_embedded_service(run_dir)).address

    def _restore(
        self, spec: DatasetSpec, checkpoint: Path | None, later: str, run_dir: str
    ) -> None:
        manifest = None if checkpoint is None else load_manifest(checkpoint)
        manifest = parse_manifest(later) if later else manifest
        try:
            # First, so that other data under this name are refused before anything is rolled back.
            self.client.register_dataset(spec)
            self.client.restore(manifest)
        except RefusedError as error:
            if error.reason != "SPEC_CONFLICT":
                raise
            raise UserError(
                f"run {run_dir} was begun with other data or other shards: {error} To go on, set "
                "data.path, data.train_split, data.shuffle and run.seed as they were"
            ) from error

    def batches(self, epoch: int, first_step: int) -> Iterator[TaskBatch]:
        """Lease shards and yield their tasks as batches. Raises AntdtError, on this rank alone."""

        # The service knows where in the epoch the model stands: the step is not needed.
        def make_batches(groups: Iterator[list[UnitRange]], _: int) -> Generator[TaskBatch]:
            ranges = ([EpisodeRange(self._split, *part) for part in group] for group in groups)
            return self._reader.batches(ranges)

        return self._iterate_epoch(make_batches, epoch, first_step)

    def episodes(
        self, local: "ShardedLearner", epoch: int, first_step: int
    ) -> Iterator[Episodes | MicroBatches] | None:
        """Lease shards and have the processes make the batches, if there are any. Raises
        AntdtError, on this rank alone, or GMetaError: a process has ended."""
        if self.workers is None:
            return None
        processes = self.workers

        def make_episodes(
            groups: Iterator[list[UnitRange]], step: int
        ) -> Generator[Episodes | MicroBatches]:
            requests = (
                BatchRequest((epoch, at), np.array(group, np.int64).reshape(-1, 2), self._num_parts)
                for at, group in enumerate(groups, step)
            )
            return processes.make_batches(local, requests, self.batches_ahead)

        return self._iterate_epoch(make_episodes, epoch, first_step)

    def _iterate_epoch(
        self, maker: _BatchMaker[Batch], epoch: int, first_step: int
    ) -> Iterator[Batch]:
        self._close_stream()
        self._replan = self._epoch_ended = False
        self._stream = UnitStream(self.client, self._split, epoch, self._shards_ahead())
        yield from self._iterate_batches(self._stream, maker, first_step)
        self._epoch_ended = True

    def change_share(self, num_tasks: int, num_parts: int) -> None:
        """Take what `num_tasks` mean tasks cost for each batch from now on, in so many parts."""
        # Every rank drops its last request and repeats it: their steps stay whole.
        self.share, self._num_parts = num_tasks, num_parts
        self._replan = True

    def _shards_ahead(self) -> int:
        # Another batch's worth is leased while that of a batch is used up.
        return min(2 * -(-max(self.share, 1) // self._units_per_shard), MAX_SHARDS_PER_LEASE_CALL)

    def _iterate_batches(
        self, stream: UnitStream, maker: _BatchMaker[Batch], step: int
    ) -> Iterator[Batch]:
        # After a change of share, batches made ahead are planned anew, from decoded blocks.
        while not stream.ended:
            planned: deque[int] = deque()  # tasks of each batch that is made ahead
            # Closed before the stream takes units back: no more of them are read then.
            with closing(maker(self._iterate_ranges(stream, planned), step)) as batches:
                for batch in batches:
                    step += 1
                    yield batch
                    self._raise_problem()
                    if self._replan:
                        break  # this batch is among those that were planned
                    planned.popleft()
            stream.put_back(sum(planned))
            self._replan = False
            stream.lease_ahead(self._shards_ahead())

    def _iterate_ranges(self, stream: UnitStream, planned: deque[int]) -> Iterator[list[UnitRange]]:
        warn_at_s = time.perf_counter() + WARN_AFTER_S
        while not stream.ended:
            began_s = time.perf_counter()
            ranges = stream.take_units(self.share * self._costs.mean, self._costs.of)
            self._costs.prefetch(stream.leased_ahead)
            if ranges:
                warn_at_s = began_s + WARN_AFTER_S
            else:
                # Its peers have data, or the end is being confirmed: do not hold them up.
                time.sleep(IDLE_PAUSE_S)
            if began_s > warn_at_s:
                warn_at_s = began_s + WARN_AFTER_S
                _log.warning("rank %d has no shard: %s", self._ranks.rank, stream.waiting_for)
            self._lease_wait_s += time.perf_counter() - began_s
            planned.append(sum(part.number for part in ranges))
            yield ranges

    def mean_tasks_of(self, num_tasks: int, num_rows: int) -> float:
        """Return as how many mean tasks of the split so many tasks with so many rows count."""
        return self._costs.cost.of_batch(num_tasks, num_rows) / self._costs.mean

    def report_trained(self, num_tasks: int) -> None:
        """Report the tasks to the service. A lost lease shows at the next batch or checkpoint."""
        if self._stream is None:
            raise RuntimeError("trained() needs an epoch: call batches() first")
        with self._defer_problems():
            self._stream.mark_trained(num_tasks)

    def is_epoch_over(self, epoch_step: int) -> bool:
        """Return whether the service has ended the epoch."""
        if self._stream is not None and not self._epoch_ended:
            # After a run's last step this rank has not asked for a batch.
            with self._defer_problems():
                self._epoch_ended = self._stream.ended
        return self._epoch_ended

    def checkpoint_files(self, step: int, *, in_memory: bool = False) -> Mapping[str, str]:
        """Return the shard manifest: exactly what of the data is in the model of this step. Raises
        AntdtError, on all ranks: one of them lost a lease, or the service."""
        files: dict[str, str] = {}

        def prepare() -> None:
            name = "memory" if in_memory else "step"
            manifest = self.client.prepare_checkpoint(f"{name}-{step:08d}", step)
            files[MANIFEST_FILE_NAME] = manifest.to_json()
            if not in_memory:  # else nobody commits it
                self._manifest = manifest

        run_on_all(self._flush, self._ranks)  # every rank's progress is with the service
        run_on_first(prepare, self._ranks)  # no rank reports the next step before this is done
        return files

    def _flush(self) -> None:
        self._raise_problem()
        self.client.flush()

    def confirm_checkpoint(self) -> None:
        """Commit the manifest: its episodes are in a checkpoint that has its final name."""
        if self._manifest is not None:
            with self._defer_problems():
                self.client.commit_checkpoint(self._manifest)
            self._manifest = None

    @contextmanager
    def _defer_problems(self) -> Iterator[None]:
        try:
            yield
        # The others may be in a collective now: kept until the next batch or checkpoint.
        except AntdtError as error:
            self._problem = self._problem or error

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    @property
    def wait_s(self) -> float:
        """Return the seconds of waiting for batches and for leases."""
        return self._made_by.wait_s + self._lease_wait_s

    @property
    def read_s(self) -> float:
        """Return the seconds of reading, with processes also of collating, waited for or not."""
        return self._made_by.busy_s + self._lease_wait_s

    @property
    def tasks_read(self) -> int:
        """Return the tasks read in that time, also those that were read ahead and put back."""
        return self._made_by.num_tasks_composed

    def close(self) -> None:
        """Give back what was not trained, and end the job's own service, if any. Collective."""
        run_on_all(self._close_stream, self._ranks)
        self.client.close()
        barrier(self._ranks)  # rank 0 may own the service, and the others still say good-bye to it
        self._closing.close()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


@final
class _UnitCosts:
    """What the tasks of a split cost, so that ranks with equal shares take equal time."""

    def __init__(self, dataset: Dataset, split: Split, cost: TaskCost) -> None:
        self.cost = cost
        self.mean = cost.of_batch(1, split.num_rows / max(1, split.num_episodes))
        self._rows = EpisodeLengths(dataset, split.name)
        self._offsets = split.episode_offsets

    def prefetch(self, ranges: list[UnitRange]) -> None:
        """Read what the costs of these tasks take in the background, if that takes long."""
        self._rows.prefetch([block for units in ranges for block in self._blocks_of(units)])

    def _blocks_of(self, units: UnitRange) -> range:
        last = int(np.searchsorted(self._offsets, units.first + units.number))
        return range(int(np.searchsorted(self._offsets, units.first, side="right")) - 1, last)

    def of(self, units: UnitRange) -> list[float]:
        """Return the cost of each task of a range."""
        blocks = self._blocks_of(units)
        num_rows_E = np.concatenate(self._rows.of_blocks(blocks))
        skipped = units.first - int(self._offsets[blocks.start])
        costs_E = self.cost.of_episodes(num_rows_E[skipped : skipped + units.number])
        found: list[float] = costs_E.tolist()
        return found


def _share_of(num_tasks: int, rank: int, world_size: int) -> int:
    # Differences of rounded multiples: the ranks' shares add up to all tasks.
    return (rank + 1) * num_tasks // world_size - rank * num_tasks // world_size
