"""Groups that take steps by themselves end where a plain simulation of their averages does, hold
the same model after `sync`, and go on from a checkpoint that one of them wrote."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.sharding import ShardingConfig
from gmeta.config.train_config import OuterConfig, RunConfig, TrainConfig
from gmeta.distributed.optim.optimizers import OuterOptimizer, build_optimizer
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.distributed.sharding import shard_learner
from gmeta.runs.build import build_learner
from gmeta.runs.checkpoints.checkpoint_writer import CheckpointWriter
from gmeta.runs.checkpoints.loader import collect_state, load_checkpoint
from gmeta.runs.run_progress import RunProgress
from tests.distributed.groups.test_exact import MODEL, in_float64, joined, parts_of
from tests.distributed.harness import on_ranks, steps_of
from tests.distributed.test_equals_reference import tasks_of_step
from tests.support import reference

WINDOWS, EVERY, MOMENTUM = 3, 2, 0.5
STEPS = WINDOWS * EVERY
# The tables' optimizer, and whether averages come a window late.
CASES = {
    "sgd": ("sgd", False),
    "adagrad": ("adagrad", False),
    "rowwise adagrad, late": ("rowwise_adagrad", True),
    "adam, late": ("adam", True),
    "rowwise adam": ("partial_rowwise_adam", False),
    "sgd, late": ("sgd", True),
}
FEATURES, TASKS = tasks_of_step("none, sgd")
# Of each of two groups, the tasks of each step.
SHARES = [[TASKS[group][step % 3][:1] for step in range(STEPS)] for group in (0, 1)]
State = dict[str, Tensor]


def without_epsilon() -> Any:
    """Then the scale of a gradient changes no step of an adaptive optimizer."""
    return mock.patch("gmeta.distributed.unsharded.ADAGRAD_EPSILON", 1e-20)


def config_of(case: str, groups: int, momentum: float = MOMENTUM) -> TrainConfig:
    sparse, overlaps = CASES[case]
    # Of SGD the rows of a group alone, which the simulation trains, have half of the rate: their
    # gradients are parts of the mean over both groups.
    rate = 0.05 if sparse == "sgd" and groups == 1 else 0.1
    sharding = ShardingConfig(
        groups=groups, sync_every=EVERY, overlap_sync=overlaps, outer_momentum=momentum
    )
    return TrainConfig(
        model=MODEL,
        outer=OuterConfig(dense_lr=0.01, sparse_lr=rate, sparse_optimizer=sparse),
        run=RunConfig(seed=11),
        sharding=sharding if groups > 1 else ShardingConfig(),
    )


def fresh(ranks: Ranks, config: TrainConfig) -> tuple[DistributedLearner, OuterOptimizer]:
    torch.manual_seed(3)
    learner = build_learner(FEATURES, config.model, AlgorithmConfig(inner_lr=0.1), "bce")
    sharded = shard_learner(learner, FEATURES, config, ranks)
    return sharded, build_optimizer(sharded, config.outer)


def take_steps(
    ranks: Ranks, sharded: DistributedLearner, optimizer: OuterOptimizer, tasks: list[Any],
    first: int = 0,
) -> None:  # fmt: skip
    """Take a step on each list of tasks, which are those of this rank."""
    learner = sharded.local.learner
    batches = [reference.batch_of(of_step, FEATURES) for of_step in tasks]
    steps = steps_of(batches, learner.collate, FEATURES, ranks, sharded=sharded)
    for step, (episodes, _) in enumerate(steps, first):
        # Of both groups, also where the simulation has but one of them at hand.
        terms = sum(len(task.label) - task.num_support for of in SHARES for task in of[step])
        optimizer.begin_step(step, STEPS)
        share = 2 if ranks.world_size == 1 else ranks.world_size
        sharded(episodes, share / terms).backward()
        optimizer.step()


def train(ranks: Ranks, folder: Path) -> dict[str, Any]:
    results = {}
    with in_float64(), without_epsilon():
        for case in CASES:
            sharded, optimizer = fresh(ranks, config := config_of(case, groups=2))
            in_group = ranks.world_size // 2
            # The first rank of a group has its task, the others take part without.
            group, place = divmod(ranks.rank, in_group)
            tasks = SHARES[group] if place == 0 else [[] for _ in range(STEPS)]
            take_steps(ranks, sharded, optimizer, tasks)
            optimizer.sync()
            results[case] = {"state": dict(parts_of(collect_state(sharded, optimizer)))}
            with CheckpointWriter(folder / case, sharded, optimizer, config, ranks) as writer:
                writer.save(RunProgress(step=STEPS))
    return results


def simulate(ranks: Ranks) -> dict[str, State]:
    """What is to come out, by two learners in one process, whose averages are written out."""
    with in_float64(), without_epsilon():
        return {case: simulated(ranks, case) for case in CASES}


def simulated(ranks: Ranks, case: str) -> State:
    sparse, is_late = CASES[case]
    pairs = [fresh(ranks, config_of(case, groups=1)) for _ in range(2)]
    common: State = {}
    momentum: State = {}
    waiting: list[State] = []
    for window in range(WINDOWS):
        steps = slice(window * EVERY, (window + 1) * EVERY)
        moved = []
        for pair, tasks in zip(pairs, SHARES, strict=True):
            before = state_of(*pair)
            common = common or before
            take_steps(ranks, *pair, tasks[steps], steps.start)
            moved.append({
                name: value - before.get(name, torch.zeros_like(value))
                for name, value in state_of(*pair).items()
            })  # fmt: skip
        if is_late and waiting:
            common = averaged(common, waiting, momentum, sparse, windows_late=1)
            for pair, of_group in zip(pairs, moved, strict=True):
                put(*pair, {name: common[name] + value for name, value in of_group.items()})
        if not is_late:
            common = averaged(common, moved, momentum, sparse, windows_late=0)
            for pair in pairs:
                put(*pair, common)
        waiting = moved
    if is_late:
        common = averaged(common, waiting, momentum, sparse, windows_late=0)
    return common | {
        f"optimizer.state.{name.removeprefix('model.')}.outer_momentum": value
        for name, value in momentum.items()
    }


def averaged(
    common: State, moved: list[State], momentum: State, sparse: str, windows_late: int
) -> State:
    found = {}
    for name, first in moved[0].items():
        both = torch.stack([first, moved[1][name]])
        if ".tables." in name:
            place = name.removeprefix("model.").removeprefix("optimizer.state.")
            table = f"model.{place.partition('.weight')[0]}.weight"
            touched = torch.stack([one[table].any(dim=1) for one in moved]).sum(dim=0).clamp(min=1)
            n = touched.view(-1, *[1] * (first.dim() - 1))
            total = both.sum(dim=0)
            if "adam" in sparse:
                move = total / (n.sqrt() if name == table else n)
            elif name == table and "adagrad" in sparse:
                squares = f"optimizer.state.{place.partition('.weight')[0]}.weight."
                (squares,) = (one for one in moved[0] if one.startswith(squares))
                shape = (len(total), -1)
                before = common.get(squares, torch.zeros_like(moved[0][squares])).view(shape)
                added = (moved[0][squares] + moved[1][squares]).view(shape)
                seen, all_squares = before + added / n, before + added
                move = total * (seen / all_squares.clamp(min=1e-30)).sqrt()
            else:
                move = total
        else:
            move = both.mean(dim=0)
        found[name] = common.get(name, torch.zeros_like(first)) + move
    layers = [name for name in moved[0] if name.startswith("model.learner.")]
    means = {name: (moved[0][name] + moved[1][name]) / 2 for name in layers}
    pushed = {name: MOMENTUM * momentum.get(name, 0.0) + means[name] for name in layers}
    length = norm_of(pushed)
    shortened = min(1.0, 2.0 * norm_of(means) / length)
    for name in layers:
        momentum[name] = pushed[name] * shortened
        found[name] += (momentum[name] - means[name]) / (1 + windows_late)
    return found


def norm_of(values: State) -> float:
    return float(torch.cat([value.flatten() for value in values.values()]).norm())


def state_of(sharded: DistributedLearner, optimizer: OuterOptimizer) -> State:
    parts = {"state": dict(parts_of(collect_state(sharded, optimizer)))}
    return {name: value for name, value in joined([parts]).items() if not name.endswith(".step")}


def put(sharded: DistributedLearner, optimizer: OuterOptimizer, values: State) -> None:
    for name, value in parts_of(collect_state(sharded, optimizer), live=True):
        if name in values:
            target = value[0][1] if isinstance(value, list) else value
            target.copy_(values[name])


def load(ranks: Ranks, folder: Path, groups: int) -> dict[str, Any]:
    results = {}
    with in_float64():
        for case in CASES:
            momentum = MOMENTUM if groups == 2 else 0.0
            config = config_of(case, groups, momentum)
            sharded, optimizer = fresh(ranks, config)
            load_checkpoint(folder / case / f"step-{STEPS:08d}", sharded, optimizer, ranks)
            results[case] = {"state": dict(parts_of(collect_state(sharded, optimizer)))}
    return results


@pytest.mark.distributed
def test_groups_average_what_they_moved_and_others_go_on_from_it(tmp_path: Path) -> None:
    (expected,) = on_ranks(1, simulate)
    for world_size in (2, 4):
        folder = tmp_path / str(world_size)
        results, size = on_ranks(world_size, train, folder), world_size // 2
        for case in CASES:
            of_ranks = [one[case] for one in results]
            copies = [joined(of_ranks[:size]), joined(of_ranks[size:])]
            for name, value in copies[0].items():
                assert torch.equal(value, copies[1][name]), name
                if name.endswith(".step"):
                    continue
                # The simulation's gradients of tables are twice as large: so is what is kept of
                # them, though not the steps.
                scale = 1.0
                if ".state.tables." in name:
                    is_mean = "adam" in case and name.endswith(("exp_avg", "momentum1"))
                    scale = 2.0 if is_mean else 4.0
                expect = expected[case][name]
                torch.testing.assert_close(value * scale, expect, rtol=1e-9, atol=1e-10)
    for world_size, groups in ((1, 1), (4, 1), (2, 2), (4, 2)):
        loaded = on_ranks(world_size, load, tmp_path / "4", groups)
        for case in CASES:
            size = world_size // groups
            for first in range(0, world_size, size):
                found = joined([one[case] for one in loaded[first : first + size]])
                written = joined([one[case] for one in results[:2]])
                if groups == 1:
                    written = {k: v for k, v in written.items() if "outer_momentum" not in k}
                assert found.keys() == written.keys()
                assert all(torch.equal(found[name], written[name]) for name in written)
