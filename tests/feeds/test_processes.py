"""Batches that processes make beside a rank: the rank's own, to the bit; how processes end."""

import gc
import json
import os
import pickle
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from gmeta.config.train_config import TrainConfig, load_config
from gmeta.data.accumulate import MicroBatches
from gmeta.data.augment import augment_batches
from gmeta.data.collate import collate_in_parts
from gmeta.data.reader import open_reader
from gmeta.data.shared_batch import read_from_block, write_to_block
from gmeta.data.transfer import unpack
from gmeta.distributed.ranks import Ranks, start_ranks, stop_ranks
from gmeta.distributed.sharded_learner import ShardedLearner
from gmeta.distributed.sharding import shard_learner
from gmeta.distributed.stopping import StoppedError
from gmeta.errors import GMetaError
from gmeta.feeds.batch_request import BatchRequest, BatchSettings, BatchWork, places_from
from gmeta.feeds.batch_workers import BLOCKS, BatchWorkers, resolve_num_processes
from gmeta.feeds.item_statistics_reader import read_item_statistics
from gmeta.feeds.shared_block import SharedBlock
from gmeta.feeds.worker import TrainingSplit
from gmeta.runs.build import build
from gmeta.runs.guards import load_batch, named_tensors, save_batch
from gmeta.runs.logging.callback import Callback, Run
from gmeta.training import train
from metaio import open_dataset
from metaio.errors import NoDatasetError
from metaio.read import pipeline
from tests.distributed.harness import on_ranks
from tests.feeds.forked_workers import running_workers, with_forked_workers
from tests.metaio.prepare.test_events import log, prepared, schema
from tests.support.forked import Forked
from tests.support.processes import with_imports_ready
from tests.support.refusals import catch_message
from tests.support.waiting import PATIENCE_S, wait_until

CONFIG = """
[data]
path = "{data}"
tasks_per_step = 48
[model]
name = "melu"
embedding_dim = 4
hidden = [6]
[algorithm]
name = "maml"
adapt_embeddings = false
[run]
dir = "{folder}/run"
epochs = 3
checkpoint_every_steps = 2
log_every_steps = 1
loggers = []
"""
STEPS = 5  # of an epoch: 200 tasks
# What is drawn anew, told by other rows, cut in parts and plain at first, at once.
EVERYTHING = [
    "augment.resplit_support=true", "augment.oov_dropout=0.3", 'item_features.columns=["item"]',
    'support_features.columns=["genre", "tags"]', "outer.accumulate_steps=2",
    "algorithm.plain_epochs=1", "run.shape_buckets=on", "neighbours.column=item",
]  # fmt: skip
KINDS = {
    "fast loop": [], "everything": EVERYTHING, "general loop": ["algorithm.name=encoder"],
    "rows that adapt": ["algorithm.adapt_embeddings=true", "algorithm.name=reptile"],
    "plain": ["algorithm.name=none", "data.threads=2"],
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """This process, alone."""
    yield start_ranks("cpu", timeout_s=PATIENCE_S)
    stop_ranks()


def config_of(data: Path, folder: Path, *keys: str) -> TrainConfig:
    path = folder / "train.toml"
    path.write_text(CONFIG.format(data=data, folder=folder))
    return load_config(path, keys)


def settings_of(config: TrainConfig) -> BatchSettings:
    return BatchSettings.of(config, open_dataset(config.data.path))


def made_here(
    config: TrainConfig, ranks: Ranks, rank: int, world_size: int, epoch: int, step: int
) -> tuple[ShardedLearner, list[Any]]:
    """The learner, and the batches from there to the end of the run, made in this process."""
    dataset, learner = build(config)
    local = shard_learner(learner, dataset.features, config, ranks).local
    read_item_statistics(
        learner.items, learner.neighbours, BatchSettings.of(config, dataset), dataset, ranks
    )
    found = []
    with open_reader(config.data, config.run.seed, dataset, "train", rank, world_size) as reader:
        for at in range(epoch, config.run.epochs):
            first = step if at == epoch else 0
            in_epoch = partial(learner.collate, epoch=at)
            stored = reader.batches(at, first)
            seed = config.run.seed
            augmenting = augment_batches(stored, config.augment, dataset.features, seed, at, first)
            drawing = learner.collate_options().with_drawn_items(augmenting, at, first)
            arranged = map(collate_in_parts(in_epoch, config.outer.accumulate_steps), drawing)
            found += [one.with_plan(local.exchange.planner.plan(one)) for one in arranged]
    return local, found


def tensors(episodes: Any) -> list[tuple[str, torch.dtype, tuple[int, ...], list[float]]]:
    """All of them, by their names, those that the exchange needs among them."""
    parts = episodes.parts if isinstance(episodes, MicroBatches) else (episodes,)
    plan = parts[0].plan
    named = list(named_tensors((tuple(replace(part, plan=None) for part in parts), plan.known)))
    named += named_tensors(unpack(plan.numbers), "numbers")
    return [(name, one.dtype, tuple(one.shape), one.flatten().tolist()) for name, one in named]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("of", "place"), [(1, (0, 0)), (2, (0, 3)), (3, (1, 4))])
def test_they_make_the_batches_of_the_rank_itself_from_any_step_on(
    click_logs: Path, tmp_path: Path, ranks: Ranks, kind: str, of: int, place: tuple[int, int]
) -> None:
    config = config_of(click_logs, tmp_path, *KINDS[kind])
    local, expected = made_here(config, ranks, 1, 2, *place)
    assert len(expected) == 3 * STEPS - place[0] * STEPS - place[1]
    how = local.learner.collate_options(), local.exchange.planner
    work = pickle.loads(pickle.dumps(BatchWork(settings_of(config), *how, 1, 2, of)))
    places = list(places_from(place, STEPS, config.run.epochs))
    with ExitStack() as held:
        splits = [TrainingSplit(work, held) for _ in range(of)]
        for number, (made_for, wanted) in enumerate(zip(places, expected, strict=True)):
            assert made_for == divmod(place[0] * STEPS + place[1] + number, STEPS)
            asked = BatchRequest(made_for, None, config.outer.accumulate_steps)
            episodes = work.collate(next(splits[number % of].begin(asked)), asked)
            block = SharedBlock.make()
            told = pickle.loads(pickle.dumps(write_to_block(episodes, block.first)))
            there = SharedBlock(os.dup(block.fileno()))
            assert tensors(read_from_block(told, there.first(told.num_bytes))) == tensors(wanted)
            block.close()
            there.close()


def test_items_drawn_for_a_step_are_those_that_the_rank_itself_draws(
    tmp_path: Path, ranks: Ranks
) -> None:
    data = prepared(tmp_path / "events", log(), schema())
    config = config_of(
        Path(data), tmp_path, "model.name=dot", "model.events=sasrec", "algorithm.name=none",
        "outer.loss=softmax", "outer.negatives=popular", "outer.popular_negatives=20",
        "outer.accumulate_steps=2", "run.epochs=1", "data.tasks_per_step=16",
    )  # fmt: skip
    local, expected = made_here(config, ranks, 0, 1, 0, 1)
    how = local.learner.collate_options(), local.exchange.planner
    work = pickle.loads(pickle.dumps(BatchWork(settings_of(config), *how, 0, 1, 1)))
    drawn = []
    with ExitStack() as held:
        split = TrainingSplit(work, held)
        for step, wanted in enumerate(expected, start=1):
            asked = BatchRequest((0, step), None, 2)
            episodes = work.collate(next(split.begin(asked)), asked)
            assert tensors(episodes) == tensors(wanted)
            assert isinstance(episodes, MicroBatches)
            # All parts of a step compete with the items of the step.
            layouts = [part.inputs.events for part in episodes.parts]
            items = {tuple(one.drawn.item_A.tolist()) for one in layouts if one and one.drawn}
            assert len(layouts) == 2
            assert len(items) == 1
            drawn += items
    assert len(set(drawn)) == len(expected) > 1


def test_behind_one_that_cannot_be_read_the_next_is_read_anew(
    click_logs: Path, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(click_logs, tmp_path)
    local, (_, wanted, *_) = made_here(config, ranks, 0, 1, 0, 0)
    work = BatchWork(
        settings_of(config), local.learner.collate_options(), local.exchange.planner, 0, 1, 1
    )
    compose, failures = pipeline.compose, [OSError("gone")]

    def composed(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return compose(*given)

    monkeypatch.setattr(pipeline, "compose", composed)
    with ExitStack() as held:
        split = TrainingSplit(work, held)
        with pytest.raises(OSError, match=r"^gone$"):
            next(split.begin(BatchRequest((0, 0), None, 1)))
        asked = BatchRequest((0, 1), None, 1)
        assert tensors(work.collate(next(split.begin(asked)), asked)) == tensors(wanted)


class EndsAWorker(Callback):
    """Ends a process that makes batches, in the middle of training."""

    def on_step_end(self, run: Run, loss: torch.Tensor) -> None:
        if run.step == 3:
            os.kill(running_workers()[-1], signal.SIGKILL)


def losses(config: TrainConfig) -> list[float]:
    lines = map(json.loads, (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines]


def trained(config: TrainConfig, ranks: Ranks) -> list[float]:
    train(config, ranks)
    return losses(config)


def test_training_is_the_same_and_goes_on_in_the_middle_of_an_epoch(
    click_logs: Path, tmp_path: Path, ranks: Ranks
) -> None:
    before = running_workers()
    expected = trained(
        config_of(click_logs, tmp_path, f"run.dir={tmp_path}/threads", *EVERYTHING), ranks
    )
    keys = [*EVERYTHING, "data.processes=2"]
    # Ends early, in the middle of an epoch; then goes on, to the end of the run.
    assert trained(config_of(click_logs, tmp_path, *keys, "run.max_steps=7"), ranks) == expected[:7]
    assert running_workers() == before
    assert trained(config_of(click_logs, tmp_path, *keys), ranks) == expected
    assert running_workers() == before


class SignalsAll(Callback):
    """Tells all processes of the job to end, as a cluster does."""

    def on_step_end(self, run: Run, loss: torch.Tensor) -> None:
        if run.step == 3:
            for pid in [*running_workers(), os.getpid()]:
                os.kill(pid, signal.SIGTERM)


def test_sigterm_to_all_processes_is_safe(click_logs: Path, tmp_path: Path, ranks: Ranks) -> None:
    before = running_workers()
    alone = config_of(click_logs, tmp_path, f"run.dir={tmp_path}/threads", "run.epochs=2")
    expected = trained(alone, ranks)
    keys = ["run.epochs=2", "data.processes=2"]
    stopped = config_of(click_logs, tmp_path, *keys, f"run.callbacks=['{__name__}:SignalsAll']")
    message = catch_message(StoppedError, train, stopped, ranks)
    num_done = len(losses(stopped))
    assert message == (
        f"stopped by SIGTERM behind step {num_done}, and nothing of it is lost. Run the same "
        "command with --resume to go on"
    )
    assert 3 <= num_done < 2 * STEPS
    assert trained(config_of(click_logs, tmp_path, *keys), ranks) == expected
    assert running_workers() == before


@with_forked_workers
def train_both(ranks: Ranks, configs: list[TrainConfig]) -> None:
    for config in configs:
        train(config, ranks)


@pytest.mark.distributed
def test_training_is_the_same_on_two_ranks(click_logs: Path, tmp_path: Path) -> None:
    keys = [*EVERYTHING, "run.epochs=2"]
    threads = config_of(click_logs, tmp_path, *keys, f"run.dir={tmp_path}/threads")
    processes = config_of(click_logs, tmp_path, *keys, "data.processes=2")
    on_ranks(2, train_both, [threads, processes])
    assert losses(processes) == losses(threads)
    assert len(losses(threads)) == 2 * STEPS


class EndsAWorkerOfTheSecond(Callback):
    """Ends a process that makes batches of rank 1, in the middle of training."""

    def on_step_end(self, run: Run, loss: torch.Tensor) -> None:
        if run.step == 3 and torch.distributed.get_rank() == 1:
            os.kill(running_workers()[-1], signal.SIGKILL)


@with_forked_workers
def told_by(ranks: Ranks, config: TrainConfig) -> str:
    try:
        train(config, ranks)
    except GMetaError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_a_killed_one_ends_the_run_on_all_ranks_alike(click_logs: Path, tmp_path: Path) -> None:
    callback = f"run.callbacks=['{__name__}:EndsAWorkerOfTheSecond']"
    keys = "data.processes=2", "data.tasks_per_step=4", callback
    one, other = on_ranks(2, told_by, config_of(click_logs, tmp_path, *keys))
    assert one == other
    assert "that make the batches of rank 1, was ended by SIGKILL (exit code -9)" in one


def episodes_of(processes: BatchWorkers, local: ShardedLearner) -> Iterator[Any]:
    return processes.episodes(local, 0, 0, STEPS)


def started(
    click_logs: Path, folder: Path, ranks: Ranks, number: int
) -> tuple[BatchWorkers, ShardedLearner]:
    config = config_of(click_logs, folder, f"data.processes={number}")
    dataset, learner = build(config)
    sharded = shard_learner(learner, dataset.features, config, ranks)
    return BatchWorkers(number, BatchSettings.of(config, dataset), ranks), sharded.local


def test_one_that_is_killed_is_named_and_ends_the_run_behind_a_step(
    click_logs: Path, tmp_path: Path, ranks: Ranks
) -> None:
    # More steps than are made ahead.
    keys = "data.processes=1", "data.tasks_per_step=4", f"run.callbacks=['{__name__}:EndsAWorker']"
    config = config_of(click_logs, tmp_path, *keys)
    message = catch_message(GMetaError, train, config, ranks)
    pid = message.split()[1].rstrip(",")
    assert message == (
        f"process {pid}, one of data.processes = 1 that make the batches of rank 0, was ended by "
        "SIGKILL (exit code -9). If memory ran out, lower data.processes, or set it to 0 for "
        "threads; --resume goes on from the newest checkpoint"
    )
    assert len(losses(config)) >= 3
    assert (Path(config.run.dir) / "checkpoints").exists()
    assert int(pid) not in running_workers()


def test_ctrl_c_is_for_the_rank_alone(click_logs: Path, tmp_path: Path, ranks: Ranks) -> None:
    processes, local = started(click_logs, tmp_path, ranks, 1)
    episodes = episodes_of(processes, local)
    next(episodes)
    for pid in running_workers():
        os.kill(pid, signal.SIGINT)
    assert sum(one.num_rows > 0 for one in episodes) == STEPS - 1
    processes.close()


def test_what_one_cannot_read_is_told_alike(click_logs: Path, tmp_path: Path, ranks: Ranks) -> None:
    processes, local = started(click_logs, tmp_path, ranks, 2)
    gone = config_of(tmp_path / "gone", tmp_path)
    processes._settings = replace(processes._settings, data=gone.data)
    with pytest.raises(NoDatasetError) as expected:
        build(gone)
    assert catch_message(NoDatasetError, next, episodes_of(processes, local)) == str(expected.value)
    processes.close()


def test_one_that_fails_writes_why_and_is_named(
    click_logs: Path, tmp_path: Path, ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    processes, local = started(click_logs, tmp_path, ranks, 1)
    pid = processes._workers[0].process.pid
    local.exchange.planner = None  # type: ignore[assignment]
    assert catch_message(GMetaError, next, episodes_of(processes, local)) == (
        f"process {pid}, one of data.processes = 1 that make the batches of rank 0, ended with "
        "exit code 1; what it wrote stands above. If memory ran out, lower data.processes, or set "
        "it to 0 for threads; --resume goes on from the newest checkpoint"
    )
    assert "AttributeError: 'NoneType' object has no attribute 'plan'" in capfd.readouterr().err
    processes.close()


def test_one_that_stands_still_is_named_and_goes_on(
    click_logs: Path, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("gmeta.feeds.batch_workers.SILENT_S", 0.01)
    processes, local = started(click_logs, tmp_path, ranks, 1)
    pid = processes._workers[0].process.pid
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, episodes_of(processes, local))
        wait_until(lambda: bool(caplog.messages), "a line about the process")
        os.kill(pid, signal.SIGCONT)
        assert first.result().num_rows > 0
    assert caplog.messages[0] == (
        f"process {pid}, one of data.processes = 1, has made no batch for 0.01 s, and this rank "
        f"waits for it: see whether it is stopped (kill -CONT {pid}), or its disk hangs"
    )
    processes.close()


def test_they_end_with_a_rank_that_is_killed(click_logs: Path, tmp_path: Path) -> None:
    here, there = with_imports_ready().Pipe()
    parent = Forked(_takes_a_batch, click_logs, tmp_path, there)
    pids = here.recv()
    assert len(pids) == 2
    assert all(map(is_running, pids))
    parent.kill()
    wait_until(lambda: not any(map(is_running, pids)), "the end of both processes")


def _takes_a_batch(data: Path, folder: Path, told: Connection) -> None:
    processes, local = started(data, folder, start_ranks("cpu", 60), 2)
    next(episodes_of(processes, local))
    told.send([worker.process.pid for worker in processes._workers])
    told.recv()


def test_their_memory_is_nameless_and_goes(click_logs: Path, tmp_path: Path, ranks: Ranks) -> None:
    gc.collect()  # blocks that earlier tests let go of without closing them
    held = num_blocks()
    processes, local = started(click_logs, tmp_path, ranks, 2)
    episodes = episodes_of(processes, local)
    first = tensors(next(episodes))
    assert num_blocks() == held + 2 * BLOCKS
    rest = list(map(tensors, episodes))
    processes.close()
    # What was taken is the rank's own.
    assert len(rest) == STEPS - 1
    assert first != rest[0]
    assert num_blocks() == held


def num_blocks() -> int:
    """Count the blocks of shared memory that this process holds."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        link = Path(f"/proc/self/fd/{name}")
        if link.is_symlink() and str(link.readlink()).startswith("/memfd:gmeta-batch"):
            found.add(link.stat().st_ino)
    return len(found)


def test_a_block_grows_on_both_sides() -> None:
    here = SharedBlock.make()
    there = SharedBlock(os.dup(here.fileno()))
    for size in (3, 5_000, 4_000, 1 << 20):
        here.first(size).copy_(torch.arange(size) % 251)
        assert torch.equal(there.first(size), (torch.arange(size) % 251).to(torch.uint8))
    assert here.first(0).nbytes == 0
    here.close()
    # Who still holds it, has it.
    assert int(there.first(1 << 20)[250]) == 250
    there.close()


def is_running(pid: int) -> bool:
    try:
        # A process that nobody waits for any more is a zombie at most.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_batch_of_one_block_can_be_saved(click_logs: Path, tmp_path: Path, ranks: Ranks) -> None:
    config = config_of(click_logs, tmp_path, "outer.accumulate_steps=2")
    _, (wanted, *_) = made_here(config, ranks, 0, 1, 0, 0)
    block = SharedBlock.make()
    told = write_to_block(wanted, block.first)
    save_batch(tmp_path / "bad.pt", read_from_block(told, block.first(told.num_bytes)))
    saved = load_batch(tmp_path / "bad.pt")
    for part, expected in zip(saved, wanted.parts, strict=True):
        names = dict(named_tensors(replace(expected, plan=None)))
        found = dict(named_tensors(part))
        assert found.keys() == names.keys()
        assert all(torch.equal(found[name], names[name]) for name in names)


@pytest.mark.parametrize(
    ("asked", "device", "cores", "quota", "ranks", "number"),
    [
        (3, "cpu", 1, "", 1, 3), (0, "cuda", 16, "", 1, 0), (-1, "cpu", 16, "", 1, 0),
        (-1, "cuda", 16, "", 1, 4), (-1, "cuda", 16, "", 8, 1), (-1, "cuda", 1, "", 1, 0),
        (-1, "cuda", 16, "", 32, 0), (-1, "cuda", 64, "max 100000", 8, 4),
        (-1, "cuda", 64, "300000 100000", 1, 2), (-1, "cuda", 64, "50000 100000", 1, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_local", [True, False])
def test_a_gpu_has_some_unasked_and_keeps_a_core_for_its_rank(
    asked: int, device: str, cores: int, quota: str, ranks: int, number: int, is_local: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if quota:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr("gmeta.feeds.batch_workers._QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    # A store would send the same blocks to each that nobody asked for.
    expected = number if is_local or asked >= 0 else min(number, 1)
    assert resolve_num_processes(asked, torch.device(device), is_local) == expected
