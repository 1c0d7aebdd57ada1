"""Tables in a file train as those in memory do, to the bit, and their checkpoints are the same."""

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gmeta.config.sharding import Placement, ShardingConfig
from gmeta.config.train_config import OuterConfig, RunConfig, TrainConfig
from gmeta.distributed.optim.optimizers import OuterOptimizer, build_optimizer
from gmeta.distributed.ranks import Ranks, broadcast_value
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.distributed.sharding import shard_learner
from gmeta.distributed.tables import cached_group
from gmeta.distributed.tables.cached_group import CachedGroup
from gmeta.errors import ConfigError, NotWrittenError
from gmeta.runs.build import build_learner
from gmeta.runs.checkpoints.checkpoint_writer import CheckpointWriter
from gmeta.runs.checkpoints.growth import load_into_grown_tables
from gmeta.runs.checkpoints.loader import load_checkpoint
from gmeta.runs.run_folder import checkpoint_name
from gmeta.runs.run_progress import RunProgress
from gmeta_models import ModelConfig
from metaio.format.features import Features
from tests.distributed.harness import on_ranks, steps_of
from tests.distributed.test_table_updates import flat
from tests.support import reference
from tests.support.full_disk import files_of_at_most
from tests.support.refusals import catch_message

COLUMNS = (2, 2, 0)
MODEL = ModelConfig(name="melu", embedding_dim=8, hidden=(6,))
STEPS = 10
# By number of ranks: room for the rows of four steps, and for a third of a table.
NUM_SLOTS = {1: 400, 2: 330, 4: 220}
OPTIMIZERS = ("rowwise_adagrad", "adagrad", "adam", "partial_rowwise_adam", "sgd")


def features_of(num_rows: int) -> Features:
    features = reference.some_features(*COLUMNS)
    tables = tuple(replace(table, num_rows=num_rows) for table in features.tables)
    return replace(features, tables=tables)


class Run:
    """A learner with its tables there, and steps whose tasks depend on their number alone."""

    def __init__(
        self, ranks: Ranks, folder: str, placement: Placement, optimizer: Any, num_rows: int = 600,
        **outer: Any,
    ) -> None:  # fmt: skip
        self.ranks, self.features = ranks, features_of(num_rows)
        (only, *_) = (table.name for table in self.features.tables)
        sharding = ShardingConfig(placement=placement, file_dir=folder, cache_share=0.01)
        model = replace(MODEL, admission=outer.pop("admission", (0, 0)))
        if outer.pop("mixed", False):
            sharding = replace(sharding, placement="device", placements=(f"{only}={placement}",))
        config = TrainConfig(
            model=model,
            outer=OuterConfig(sparse_optimizer=optimizer, sparse_lr=0.1, **outer),
            sharding=sharding,
            run=RunConfig(seed=3),
        )
        self.config = config
        torch.manual_seed(0)
        self.learner = build_learner(self.features, model, config.algorithm, "bce")
        self.sharded: DistributedLearner = shard_learner(self.learner, self.features, config, ranks)
        self.optimizer: OuterOptimizer = build_optimizer(self.sharded, config.outer)

    def batch(self, step: int) -> Any:
        rng = random.Random(100 * step + self.ranks.rank)
        number = max(0, 3 - self.ranks.rank)  # a rank without a task takes part
        tasks = [reference.random_task(self.features, 4, 3, rng) for _ in range(number)]
        return reference.batch_of(tasks, self.features)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step, (episodes, totals) in zip(
            steps,
            steps_of(
                map(self.batch, steps), self.learner.collate, self.features, self.ranks,
                sharded=self.sharded,
            ),
            strict=True,
        ):  # fmt: skip
            self.optimizer.begin_step(step, STEPS)
            loss = self.sharded(episodes, weight=self.ranks.world_size / totals.num_terms)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            if step % 4 == 1:
                # Others' rows, while those of two steps ahead are in the cache already.
                episodes = self.learner.collate_to_predict(self.batch(step + 50))
                outputs = self.sharded.local.predict(episodes).after_N
                losses.append(outputs.sum().item())
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        tables = self.sharded.state_dict()  # first: it writes caches back
        return flat({"model": tables, "optimizer": self.optimizer.state_dict()["state"]})


def differences(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], of_case: str
) -> list[str]:
    assert one.keys() == other.keys()
    return [f"{of_case}: {k}" for k in one if not torch.equal(one[k], other[k])]


def train_both(ranks: Ranks) -> list[str]:
    cached_group.MIN_SLOTS = NUM_SLOTS[ranks.world_size]
    found = []
    cases: list[dict[str, Any]] = [{"optimizer": name} for name in OPTIMIZERS]
    cases += [{"optimizer": "adagrad", "clip_norm": 0.05}]
    cases += [{"optimizer": "rowwise_adagrad", "mixed": True}]
    # Rows that begin as one vector, and some that begin anew.
    cases += [{"optimizer": name, "admission": (2, 3)} for name in ("adam", "sgd")]
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            here, there = (Run(ranks, folder, place, **case) for place in ("auto", "file"))
            if here.train(range(STEPS)) != there.train(range(STEPS)):
                found.append(f"{case}: losses")
            found += differences(here.state(), there.state(), str(case))
            groups = there.sharded.local.exchange.groups
            cached = [group for group in groups if isinstance(group, CachedGroup)]
            assert len(cached) == 1
            assert len(groups) == 1 + case.get("mixed", False)
            # Rows went out and came back.
            slots = cached[0].slots
            assert 0 < slots.num_found < 0.9 * slots.num_asked
            rate = slots.num_found / slots.num_asked
            assert there.optimizer.reading()["cache_hit_rate"] == rate
            assert "cache_hit_rate" not in here.optimizer.reading()
        assert not list(Path(folder).iterdir())  # no name that a kill could leave behind
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_tables_in_a_file_train_to_the_bits_of_those_in_memory(world_size: int) -> None:
    assert on_ranks(world_size, train_both) == [[]] * world_size


def save_and_go_on(ranks: Ranks, folder: Path) -> list[str]:
    """From memory into a file, from a file into memory and into a file of more rows."""
    cached_group.MIN_SLOTS = NUM_SLOTS[ranks.world_size]
    scratch = broadcast_value(tempfile.mkdtemp(), ranks)
    found, made = [], {}
    for place in ("auto", "file"):
        run = Run(ranks, scratch, place, "adam")
        with CheckpointWriter(
            folder / place, run.sharded, run.optimizer, run.config, ranks
        ) as writer:
            run.train(range(4))
            writer.save(RunProgress(step=4))
            assert writer.is_writing <= (place == "auto")  # of a file no copy is made
        made[place] = run
    checkpoints = {place: folder / place / checkpoint_name(4) for place in made}
    for place, other in (("auto", "file"), ("file", "auto"), ("file", "file")):
        whole, resumed = made[place], Run(ranks, scratch, other, "adam")
        resumed.train(range(2))  # what the cache held is forgotten
        load_checkpoint(checkpoints[place], resumed.sharded, resumed.optimizer, ranks)
        found += differences(resumed.state(), whole.state(), f"{place} to {other}")
    steps = range(4, 8)
    if made["auto"].train(steps) != resumed.train(steps):
        found.append("losses after a resume")
    grown = [Run(ranks, scratch, place, "adam", num_rows=850) for place in ("auto", "file")]
    for run in grown:
        outer, rows = run.config.outer, {run.features.tables[0].name: torch.arange(5).numpy()}
        load_into_grown_tables(checkpoints["auto"], run.sharded, run.optimizer, ranks, outer, rows)
    if grown[0].train(steps) != grown[1].train(steps):
        found.append("losses of grown tables")
    return found + differences(grown[0].state(), grown[1].state(), "grown")


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_go_from_one_placement_to_another(world_size: int, tmp_path: Path) -> None:
    assert on_ranks(world_size, save_and_go_on, tmp_path) == [[]] * world_size


def refused(ranks: Ranks, folder: Path) -> list[str]:
    cached_group.MIN_SLOTS = 8
    run = Run(ranks, str(folder), "file", "sgd")
    messages = [catch_message(ConfigError, run.train, range(4))]
    with files_of_at_most(4096):
        # Of a rank that waits for others, none may be left waiting: the message is each one's own.
        messages.append(catch_message(NotWrittenError, Run, ranks, str(folder), "file", "sgd"))
    return messages


@pytest.mark.distributed
def test_what_does_not_fit_ends_with_one_line(tmp_path: Path) -> None:
    ((small, full),) = on_ranks(1, refused, tmp_path)
    number = small.partition("needs ")[2].partition(" ")[0]
    assert small == (
        f"a step needs {number} rows of tables whose cache has 24 slots, too few for it and the "
        "steps ahead. Raise sharding.cache_share, or lower data.tasks_per_step"
    )
    assert full == (
        f"tables cannot be kept in a file in {tmp_path}, which takes 0.0 GB there for this rank's "
        "next part: File too large. Free some, or name another folder in sharding.file_dir"
    )
