"""Batches of leased shards that processes make beside a rank: those of the rank itself, to the bit,
whatever the shares; and each task once, also where such a process was killed."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from gmeta.antdt.client.agent import BatchPlan
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.config.train_config import TrainConfig
from gmeta.data.augment import augment_batch
from gmeta.data.collate import collate_in_parts
from gmeta.distributed.ranks import Ranks, start_ranks, stop_ranks
from gmeta.distributed.sharded_learner import ShardedLearner
from gmeta.distributed.sharding import shard_learner
from gmeta.distributed.steps import batch_without_tasks, iterate_steps
from gmeta.distributed.stopping import Stop
from gmeta.errors import GMetaError
from gmeta.feeds.batch_request import BatchRequest, BatchSettings, BatchWork
from gmeta.feeds.batch_workers import BLOCKS, BatchWorkers
from gmeta.feeds.item_statistics_reader import read_item_statistics
from gmeta.feeds.leased import LeasedBatchSource
from gmeta.feeds.shared_block import SharedBlock
from gmeta.feeds.step_agent import LeasedStepAgent, iterate_batches
from gmeta.feeds.worker import serve_requests
from gmeta.runs.build import build
from gmeta.runs.logging.callback import Callback, Run
from gmeta.runs.run_folder import RunFolder, list_checkpoints
from gmeta.runs.run_progress import RunProgress
from gmeta.training import train
from metaio import EpisodeRange, RangeReader
from metaio.errors import FormatError
from metaio.read import pipeline
from tests.distributed.harness import on_ranks
from tests.feeds.forked_workers import running_workers, with_forked_workers
from tests.feeds.test_processes import EVERYTHING, config_of, started, tensors
from tests.support.refusals import catch_message
from tests.support.waiting import PATIENCE_S

NUM_TASKS, EPOCHS, TASKS_PER_STEP = 200, 2, 16
LEASED = ["data.source=service", f"data.tasks_per_step={TASKS_PER_STEP}", f"run.epochs={EPOCHS}"]
# Tasks of each rank's steps and their parts, from two steps behind this one of an epoch on.
PLANS = {2: [(11, 2), (5, 1)], 6: [(3, 1), (13, 3)]}


@pytest.fixture
def server() -> Iterator[ShardServer]:
    """On a free port, with its store in memory."""
    made = ShardServer(ServiceConfig("127.0.0.1:0"))
    yield made
    made.stop(0.0)


class Asking(NamedTuple):
    """A batch that was asked for, also where it was dropped; its number is among an epoch's."""

    epoch: int
    number: int
    num_parts: int
    tasks: list[int]
    tensors: Any


@with_forked_workers
def work_on_rank(ranks: Ranks, config: TrainConfig, rebuild: bool) -> tuple[Any, Any, Any]:
    """What was asked for, the same made by the rank itself, and the steps' tasks, by epoch."""
    dataset, learner = build(config)
    sharded = shard_learner(learner, dataset.features, config, ranks)
    local = sharded.local
    read_item_statistics(
        learner.items, learner.neighbours, BatchSettings.of(config, dataset), dataset, ranks
    )
    asked: list[Asking] = []
    trained: list[list[list[int]]] = []
    stop = Stop()

    def noted(batches: Iterator[Any], agent: LeasedStepAgent, epoch: int) -> Iterator[Any]:
        for number, made in enumerate(batches):
            planned = (
                made if made.plan is not None else made.with_plan(local.exchange.planner.plan(made))
            )
            parts = agent._worker.plan.micro_batches
            tasks = sorted(made.task_T.tolist())
            asked.append(Asking(epoch, number, parts, tasks, tensors(planned)))
            yield made

    settings = BatchSettings.of(config, dataset)
    with LeasedBatchSource(settings, dataset, ranks, None) as feed:
        agent = LeasedStepAgent(config.outer.accumulate_steps, feed, sharded, ranks, stop)
        feed.client.ack_action = mock.Mock()  # type: ignore[method-assign]  # nobody sent plans
        for epoch in range(EPOCHS):
            trained.append([])
            batches = iterate_batches(
                settings, dataset, feed, agent, local, RunProgress(epoch=epoch), stop
            )
            for episodes, totals in iterate_steps(
                noted(batches, agent, epoch),
                learner.collate(batch_without_tasks(dataset.features)),
                ranks,
                stop,
                sharded,
                agent.adopt_new_plan,
            ):
                sharded(episodes, weight=ranks.world_size / max(totals.num_terms, 1)).backward()
                num_tasks = episodes.task_T.numel()
                feed.report_trained(num_tasks)
                if len(trained[-1]) in PLANS:
                    plan = PLANS[len(trained[-1])]
                    share = plan[ranks.rank] if ranks.world_size > 1 else (16, plan[0][1])
                    agent._worker.newest = BatchPlan(agent._worker.plan.version + 1, *share)
                agent.finish_step(num_tasks, episodes.num_rows)
                trained[-1].append(episodes.task_T.tolist())
        if stop.problem is not None:
            raise stop.problem
        assert feed.tasks_read >= sum(len(one.tasks) for one in asked)
        assert feed.read_s > 0
    again = made_again(config, dataset, learner, local, asked) if rebuild else None
    return asked, again, trained


def made_again(
    config: TrainConfig, dataset: Any, learner: Any, local: ShardedLearner, asked: list[Asking]
) -> list[Asking]:
    with RangeReader(dataset) as reader:
        (whole,) = reader.batches([[EpisodeRange("train", 0, NUM_TASKS)]])
        place = {task: at for at, task in enumerate(whole.task_T.tolist())}
        found = []
        for one in asked:
            group = [EpisodeRange("train", at, 1) for at in sorted(place[t] for t in one.tasks)]
            (stored,) = reader.batches([group])
            arrange = partial(learner.collate, epoch=one.epoch)
            batch = augment_batch(
                stored, config.augment, dataset.features, config.run.seed, one.epoch, one.number
            )
            made = collate_in_parts(arrange, one.num_parts)(batch)
            found.append(
                one._replace(tensors=tensors(made.with_plan(local.exchange.planner.plan(made))))
            )
    return found


def alike(one: list[Asking], other: list[Asking]) -> bool:
    """Compare those with tasks: how many without there are is the service's business."""
    pairs = [[repr(batch) for batch in batches if batch.tasks] for batches in (one, other)]
    return pairs[0] == pairs[1]


def test_on_one_rank_they_are_those_of_threads(click_logs: Path, tmp_path: Path) -> None:
    found = []
    for number in (0, 1, 3):
        server = ShardServer(ServiceConfig("127.0.0.1:0"))
        keys = [*LEASED, *EVERYTHING, f"data.service={server.address}", f"data.processes={number}"]
        config = config_of(click_logs, tmp_path, *keys)
        found += on_ranks(1, work_on_rank, config, number == 0)
        server.stop(0.0)
    (threads, again, trained), (one, _, trained_1), (three, _, trained_3) = found
    assert {batch.num_parts for batch in threads} == {2, 1}
    assert alike(threads, again)
    assert alike(one, threads)
    assert alike(three, threads)
    assert trained_1 == trained_3 == trained


@pytest.mark.distributed
def test_on_two_ranks_with_changing_shares_each_task_is_taken_once_and_as_threads_do(
    click_logs: Path, tmp_path: Path, server: ShardServer
) -> None:
    keys = [*LEASED, *EVERYTHING, f"data.service={server.address}", "data.processes=2"]
    ranks = on_ranks(2, work_on_rank, config_of(click_logs, tmp_path, *keys), True)
    for rank, (asked, again, trained) in enumerate(ranks):
        assert alike(asked, again)
        shares = {(len(batch.tasks), batch.num_parts) for batch in asked}
        assert shares >= {plan[rank] for plan in PLANS.values()}
        # Some were dropped, and asked for again by the new plan.
        taken = [step for steps in trained for step in steps if step]
        assert len([one for one in asked if one.tasks]) > len(taken)
    for epoch in range(EPOCHS):
        steps = [step for _, _, trained in ranks for step in trained[epoch]]
        counts = Counter(task for step in steps for task in step)
        assert len(counts) == NUM_TASKS
        assert set(counts.values()) == {1}


class EndsAWorkerOfTheSecond(Callback):
    """Ends a process that makes batches of rank 1, in the middle of an epoch."""

    def on_step_end(self, run: Run, loss: torch.Tensor) -> None:
        if run.step == 5 and torch.distributed.get_rank() == 1:
            os.kill(running_workers()[-1], signal.SIGKILL)


@with_forked_workers
def life(ranks: Ranks, config: TrainConfig) -> tuple[str, list[list[int]]]:
    """What a run ends with on this rank, and the tasks of its steps."""
    steps = []

    def noted(*given: Any) -> Iterator[Any]:
        for episodes, totals in iterate_steps(*given):
            steps.append(episodes.task_T.tolist())
            yield episodes, totals

    with mock.patch("gmeta.training.iterate_steps", noted):
        try:
            train(config, ranks)
        except GMetaError as error:
            return str(error), steps
    return "", steps


@pytest.mark.distributed
def test_behind_a_killed_one_each_task_is_trained_once_an_epoch(
    click_logs: Path, tmp_path: Path, server: ShardServer
) -> None:
    keys = [*LEASED, "data.tasks_per_step=8", f"data.service={server.address}", "data.processes=2"]
    ends = f"run.callbacks=['{__name__}:EndsAWorkerOfTheSecond']"
    killed = on_ranks(2, life, config_of(click_logs, tmp_path, *keys, ends))
    assert killed[0][0] == killed[1][0]
    told = killed[0][0]
    pid = told.split()[1].rstrip(",")
    assert told == (
        f"process {pid}, one of data.processes = 2 that make the batches of rank 1, was ended by "
        "SIGKILL (exit code -9). If memory ran out, lower data.processes, or set it to 0 for "
        "threads; --resume goes on from the newest checkpoint"
    )
    config = config_of(click_logs, tmp_path, *keys)
    kept = int(list_checkpoints(RunFolder(Path(config.run.dir)).checkpoints)[-1].name[5:])
    assert kept >= 4
    resumed = on_ranks(2, life, config)
    assert [line for line, _ in resumed] == ["", ""]
    counts = Counter(
        task
        for (_, first), (_, rest) in zip(killed, resumed, strict=True)
        for step in [*first[:kept], *rest]
        for task in step
    )
    assert len(counts) == NUM_TASKS
    assert set(counts.values()) == {EPOCHS}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """This process, alone."""
    yield start_ranks("cpu", timeout_s=PATIENCE_S)
    stop_ranks()


def asks(*numbers: int) -> Iterator[BatchRequest]:
    """For batches of so many tasks, one behind the other in the split."""
    first = 0
    for step, number in enumerate(numbers):
        yield BatchRequest((0, step), np.array([[first, number]]), 1)
        first += number


def numbers_of(processes: BatchWorkers, local: ShardedLearner, *numbers: int) -> list[int]:
    made = processes.make_batches(local, asks(*numbers), 2)
    return [episodes.task_T.numel() for episodes in made]


def test_what_nobody_took_counts_as_read(click_logs: Path, tmp_path: Path, ranks: Ranks) -> None:
    processes, local = started(click_logs, tmp_path, ranks, 2)
    made = processes.make_batches(local, asks(3, 5, 7, 9), 2)
    assert [next(made).task_T.numel() for _ in range(2)] == [3, 5]
    made.close()
    # One of seven is under way.
    assert numbers_of(processes, local, 4, 6, 8, 2) == [4, 6, 8, 2]
    assert processes.num_tasks_composed == 3 + 5 + 7 + 4 + 6 + 8 + 2
    assert processes.busy_s > 0
    assert processes.wait_s > 0
    processes.close()


def test_the_next_is_read_while_one_is_arranged(
    click_logs: Path, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(click_logs, tmp_path)
    dataset, learner = build(config)
    local = shard_learner(learner, dataset.features, config, ranks).local
    work = BatchWork(
        BatchSettings.of(config, dataset), learner.collate_options(), local.exchange.planner, 0,
        1, 1,
    )  # fmt: skip
    compose, arranged = pipeline.compose, BatchWork.collate
    composed, are_read = [], Event()

    def noted(*given: Any) -> Any:
        composed.append(compose(*given))
        if len(composed) == 2:
            are_read.set()
        return composed[-1]

    def arranged_then(work: BatchWork, *given: Any) -> Any:
        assert are_read.wait(PATIENCE_S)
        return arranged(work, *given)

    def answering() -> None:
        with there, suppress(EOFError):
            serve_requests(there, work, blocks)

    monkeypatch.setattr(pipeline, "compose", noted)
    monkeypatch.setattr(BatchWork, "collate", arranged_then)
    here, there = Pipe()
    blocks = [SharedBlock.make() for _ in range(BLOCKS)]
    for asked in asks(3, 5):
        here.send(asked)
    thread = Thread(target=answering)
    thread.start()
    assert [here.recv().place for _ in range(2)] == [(0, 0), (0, 1)]
    here.close()
    thread.join()
    for block in blocks:
        block.close()


def test_one_that_cannot_be_made_is_told_where_it_was_asked_for_alone(
    click_logs: Path, tmp_path: Path, ranks: Ranks
) -> None:
    processes, local = started(click_logs, tmp_path, ranks, 1)
    wrong = BatchRequest((0, 1), np.array([[NUM_TASKS - 1, 2]]), 1)
    (right,) = asks(5)
    made = processes.make_batches(local, iter([right, wrong]), 2)
    assert next(made).task_T.numel() == 5
    made.close()  # the wrong one is dropped
    assert numbers_of(processes, local, 5, 3) == [5, 3]
    made = processes.make_batches(local, iter([wrong]), 2)
    assert catch_message(FormatError, next, made) == (
        f"episodes {NUM_TASKS - 1} to {NUM_TASKS + 1} are outside split train, which has "
        f"{NUM_TASKS}. The list of ranges belongs to another dataset"
    )
    assert numbers_of(processes, local, 2) == [2]
    processes.close()
