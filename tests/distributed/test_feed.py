"""Leased shards on several ranks: each episode once, and all stop together, whatever the shares."""

import logging
import pickle
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest

from gmeta.access.errors import AntdtError, RefusedError
from gmeta.antdt import ShardClient
from gmeta.antdt.client.lease import Lease
from gmeta.antdt.errors import FencedError, LeaseLostError, ServiceUnavailableError
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.cli.commands.error_messages import format_error
from gmeta.config.train_config import DataConfig, ModelConfig, RunConfig, TrainConfig
from gmeta.data.episodes import collate_support_query
from gmeta.data.reader import open_reader
from gmeta.distributed.ranks import Ranks
from gmeta.errors import ConfigError, UserError
from gmeta.feeds.batch_request import BatchSettings
from gmeta.feeds.leased import MIN_SHARDS, LeasedBatchSource, tasks_per_shard
from gmeta.feeds.open_source import open_batch_source
from gmeta.feeds.service import SERVICE_VARIABLE
from gmeta.runs.build import check_source
from gmeta.training import train
from metaio import open_dataset
from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic
from tests.distributed.harness import on_ranks, steps_of
from tests.support.refusals import catch_message

NUM_TASKS = 200


def leased(path: Path, service: str, tasks_per_step: int = 16) -> TrainConfig:
    data = DataConfig(
        path=str(path), source="service", service=service, tasks_per_step=tasks_per_step
    )
    return TrainConfig(data=data, run=RunConfig(seed=3))


def uneven(rank: int, step: int) -> int:
    """Rank 1 takes five times as much as the others, from the third step on nothing like it."""
    return (5 if rank == 1 else 1) if step < 3 else 4 - rank


def work_on_rank(ranks: Ranks, config: TrainConfig, even: bool) -> list[list[list[int]]]:
    """The tasks of each step of two epochs."""
    dataset = open_dataset(config.data.path)
    epochs = []
    with LeasedBatchSource(BatchSettings.of(config, dataset), dataset, ranks, None) as feed:
        steps: list[list[int]] = []

        def take_replanned() -> bool:
            if not even:
                feed.change_share(uneven(ranks.rank, len(steps)), 1)
            return not even

        take_replanned()
        for epoch in range(2):
            steps = []
            batches = feed.batches(epoch, 0)
            for episodes, totals in steps_of(
                batches,
                lambda batch: collate_support_query(batch, False),
                dataset.features,
                ranks,
                adopt_new_plan=take_replanned,
            ):
                assert totals.num_rows > 0
                steps.append(episodes.task_T.tolist())
                feed.report_trained(len(steps[-1]))
            assert feed.is_epoch_over(len(steps))
            epochs.append(steps)
    return epochs


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "even"), [(2, False), (4, True)])
def test_each_task_is_trained_once_an_epoch_and_all_ranks_stop_at_one_step(
    click_logs: Path, world_size: int, even: bool
) -> None:
    server = ShardServer(ServiceConfig("127.0.0.1:0"))
    results = on_ranks(world_size, work_on_rank, leased(click_logs, server.address), even)
    server.stop(0.0)
    for epoch in range(2):
        ranks = [result[epoch] for result in results]
        assert len({len(steps) for steps in ranks}) == 1
        counts = Counter(task for steps in ranks for step in steps for task in step)
        assert len(counts) == NUM_TASKS
        assert set(counts.values()) == {1}
        if even:
            assert all(sum(map(len, parts)) <= 16 for parts in zip(*ranks, strict=True))
            # When no shard is left a rank may hold seven steps of its own (two of shards, two and
            # one more read ahead, two announced), another the two that it has announced: at worst
            # four steps more than the 13 of a static split.
            assert len(ranks[0]) <= 13 + 4
    assert results[0][0] != results[0][1]


class Refusal(NamedTuple):
    """From its fourth call on the service refuses `rank` this."""

    rank: int
    owner: type
    call: str
    error: AntdtError


def train_refused(ranks: Ranks, config: TrainConfig, refusal: Refusal) -> str:
    """What this rank ends with."""
    as_ever, calls = getattr(refusal.owner, refusal.call), count()

    def refused(*arguments: Any, **named: Any) -> Any:
        if ranks.rank == refusal.rank and next(calls) >= 3:
            raise refusal.error
        return as_ever(*arguments, **named)

    with mock.patch.object(refusal.owner, refusal.call, refused):
        try:
            train(config, ranks)
        except AntdtError as error:
            return f"{type(error).__name__}: {format_error(error)[0]}"
    return "trained"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(1, ShardClient, "lease", RefusedError("UNAUTHENTICATED", "TOKEN", "run out")),
        Refusal(1, ShardClient, "flush", ServiceUnavailableError("no answer")),
        Refusal(1, Lease, "advance", LeaseLostError("its lease is lost")),
        Refusal(0, ShardClient, "prepare_checkpoint", FencedError("GENERATION", "rolled back")),
        Refusal(0, ShardClient, "commit_checkpoint", FencedError("GENERATION", "rolled back")),
    ],
    ids=lambda refusal: refusal.call,
)
def test_what_the_service_refuses_one_rank_ends_all_with_the_same_line(
    click_logs: Path, tmp_path: Path, refusal: Refusal
) -> None:
    server = ShardServer(ServiceConfig("127.0.0.1:0"))
    config = leased(click_logs, server.address)
    run = replace(config.run, dir=str(tmp_path / "run"), epochs=9, checkpoint_every_steps=2)
    config = replace(config, model=ModelConfig("melu", 4, (4,)), run=run)
    (line,) = set(on_ranks(2, train_refused, config, refusal))
    server.stop(0.0)
    met = "" if refusal.call == "prepare_checkpoint" else f" (met by rank {refusal.rank})"
    assert line == f"{type(refusal.error).__name__}: {refusal.error}{met}"


def test_what_the_service_refuses_is_the_same_on_another_rank() -> None:
    refused = RefusedError("UNAUTHENTICATED", "TOKEN", "run out")
    for error in (refused, FencedError("GENERATION", "rolled back")):
        error.add_note("met by rank 1")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), vars(again), str(again)) == (type(error), vars(error), str(error))
    assert again.exit_code == 1
    assert refused.exit_code == pickle.loads(pickle.dumps(refused)).exit_code == 2


def wait_on_rank(ranks: Ranks, config: TrainConfig) -> str:
    """What a rank says that gets no shard for long, because another worker holds all of them."""
    dataset = open_dataset(config.data.path)
    said: list[str] = []
    watch = logging.Handler()
    watch.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gmeta.feed").addHandler(watch)
    with (
        mock.patch("gmeta.feeds.leased.WARN_AFTER_S", 0.1),
        LeasedBatchSource(BatchSettings.of(config, dataset), dataset, ranks, None) as feed,
        ShardClient(config.data.service, "greedy") as other,
    ):
        assert len(list(other.lease("train", 0, 256))) == NUM_TASKS
        batches = feed.batches(0, 0)
        while not said:
            assert next(batches).num_tasks == 0
    return said[0]


def tell_on_rank(ranks: Ranks, path: str, service: str, folder: Path) -> list[str]:
    """What open_feed says to other sources and changed shards; what wait_on_rank hears."""
    dataset = open_dataset(path)
    own = leased(Path(path), service)
    waited = wait_on_rank(ranks, own)
    static = TrainConfig(data=DataConfig(path=path))
    with_manifest = folder / "step-00000001"
    with_manifest.mkdir()
    messages = []
    with LeasedBatchSource(BatchSettings.of(own, dataset), dataset, ranks, None) as feed:
        (with_manifest / "shards.json").write_text(feed.checkpoint_files(1)["shards.json"])
    without = folder / "step-00000002"
    without.mkdir()
    for config, checkpoint, num_shards in (
        (static, with_manifest, MIN_SHARDS),
        (own, without, MIN_SHARDS),
        (own, with_manifest, 28),
    ):
        try:
            with mock.patch("gmeta.feeds.leased.MIN_SHARDS", num_shards):
                open_batch_source(BatchSettings.of(config, dataset), dataset, ranks, checkpoint)
        except UserError as error:
            messages.append(str(error))
    return [*messages, waited]


def test_a_rank_says_why_it_cannot_go_on_from_a_checkpoint_or_has_no_shard(
    click_logs: Path, tmp_path: Path
) -> None:
    server = ShardServer(ServiceConfig("127.0.0.1:0"))
    (messages,) = on_ranks(1, tell_on_rank, str(click_logs), server.address, tmp_path)
    server.stop(0.0)
    tail = (
        "what it has seen of its epoch means nothing to the other. Set data.source as it was, or "
        "choose another run.dir"
    )
    assert messages[0] == (
        f'data.source = "static", but checkpoint {tmp_path}/step-00000001 was trained with '
        f'data.source = "service": {tail}'
    )
    assert messages[1] == (
        f'data.source = "service", but checkpoint {tmp_path}/step-00000002 was trained with '
        f'data.source = "static": {tail}'
    )
    assert messages[2].startswith(
        "run  was begun with other data or other shards: dataset 'train' is registered with "
        "{'units_per_shard': 1}, the call says {'units_per_shard': 7}; "
    )
    assert messages[2].endswith(
        "To go on, set data.path, data.train_split, data.shuffle and run.seed as they were"
    )
    assert messages[3] == ("rank 0 has no shard: shards of dataset 'train' in workers' hands: 200")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataConfig(service="here:1"),
            "data.service = 'here:1', but data.source = \"static\" leases no shards. "
            'Set data.source = "service", or remove the key',
        ),
        (
            DataConfig(source="service", blocks_per_step=2),
            'data.blocks_per_step = 2, but data.source = "service" hands out whole shards, every '
            "episode once. Remove the key",
        ),
    ],
)
def test_keys_of_the_other_source_are_refused(data: DataConfig, message: str) -> None:
    assert catch_message(ConfigError, check_source, data) == message


def test_an_order_that_does_not_suit_the_ranks_is_refused(click_logs: Path) -> None:
    dataset = open_dataset(str(click_logs))
    data = DataConfig(path=str(click_logs), blocks_per_step=3)
    message = catch_message(ConfigError, open_reader, data, 0, dataset, "train", 0, 4)
    asks = "each needs a block of its own. Set it to 4 or more"
    assert message == f"blocks_per_step is 3 with 4 ranks: {asks}"


def test_shards_are_small_where_the_split_fits_in_memory_else_a_block(
    click_logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset(str(click_logs))
    assert tasks_per_shard("train", dataset) == 1
    monkeypatch.setattr("gmeta.feeds.leased.MIN_SHARDS", 10)
    assert tasks_per_shard("train", dataset) == 16
    monkeypatch.setattr("gmeta.feeds.leased.DEFAULT_CACHE_BYTES", 1)
    assert tasks_per_shard("train", dataset) == NUM_TASKS // dataset.split("train").num_blocks


def test_shards_of_bundles_hold_whole_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metaio.recipes.synthetic.usual_bundle_tasks", lambda rows: 8)
    prepare_synthetic(str(tmp_path), SyntheticConfig(num_tasks=100, num_items=60, block_rows=900))
    dataset = open_dataset(str(tmp_path))
    split = dataset.split("train")
    assert split.blocks.bundle_tasks == 8
    assert tasks_per_shard("train", dataset) == 8
    monkeypatch.setattr("gmeta.feeds.leased.DEFAULT_CACHE_BYTES", 1)
    about = split.num_episodes // split.num_blocks
    assert tasks_per_shard("train", dataset) == about - about % 8 > 8
    # No shard cuts a bundle.
    assert not (split.episode_offsets[1:-1] % 8).any()


def test_ranks_of_several_machines_need_a_service_that_was_named(
    click_logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.delenv(SERVICE_VARIABLE, raising=False)
    monkeypatch.setattr(
        "gmeta.distributed.collective_errors.broadcast_value", lambda value, ranks: value
    )
    ranks: Any = SimpleNamespace(rank=0, world_size=2)
    dataset = open_dataset(str(click_logs))
    settings = BatchSettings.of(leased(click_logs, service=""), dataset)
    assert catch_message(UserError, LeasedBatchSource, settings, dataset, ranks, None) == (
        "the 2 ranks are on several machines, and none of them was named to run the data-shard "
        "service. Start `gmeta shard-service` where all reach it and set data.service = HOST:PORT"
    )


def test_fewer_tasks_a_step_than_ranks_are_refused_before_a_lease(click_logs: Path) -> None:
    ranks: Any = SimpleNamespace(rank=1, world_size=3)
    dataset = open_dataset(str(click_logs))
    config = leased(click_logs, "nowhere:1", tasks_per_step=2)
    settings = BatchSettings.of(config, dataset)
    assert catch_message(UserError, LeasedBatchSource, settings, dataset, ranks, None) == (
        "data.tasks_per_step = 2 is less than the 3 ranks: each needs a task a step to lease "
        "shards. Raise it, or start fewer ranks"
    )
