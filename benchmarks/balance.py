"""Slices of a step that cost alike, against slices of equally many tasks.

First a simulation: the longest of all ranks' slices over their mean, and over its bound, the larger
of that mean and of the longest task, since no task is split. Then two real ranks, a core and a
thread each, and steps of tasks of lognormal sizes, cut both ways in turns. What a task and a row
cost is fitted to the steps of one rank alone. `share_of_promise` is the part of the steps' time
that the cuts save over the part that the simulation promises for just these steps, by the seconds
that the busier rank's processor worked in each step: other work on a core leaves these alone.
`share_of_promise_elapsed` is by the clock, of the fastest turn of each step: it needs two cores
without other work, which on a busy one falls into the slack of unequal ranks. `over work` is that
time over the mean of both ranks' processor seconds. `lengths_ms` is what it costs a rank to read
the lengths of a step's tasks and to cut by them, `lengths_share` its part of a step."""

import os
import pickle
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing as mp
from _common import available_cores, environment, finish, make_parser, print_table
from _synthetic import random_batch
from scaling import DEMO, FLOAT32, Rank, Turn, compacted, start_on_core

from gmeta.distributed.ranks import barrier, broadcast_value, stop_ranks
from gmeta.feeds.cost_meter import MIN_STEPS, fit_costs
from metaio import open_dataset
from metaio.read.episode_lengths import EpisodeLengths
from metaio.read.episode_order import EpisodeOrder, EpisodeSizes, OrderConfig
from metaio.read.equal_cost import TaskCost, cut_evenly
from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic


class Case(NamedTuple):
    """A row of the simulation's table."""

    sigma: float  # of lognormal sizes around 40 rows; 0: evenly 20 to 40
    most: int  # rows of a task
    ranks: int
    tasks_of_rank: int
    power: int  # 2: rows of a task attend each other

    @property
    def name(self) -> str:
        sizes = f"lognormal, sigma {self.sigma}, to {self.most:,}" if self.sigma else "20 to 40"
        return f"{sizes}, {self.ranks} x {self.tasks_of_rank}, rows{'²' * (self.power > 1)}"


CASES = (
    Case(0.0, 40, 64, 128, 1),
    Case(1.0, 1_000, 64, 128, 1),
    Case(1.0, 1_000, 64, 16, 1),
    Case(1.0, 1_000, 64, 128, 2),
    Case(1.5, 5_000, 64, 128, 1),
    Case(1.5, 5_000, 64, 128, 2),
    Case(1.5, 5_000, 64, 16, 1),
)
SIMULATED_STEPS, QUICK_SIMULATED_STEPS = 50, 20
REAL = Case(1.5, 1_000, 2, 16, 1)
WORKLOAD = replace(DEMO, hidden=(512, 256))
STEPS = 6
TURNS_S, QUICK_TURNS_S = 120.0, 12.0  # as many turns as fit
COUNT, COST = "equal numbers", "equal cost"


def draw_rows(case: Case, rng: np.random.Generator) -> Any:
    """Rows of the tasks of a step."""
    number = case.ranks * case.tasks_of_rank
    if not case.sigma:
        return rng.integers(20, case.most + 1, number)
    return np.clip(np.rint(40 * rng.lognormal(0, case.sigma, number)), 2, case.most)


def even_counts(number: int, ranks: int) -> Any:
    """Where slices of equally many tasks begin, and the end."""
    return np.arange(ranks + 1) * number // ranks


def simulate(case: Case, steps: int) -> dict[str, float]:
    """Means over steps of the longest slice, over the mean and over the bound."""
    rng, found = np.random.default_rng(0), []
    for _ in range(steps):
        costs = draw_rows(case, rng).astype(float) ** case.power
        sums, mean = np.append(0.0, np.cumsum(costs)), costs.sum() / case.ranks
        bound = max(mean, costs.max())
        cuts = even_counts(len(costs), case.ranks), cut_evenly(costs, case.ranks)
        counted, cut = (np.diff(sums[own]).max() for own in cuts)
        found.append((counted / mean, cut / mean, bound / mean, cut / bound))
    names = "count_over_mean", "cost_over_mean", "bound_over_mean", "cost_over_bound"
    return dict(zip(names, np.mean(found, axis=0).tolist(), strict=True))


def step_batches(features: Any, number: int = REAL.ranks * REAL.tasks_of_rank) -> list[Any]:
    """The batch of each real step; half of a task's rows are its support."""
    rng, batches = np.random.default_rng(1), []
    for seed in range(STEPS):
        rows_T = torch.from_numpy(draw_rows(REAL, rng)[:number]).long()
        batches.append(random_batch(features, rows_T // 2, rows_T - rows_T // 2, seed))
    return batches


def work(
    index: int, folder: str, cores: list[int], costs: dict[str, float], turns_s: float
) -> None:
    """One of two ranks: its slices of all steps, cut both ways, in turns."""
    one = Rank(WORKLOAD, start_on_core(cores[index], f"{folder}/two", index, 2), FLOAT32)
    cost = TaskCost(costs["per_task_ms"], costs["per_row_ms"])
    slices: dict[str, list[Any]] = {COUNT: [], COST: []}
    for batch in step_batches(one.features):
        rows_T = batch.row_offsets_T1.diff().numpy()
        cuts = {COUNT: even_counts(len(rows_T), 2), COST: cut_evenly(cost.of_episodes(rows_T), 2)}
        for name, (first, stop) in ((name, own[index:][:2]) for name, own in cuts.items()):
            slices[name].append(compacted(batch.tasks(int(first), int(stop))))
    turns: dict[str, list[Turn]] = {COUNT: [], COST: []}
    began_s, is_over = time.monotonic(), False
    while not is_over:
        # Nobody always comes first.
        for name in sorted(turns, reverse=len(turns[COST]) % 2 == 1):
            turns[name].append(one.run(slices[name]))
        # By one rank's clock: both take as many turns.
        seconds = time.monotonic() - began_s
        is_over = broadcast_value(seconds > turns_s and len(turns[COST]) > 2, one.ranks)
    own_ms = {
        name: [1e-3 * cost.of_batch(own.num_tasks, own.num_rows) for own in of]
        for name, of in slices.items()
    }
    Path(folder, f"{index}.pickle").write_bytes(pickle.dumps((turns, own_ms)))
    barrier(one.ranks)
    # gloo's threads may abort an interpreter that ends in order.
    os._exit(0)


def measure_costs(folder: str, core: int) -> dict[str, float]:
    """Fit the cost of a step, a task and a row to the steps of this process, of many sizes."""
    one = Rank(WORKLOAD, start_on_core(core, f"{folder}/one", 0, 1), FLOAT32)
    batches = [batch for number in (4, 8, 16, 32) for batch in step_batches(one.features, number)]
    turns = [one.run(batches) for _ in range(4)][1:]
    sums = np.zeros((4, 4))
    for batch, seconds in zip(batches, zip(*(t.cpu for t in turns), strict=True), strict=True):
        of_step = np.array([1.0, batch.num_tasks, batch.num_rows, 1000 * min(seconds)])
        sums += np.outer(of_step, of_step)
    # A fit wants more steps than these, which are quieter than a job's.
    costs = fit_costs(sums * MIN_STEPS / len(batches))
    assert costs is not None, "steps of many sizes tell what they cost"
    stop_ranks()
    return costs


def measure_ranks(turns_s: float) -> dict[str, Any]:
    """Both ways to cut, on two real ranks."""
    cores = available_cores()[:2]
    with tempfile.TemporaryDirectory() as folder:
        costs = measure_costs(folder, cores[0])
        mp.spawn(work, (folder, cores, costs, turns_s), nprocs=2)
        ranks = [pickle.loads(Path(folder, f"{at}.pickle").read_bytes()) for at in range(2)]
        lengths_ms = measure_lengths_ms(folder)
    step_s, cpu_s, promised_s, over_work = {}, {}, {}, {}
    for name in (COUNT, COST):
        turns = [of_rank[name][1:] for of_rank, _ in ranks]  # the first warms up
        # [rank, turn, step]: all wait for the slower rank, then the fastest turn of each step.
        step_s[name] = np.array([[t.seconds for t in of] for of in turns]).max(0).min(0).mean()
        own_s = np.array([[t.cpu for t in of] for of in turns]).min(1)
        cpu_s[name] = own_s.max(0).mean()
        over_work[name] = step_s[name] / own_s.mean()
        promised_s[name] = np.array([own_ms[name] for _, own_ms in ranks]).max(0).mean()
    saved, saved_cpu, promised = (1 - s[COST] / s[COUNT] for s in (step_s, cpu_s, promised_s))
    return {
        "share_of_promise": saved_cpu / promised,
        "share_of_promise_elapsed": saved / promised,
        "promised": promised,
        "cpu_ms": {name: 1000 * seconds for name, seconds in cpu_s.items()},
        "step_ms": {name: 1000 * seconds for name, seconds in step_s.items()},
        "over_work": over_work,
        "costs": costs,
        "turns": len(ranks[0][0][COST]) - 1,
        "lengths_ms": lengths_ms,
        "lengths_share": lengths_ms / (1000 * step_s[COST]),
    }


def measure_lengths_ms(folder: str) -> float:
    """What it costs one of two ranks to read lengths and to cut by them, a step of an epoch."""
    prepare_synthetic(f"{folder}/data", SyntheticConfig(num_tasks=2_000, num_items=500))
    config = OrderConfig(REAL.ranks * REAL.tasks_of_rank)

    def plan_s(cost: TaskCost | None) -> float:
        # Opened anew: nothing is held or mapped.
        dataset = open_dataset(f"{folder}/data")
        counts = dataset.split("train").blocks.num_episodes_Z
        lengths = EpisodeLengths(dataset, "train")
        began_s = time.perf_counter()
        order = EpisodeOrder(counts, config, sizes=EpisodeSizes(lengths.of_blocks, cost))
        for step in range(order.num_steps):
            order.step(step, 0, 2)
        return (time.perf_counter() - began_s) / order.num_steps

    times = [(plan_s(None), plan_s(TaskCost(1.0, 1.0))) for _ in range(7)]
    counted_s, cut_s = (min(column) for column in zip(*times, strict=True))
    return 1000 * (cut_s - counted_s)


def main() -> None:
    options = make_parser(__doc__).parse_args()
    if len(available_cores()) < 2:
        raise SystemExit("balance needs 2 cores, this process has 1: two ranks would take turns")
    steps = QUICK_SIMULATED_STEPS if options.quick else SIMULATED_STEPS
    simulated = {case.name: simulate(case, steps) for case in CASES}
    print_table(
        ["longest slice over the mean", COUNT, COST, "bound", "over bound"],
        [[name, *(f"{x:.3f}" for x in of.values())] for name, of in simulated.items()],
    )
    found = measure_ranks(QUICK_TURNS_S if options.quick else TURNS_S)
    step_ms, over_work = found["step_ms"], found["over_work"]
    lines = [[n, f"{step_ms[n]:.1f}", f"{over_work[n]:.2f}"] for n in (COUNT, COST)]
    print_table(["two ranks", "step ms", "over work"], lines)
    finish(
        "balance",
        {
            "longest_over_bound": max(of["cost_over_bound"] for of in simulated.values()),
            **found,
            "simulated": simulated,
            "environment": environment(("torch", "torchrec", "numpy")),
        },
    )


if __name__ == "__main__":
    main()
