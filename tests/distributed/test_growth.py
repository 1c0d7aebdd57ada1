"""A table that grows between two runs trains as if it had been large from the start, to the bit.
Method: the same steps twice, once on tables of 101 rows that grow to 1,000, once on tables of 1,000
from the start. Mutants that these tests catch: momentum of a reset row kept, a reset row left as it
was, initial values that depend on the size of the table, sums not discounted, statistics of items
left out or of a value that a row stood for before."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.inputs import ItemFeaturesConfig, NeighboursConfig
from gmeta.config.sharding import ShardingConfig
from gmeta.config.train_config import OuterConfig, RunConfig, TrainConfig
from gmeta.distributed.optim.optimizers import OuterOptimizer, build_optimizer
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.distributed.sharding import INIT_BLOCK_ROWS, _fill, shard_learner
from gmeta.learner import MetaLearner
from gmeta.platform.internals import ShardedTensor
from gmeta.runs.build import build_learner
from gmeta.runs.checkpoints.checkpoint_writer import CheckpointWriter
from gmeta.runs.checkpoints.growth import decay_sums, load_into_grown_tables
from gmeta.runs.checkpoints.loader import collect_state
from gmeta.runs.run_folder import checkpoint_name
from gmeta.runs.run_progress import RunProgress
from gmeta_models import ModelConfig
from metaio.format.features import Features, FeatureSpec, TableSpec
from tests.distributed.harness import on_ranks, steps_of
from tests.support import reference

OLD_ROWS, NEW_ROWS = 101, 1_000
WIDTHS = (4, 8, 12, 16)
NARROW_AT = 12  # where the second table is narrower than the first
FLOOR = 2e-6
RESET = {"s0": np.array([0, 3, 50, 100, 700])}  # of old rows, and of one that is new anyway


@pytest.mark.parametrize("width", [1, *WIDTHS])
@pytest.mark.parametrize(
    ("first_row", "num_rows"), [(0, 1), (0, 101), (7, 30), (0, 2 * INIT_BLOCK_ROWS)]
)
def test_a_part_has_the_rows_of_the_whole_table(width: int, first_row: int, num_rows: int) -> None:
    part, whole = torch.zeros(num_rows, width), torch.zeros(2 * INIT_BLOCK_ROWS, width)
    _fill(part, first_row, 0, width, 0.1, 3, 5)
    _fill(whole, 0, 0, width, 0.1, 3, 5)
    assert torch.equal(part, whole[first_row : first_row + num_rows])


class Made(TorchDispatchMode):
    """Notes the sizes of tensors that are made inside, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # All others are views, or written in place.
        if func._schema.returns[0].alias_info is None:
            self.num_bytes.append(result.nbytes)
        return result


def test_a_table_is_filled_with_the_memory_of_one_block() -> None:
    part = torch.zeros(3 * INIT_BLOCK_ROWS, 2)
    with Made() as made:
        _fill(part, 0, 0, 2, 0.1, 3, 5)
    assert made.num_bytes == [4 * 2 * INIT_BLOCK_ROWS]


def features_of(num_rows: int) -> Features:
    return Features(
        tables=(TableSpec("s0", num_rows), TableSpec("s1", num_rows)),
        single=(FeatureSpec("s0", "s0"), FeatureSpec("s1", "s1")),
        multi=(),
        dense=(),
    )


def config_of(width: int, sparse: str = "rowwise_adagrad", kind: str = "row_wise") -> TrainConfig:
    narrow = ("s1=4",) if width == NARROW_AT else ()
    return TrainConfig(
        model=ModelConfig(name="melu", embedding_dim=width, hidden=(3,), widths=narrow),
        outer=OuterConfig(
            dense_optimizer="adam", dense_lr=0.05, sparse_lr=0.2, sparse_optimizer=sparse
        ),
        sharding=ShardingConfig(default=kind),
        run=RunConfig(seed=1),
    )


class Trained:
    """A model with tables of so many rows, and its optimizer."""

    def __init__(self, ranks: Ranks, config: TrainConfig, num_rows: int) -> None:
        torch.manual_seed(0)
        features = features_of(num_rows)
        algorithm = AlgorithmConfig(inner_lr=0.1)
        self.learner: MetaLearner = build_learner(
            features,
            config.model,
            algorithm,
            "bce",
            item_features=config.item_features,
            neighbours=config.neighbours,
        )
        self.sharded: DistributedLearner = shard_learner(self.learner, features, config, ranks)
        self.optimizer: OuterOptimizer = build_optimizer(self.sharded, config.outer)
        self._ranks, self._config = ranks, config

    def train(self, steps: range, ids_below: int) -> None:
        """A step's tasks depend on its number alone, at any number of ranks."""
        features = features_of(ids_below)

        def tasks(step: int) -> list[reference.Task]:
            rng = random.Random(step)
            return [reference.random_task(features, 3, 2, rng) for _ in range(5)]

        ranks = self._ranks
        batches = (
            reference.batch_of(tasks(step)[ranks.rank :: ranks.world_size], features)
            for step in steps
        )
        for episodes, totals in steps_of(batches, self.learner.collate, features, ranks):
            self.optimizer.begin_step(0, 1)
            self.sharded(episodes, ranks.world_size / totals.num_terms).backward()
            self.optimizer.step()

    def save(self, folder: Path, step: int) -> Path:
        ranks, config = self._ranks, self._config
        with CheckpointWriter(folder, self.sharded, self.optimizer, config, ranks) as writer:
            writer.save(RunProgress(step=step))
        return folder / checkpoint_name(step)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of model and optimizer: this rank's copy of its part."""
        return dict(flat(collect_state(self.sharded, self.optimizer), ""))


def flat(state: dict[str, Any], prefix: str) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found += flat(value, f"{name}/")
        elif isinstance(value, ShardedTensor):
            shards = value.local_shards()
            found += [(f"{name}@{s.metadata.shard_offsets}", s.tensor.clone()) for s in shards]
        elif isinstance(value, Tensor):
            found.append((name, value.detach().clone()))
    return found


def cases() -> list[TrainConfig]:
    by_width = [config_of(width) for width in WIDTHS]
    return [*by_width, config_of(16, "adagrad", "column_wise"), config_of(8, "sgd", "table_wise")]


def begin(ranks: Ranks, folder: Path) -> None:
    """Two steps on ids of the small table, in a small and in a large one, saved."""
    for index, config in enumerate(cases()):
        for name, num_rows in (("small", OLD_ROWS), ("large", NEW_ROWS)):
            trained = Trained(ranks, config, num_rows)
            trained.train(range(2), OLD_ROWS)
            path = folder / f"{index}-{name}"
            if ranks.rank == 0:
                path.mkdir()
            trained.save(path, 2)


def go_on(ranks: Ranks, folder: Path) -> list[str]:
    """Two steps on all ids from both; the names of what differs."""
    differing = []
    for index, config in enumerate(cases()):
        found = []
        for name in ("small", "large"):
            trained = Trained(ranks, config, NEW_ROWS)
            path = folder / f"{index}-{name}" / checkpoint_name(2)
            load_into_grown_tables(
                path, trained.sharded, trained.optimizer, ranks, config.outer, {}
            )
            trained.train(range(2, 4), NEW_ROWS)
            found.append(trained.tensors())
        grown, large = found
        assert grown.keys() == large.keys()
        differing += [f"{index} {one}" for one in grown if not torch.equal(grown[one], large[one])]
    return differing


@pytest.mark.distributed
@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1)])
def test_a_table_that_grew_trains_as_one_that_was_large_from_the_start(
    tmp_path: Path, before: int, after: int
) -> None:
    on_ranks(before, begin, tmp_path)
    assert on_ranks(after, go_on, tmp_path) == [[]] * after


def reset_and_compare(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """What is wrong with each row after a checkpoint was loaded with some rows reset."""
    config = config_of(4)
    trained = Trained(ranks, config, OLD_ROWS)
    trained.train(range(3), OLD_ROWS)
    path = trained.save(folder, 3)
    before = trained.tensors()
    # Slow and obvious: a table that nobody trained has the values that a row begins with.
    initial = Trained(ranks, config, NEW_ROWS).tensors()
    grown = Trained(ranks, config, NEW_ROWS)
    outer = replace(config.outer, adagrad_decay=0.5)
    load_into_grown_tables(path, grown.sharded, grown.optimizer, ranks, outer, RESET)
    after = grown.tensors()
    weight, sums = (
        next(name for name in after if name.startswith(part) and "s0" in name and "@" in name)
        for part in ("model", "optimizer")
    )
    kept = [row for row in range(OLD_ROWS) if row not in RESET["s0"]]
    reset = RESET["s0"].tolist()
    return {
        "trained": int((before[weight] != initial[weight][:OLD_ROWS]).any(dim=1).sum()),
        "kept": torch.equal(after[weight][kept], before[weight][kept]),
        "new": torch.equal(after[weight][OLD_ROWS:], initial[weight][OLD_ROWS:]),
        "reset": torch.equal(after[weight][reset], initial[weight][reset]),
        "reset sums": after[sums][reset].abs().sum().item(),
        "sums": torch.stack([before[sums][kept], after[sums][kept]], dim=1).tolist(),
        "unread momentum": after[sums][OLD_ROWS:].abs().sum().item(),
    }


@pytest.mark.distributed
def test_reused_rows_begin_anew_and_sums_are_discounted(tmp_path: Path) -> None:
    (found,) = on_ranks(1, reset_and_compare, tmp_path)
    assert found["trained"] > 20
    assert found["kept"], "a row that means what it meant was changed"
    assert found["new"], "a new row is not what it would have been in a large table"
    assert found["reset"], "a reused row does not begin at its initial value"
    assert found["reset sums"] == 0.0 == found["unread momentum"]
    assert any(was for was, _ in found["sums"])
    for was, now in found["sums"]:
        assert now == pytest.approx(0.5 * was, rel=1e-6)


def grow_untrained(
    ranks: Ranks, folder: Path, config: TrainConfig, fill: Callable[[MetaLearner], None]
) -> MetaLearner:
    """A grown model, from a checkpoint of one that `fill` has changed and that took no step."""
    # Of optimizers that keep nothing.
    outer = OuterConfig(dense_optimizer="sgd", sparse_optimizer="sgd")
    config = replace(config, outer=outer)
    saved = Trained(ranks, config, OLD_ROWS)
    fill(saved.learner)
    path = saved.save(folder, 1)
    grown = Trained(ranks, config, NEW_ROWS)
    load_into_grown_tables(path, grown.sharded, grown.optimizer, ranks, outer, RESET)
    return grown.learner


def load_what_training_rows_say(ranks: Ranks, folder: Path) -> dict[str, Tensor]:
    """The statistics of items that a grown model has from a checkpoint of 1, 2, 3, ... in each."""

    def fill(learner: MetaLearner) -> None:
        assert learner.items is not None
        for _, values in learner.items.table_buffers():
            values.copy_(1.0 + torch.arange(2 * OLD_ROWS).reshape(OLD_ROWS, 2))

    config = replace(config_of(4), item_features=ItemFeaturesConfig(columns=("s0", "s1")))
    grown = grow_untrained(ranks, folder, config, fill)
    assert grown.items is not None
    return dict(grown.items.table_buffers())


@pytest.mark.distributed
def test_what_training_rows_said_grows_and_reused_rows_know_nothing(tmp_path: Path) -> None:
    expected = torch.zeros(NEW_ROWS, 2)
    expected[:OLD_ROWS] = 1.0 + torch.arange(2 * OLD_ROWS).reshape(OLD_ROWS, 2)
    without_reused = expected.clone()
    without_reused[RESET["s0"]] = 0.0
    for found in on_ranks(2, load_what_training_rows_say, tmp_path):
        assert torch.equal(found["s1"], expected)
        assert torch.equal(found["s0"], without_reused)


def load_neighbours(ranks: Ranks, folder: Path) -> list[Tensor]:
    """What a grown model has of lists in which each item of a table names the two behind it."""

    def fill(learner: MetaLearner) -> None:
        assert learner.neighbours is not None
        ids_RH, weights_RH2 = learner.neighbours.buffers()
        ids_RH.copy_((torch.arange(OLD_ROWS)[:, None] + torch.tensor([1, 2])) % OLD_ROWS)
        weights_RH2.fill_(0.5)

    config = replace(config_of(4), neighbours=NeighboursConfig("s0", 2))
    grown = grow_untrained(ranks, folder, config, fill)
    assert grown.neighbours is not None
    return list(grown.neighbours.buffers())


@pytest.mark.distributed
def test_neighbours_grow_and_nothing_names_a_reused_row(tmp_path: Path) -> None:
    expected = torch.zeros(NEW_ROWS, 2, dtype=torch.int32)
    expected[:OLD_ROWS] = (torch.arange(OLD_ROWS)[:, None] + torch.tensor([1, 2])) % OLD_ROWS
    reused = torch.from_numpy(RESET["s0"])
    expected[reused] = 0
    expected[torch.isin(expected, reused)] = 0
    for ids_RH, weights_RH2 in on_ranks(2, load_neighbours, tmp_path):
        assert torch.equal(ids_RH, expected)
        assert torch.equal(weights_RH2, 0.5 * (expected != 0)[:, :, None].expand(-1, -1, 2).half())


def test_a_discount_does_nothing_at_1() -> None:
    sums = torch.tensor([0.0, 0.5, 8.0])
    decay_sums(sums, 1.0)
    assert sums.tolist() == [0.0, 0.5, 8.0]
    decay_sums(sums, 0.5)
    assert sums.tolist() == [0.0, 0.25, 4.0]
