"""Collates a rank's batches in parts and reports its steps to a controller: docs/stragglers.md."""

import abc
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import final

import torch
from torch import Tensor

from gmeta.antdt.client.agent import BatchPlan, WorkerAgent
from gmeta.data.accumulate import MicroBatches
from gmeta.data.augment import augment_batches
from gmeta.data.collate import collate_in_parts
from gmeta.data.episodes import Episodes
from gmeta.data.label_checks import check_labels
from gmeta.data.map_ahead import map_ahead
from gmeta.distributed.collective_errors import request_stop_on_error
from gmeta.distributed.launch import restarts
from gmeta.distributed.link_probe import LinkProbe
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharded_learner import DistributedLearner, ShardedLearner
from gmeta.distributed.steps import batch_without_tasks, idle_on_error, stop_on_error
from gmeta.distributed.stopping import Stop
from gmeta.distributed.transport.transport import Swap
from gmeta.feeds.batch_request import BatchSettings
from gmeta.feeds.batch_source import BatchSource
from gmeta.feeds.cost_meter import CostMeter
from gmeta.feeds.leased import LeasedBatchSource
from gmeta.feeds.local_time import ReadOverlap, ReadTime
from gmeta.runs.run_progress import RunProgress
from metaio.format.dataset import Dataset
from metaio.read.batch import TaskBatch

PROBE_EVERY_STEPS = 16  # 1 ms each on one machine: 0.1 ms a step
# The fastest of this many probes counts: a rank that once was not scheduled has no slow link.
PROBES_KEPT = 4
# A step's collectives in turn: numbers of ids, totals, ids, rows, gradients of rows and of layers.
# Each takes a slow link at least as long as a swap.
MEETINGS_PER_STEP = 6

CollateFunction = Callable[[TaskBatch], Episodes]  # of one epoch


class StepAgent(abc.ABC):
    """Called once a step, and for every batch."""

    wait_s = 0.0  # that steps have waited for collating, beside what the source counts

    def __init__(self, meter: CostMeter) -> None:
        self._meter = meter

    @abc.abstractmethod
    def collate_batches(
        self, batches: Iterator[TaskBatch], collate: CollateFunction
    ) -> Iterator[Episodes | MicroBatches]:
        """Yield each batch as the learner takes it, in parts if its step has several."""

    @abc.abstractmethod
    def finish_step(self, num_tasks: int, num_rows: int) -> None:
        """Record that the optimizer's step is done. Collective: for every step."""

    def checkpoint_files(self) -> dict[str, str]:
        """Return the files beside the model, texts by name, on rank 0. Collective."""
        return self._meter.checkpoint_files()

    def adopt_new_plan(self) -> bool:
        """Return whether the shares changed after the last step, so that the batch requested last
        is planned anew; equal on all ranks. Call it before each step."""
        return False


@final
class StaticStepAgent(StepAgent):
    """Fixed shares, without a controller."""

    def __init__(
        self,
        sharded: DistributedLearner,
        meter: CostMeter,
        micro_batches: int,
        threads: int,
        on_thread_start: Callable[[], object] = lambda: None,
    ) -> None:
        """Collate in `threads` threads, for a GPU; 0: in the caller's thread."""
        super().__init__(meter)
        self._exchange = sharded.local.exchange
        self._micro_batches = micro_batches
        self._threads = threads
        self._enter = on_thread_start

    def collate_batches(
        self, batches: Iterator[TaskBatch], collate: CollateFunction
    ) -> Iterator[Episodes | MicroBatches]:
        """Yield each batch collated, always in as many parts as the config says."""
        collate_parts = collate_in_parts(collate, self._micro_batches)
        if not self._threads:
            return map(collate_parts, batches)

        def prepare(batch: TaskBatch) -> Episodes | MicroBatches:
            return self._exchange.prepare(collate_parts(batch))

        return map_ahead(prepare, batches, self._threads, self._add_wait, self._enter)

    def _add_wait(self, seconds: float) -> None:
        self.wait_s += seconds

    def finish_step(self, num_tasks: int, num_rows: int) -> None:
        """Measure what tasks cost; no controller needs it."""
        self._meter.finish_step(num_tasks, num_rows)


def open_agent(
    settings: BatchSettings,
    feed: BatchSource,
    sharded: DistributedLearner,
    ranks: Ranks,
    stop: Stop,
) -> StepAgent:
    """Return the agent of the batch source; with leased shards it may change ranks' shares."""
    if not isinstance(feed, LeasedBatchSource):
        # Cores that compute have no time to collate beside it.
        threads = settings.data.threads if ranks.device.type == "cuda" else 0
        meter = CostMeter(sharded.local, ranks)
        return StaticStepAgent(sharded, meter, settings.num_parts, threads, ranks.enter_thread)
    return LeasedStepAgent(settings.num_parts, feed, sharded, ranks, stop)


def iterate_batches(
    settings: BatchSettings,
    dataset: Dataset,
    feed: BatchSource,
    agent: StepAgent,
    local: ShardedLearner,
    progress: RunProgress,
    stop: Stop,
) -> Iterator[Episodes | MicroBatches]:
    """Yield this rank's batches from where `progress` stands in its epoch: checked, augmented and
    collated. After an error all ranks stop before its step."""
    epoch, step, features = progress.epoch, progress.epoch_step, dataset.features
    options = local.learner.collate_options()
    collate = options.collator_of(epoch)
    worker_batches = feed.episodes(local, epoch, step)
    # Processes check and augment by themselves.
    if worker_batches is not None:
        return idle_on_error(worker_batches, collate(batch_without_tasks(features)), stop)
    split, seed = settings.split, settings.run.seed
    batches = check_labels(feed.batches(epoch, step), settings.kinds, dataset, split)
    if settings.augment.resplit_support or settings.augment.oov_dropout:
        batches = augment_batches(batches, settings.augment, features, seed, epoch, step)
    batches = options.with_drawn_items(batches, epoch, step)
    return agent.collate_batches(stop_on_error(batches, features, stop), collate)


@final
class LeasedStepAgent(StepAgent):
    """Measures, reports, and moves to a new share when every rank holds the same plan."""

    def __init__(
        self,
        num_parts: int,
        feed: LeasedBatchSource,
        sharded: DistributedLearner,
        ranks: Ranks,
        stop: Stop,
    ) -> None:
        super().__init__(CostMeter(sharded.local, ranks))
        # Other batches, same gradient: terms are weighted by their global number.
        self._feed = feed
        self._ranks = ranks
        self._stop = stop
        # Or a rank without leases would answer SIGTERM only when its patience ends.
        feed.client.stop_when(lambda: stop.is_requested)
        self._worker = WorkerAgent(feed.client, feed.share, self._end_for_restart, num_parts)
        self._probe = LinkProbe(ranks)
        self._swaps_s: deque[float] = deque(maxlen=PROBES_KEPT)
        self._plan_swap: tuple[BatchPlan, Tensor, Swap] | None = None
        self._mean_tasks = 0.0  # done: tasks by their cost
        self._collate_s = 0.0  # since the last step
        self._overlap = ReadOverlap(feed.batches_ahead)
        self._read_time = ReadTime()
        self._wait_s = feed.wait_s
        self._ended_s = time.perf_counter()

    def collate_batches(
        self, batches: Iterator[TaskBatch], collate: CollateFunction
    ) -> Iterator[Episodes | MicroBatches]:
        """Yield each batch collated, in as many parts as the plan says by then."""
        for batch in batches:
            # The time counts as this rank's own. Processes collate without this.
            began_s = time.perf_counter()
            episodes = collate_in_parts(collate, self._worker.plan.micro_batches)(batch)
            self._collate_s += time.perf_counter() - began_s
            yield episodes

    def finish_step(self, num_tasks: int, num_rows: int) -> None:
        """Report the step's times, and ask all ranks which plan is the newest."""
        now_s, wait_s = time.perf_counter(), self._feed.wait_s
        compute_s = self._meter.finish_step(num_tasks, num_rows) + self._collate_s
        task_s = self._read_time.task_s(self._feed.read_s, self._feed.tasks_read)
        exposed_s = self._overlap.exposed_s(task_s * num_tasks, compute_s)
        data_s = max(wait_s - self._wait_s, exposed_s)
        own_transfers_s = MEETINGS_PER_STEP * min(self._swaps_s, default=0.0)
        # What is left of the step was waiting for peers.
        peers_s = max(0.0, now_s - self._ended_s - compute_s - data_s - own_transfers_s)
        times_s = (compute_s, data_s, own_transfers_s, peers_s)
        # Shares are shares of cost: who has few long tasks is not slow.
        self._mean_tasks += self._feed.mean_tasks_of(num_tasks, num_rows)
        num_mean_tasks = round(self._mean_tasks) - self._worker.totals.tasks_done
        changed = self._worker.count_step(num_mean_tasks, *(1000 * each_s for each_s in times_s))
        self._wait_s, self._ended_s, self._collate_s = wait_s, now_s, 0.0
        with request_stop_on_error(self._stop):
            self._worker.take_actions()
        self._start_plan_swap(changed)
        if self._worker.totals.step % PROBE_EVERY_STEPS == 0:
            self._swaps_s.append(self._probe.swap_s())

    def adopt_new_plan(self) -> bool:
        """Adopt the plan if it is the newest of all ranks; return whether it was."""
        # All ranks get the answers after the same step, so a plan holds for the same batch
        # everywhere. They were asked for a step ago, to wait for them beside that step's rows.
        if self._plan_swap is None:
            return False
        (plan, mine, swap), self._plan_swap = self._plan_swap, None
        answers = torch.stack([mine, *swap.parts()])
        versions, any_changed = answers[:, 0], bool(answers[:, 1].any())
        if any_changed:
            # If any rank's speed changed, all report at once: the controller sees one step of all.
            self._feed.client.hurry()
        if plan.version == self._worker.plan.version or bool((versions != plan.version).any()):
            return False
        read_ahead = (self._feed.batches_ahead + 1) * self._feed.share
        with request_stop_on_error(self._stop):
            self._worker.adopt(plan)
        self._feed.change_share(plan.tasks, plan.micro_batches)
        self._read_time.skip(-(-read_ahead // max(1, self._feed.share)))
        return True

    def _start_plan_swap(self, changed: bool) -> None:
        plan = self._worker.newest
        mine = torch.tensor([plan.version, int(changed)])
        # From each to each: gloo's all-reduce goes round all ranks, twice, and at every stop may
        # wait for one that is not scheduled.
        others = self._ranks.world_size - 1
        counts = [mine.numel()] * others
        self._plan_swap = (
            plan,
            mine,
            self._ranks.transport.swap(mine.repeat(others), counts, counts),
        )

    def _end_for_restart(self) -> str:
        """Ask all ranks to save and end, as torchrun starts them again; return why not, or ""."""
        used, allowed = restarts()
        if used >= allowed:
            return f"torchrun has used {used} of {allowed} restarts; raise --max-restarts"
        self._stop.is_requested = True
        return ""
