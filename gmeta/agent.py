"""What a rank tells the controller about its steps, and how a change of batches reaches all ranks
in the same step (docs/stragglers.md).

A change of batches is no change of the gradient: terms are weighted by their global number.
"""

import abc
import os
import time
from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import DistributedModelParallel

from gmeta.accumulate import MicroBatches, in_parts
from gmeta.antdt.agent import WorkerAgent
from gmeta.config import TrainConfig
from gmeta.episodes import Episodes
from gmeta.feed import Feed, ServiceFeed
from gmeta.parallel import Ranks, local_learner
from gmeta.stopping import Stop
from metaio.batch import TaskBatch

AGREE_EVERY_STEPS = 4  # one small all-reduce: 0.1 ms a step at most


class Agent(abc.ABC):
    """Called once a step, and for every batch."""

    @abc.abstractmethod
    def arrange(self, batch: TaskBatch) -> Episodes | MicroBatches:
        """The batch as the learner takes it."""

    @abc.abstractmethod
    def stepped(self, num_tasks: int) -> None:
        """The optimizer's step is done. Collective: every rank calls it for every step."""


@final
class NoAgent(Agent):
    """Shares are fixed and nobody watches."""

    def __init__(self, arrange: Callable[[TaskBatch], Episodes], micro_batches: int) -> None:
        self._arrange = in_parts(arrange, micro_batches)

    def arrange(self, batch: TaskBatch) -> Episodes | MicroBatches:
        """See Agent.arrange."""
        return self._arrange(batch)

    def stepped(self, num_tasks: int) -> None:
        """See Agent.stepped."""


def open_agent(
    config: TrainConfig,
    feed: Feed,
    sharded: DistributedModelParallel,
    arrange: Callable[[TaskBatch], Episodes],
    ranks: Ranks,
    stop: Stop,
) -> Agent:
    """An agent where ranks lease shards, and may therefore take unequal shares of a step."""
    if not isinstance(feed, ServiceFeed):
        return NoAgent(arrange, config.outer.accumulate_steps)
    return ServiceAgent(config, feed, sharded, arrange, ranks, stop)


@final
class ServiceAgent(Agent):
    """Measures, reports, and moves to a new share when every rank holds the same plan."""

    def __init__(
        self,
        config: TrainConfig,
        feed: ServiceFeed,
        sharded: DistributedModelParallel,
        arrange: Callable[[TaskBatch], Episodes],
        ranks: Ranks,
        stop: Stop,
    ) -> None:
        self._feed = feed
        self._ranks = ranks
        self._arrange = arrange
        self._stop = stop
        share = feed.quota(0)
        self._worker = WorkerAgent(
            feed.client, share, self._end_for_restart, config.outer.accumulate_steps
        )
        self._shares = [(0, share)]  # (first round, tasks), in order
        feed.quota = self._share_in
        self._clock = LocalClock()
        local_learner(sharded).clock = self._clock
        self._steps = 0
        self._wait_s = feed.wait_s
        self._ended_s = time.perf_counter()

    def arrange(self, batch: TaskBatch) -> Episodes | MicroBatches:
        """See Agent.arrange."""
        return in_parts(self._arrange, self._worker.plan.micro_batches)(batch)

    def stepped(self, num_tasks: int) -> None:
        """See Agent.stepped."""
        now_s, wait_s = time.perf_counter(), self._feed.wait_s
        compute_s, data_s = self._clock.take_s(), wait_s - self._wait_s
        peers_s = max(0.0, now_s - self._ended_s - compute_s - data_s)
        self._worker.stepped(num_tasks, 1000 * compute_s, 1000 * data_s, 1000 * peers_s)
        self._wait_s, self._ended_s = wait_s, now_s
        self._steps += 1
        if self._steps % AGREE_EVERY_STEPS == 0:
            self._worker.take_actions()
            self._agree()

    def _agree(self) -> None:
        """Adopts the newest plan if it is the same on all ranks, from the first round that no rank
        has planned yet."""
        newest = self._worker.newest.version
        seen = torch.tensor([newest, -newest, self._feed.round])
        dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self._ranks.control)
        highest, lowest, first_round = int(seen[0]), -int(seen[1]), int(seen[2])
        if highest == lowest and newest != self._worker.plan.version:
            plan = self._worker.adopt_newest()
            self._shares.append((first_round, plan.tasks))

    def _share_in(self, feed_round: int) -> int:
        return next(tasks for first, tasks in reversed(self._shares) if first <= feed_round)

    def _end_for_restart(self) -> str:
        """All ranks keep the steps so far and end; torchrun starts them again."""
        used = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        allowed = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        if used >= allowed:
            return f"torchrun restarted {used} times and may no more; raise --max-restarts"
        self._stop.asked = True
        return ""


@final
class LocalClock:
    """Time from the rows' arrival to their gradient's departure: what this rank computes by
    itself, whatever its peers do."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self, rows_UD: Tensor) -> None:
        """The rows are here; the clock stops when backward reaches them."""
        if not rows_UD.requires_grad:
            return
        if rows_UD.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            rows_UD.register_hook(lambda _: self._events.append((begin, _recorded(end))))
            return
        began_s = time.perf_counter()
        rows_UD.register_hook(lambda _: self._add(time.perf_counter() - began_s))

    def _add(self, seconds: float) -> None:
        self._spent_s += seconds

    def take_s(self) -> float:
        """Seconds since the last call; on CUDA those of kernels that are through."""
        while self._events and self._events[0][1].query():
            begin, end = self._events.pop(0)
            self._spent_s += begin.elapsed_time(end) / 1000
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


def _recorded(event: torch.cuda.Event) -> torch.cuda.Event:
    event.record()
    return event
