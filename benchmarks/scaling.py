"""Two ranks on two cores against one rank on one core: the same steps, shared between them.

Strong scaling of the whole training step from a batch in memory: arranging, exchange, inner loop,
backward, AllReduce, updates. Every rank has one thread and a core of its own. All processes live at
once and take turns, so a slow minute falls on both, and the losses must be equal. Two cores are
seldom equally fast, least of all in a virtual machine, and two ranks wait for the slower one: one
rank is timed on either core, and the mean of both is what two ranks are compared with.

`apart` is the ceiling of this machine in this minute: two processes that never talk, each with half
of every batch, at once; `of apart` is what two ranks that talk keep of it. Both, and the speed-up,
are medians over the rounds. Other work on a core only ever slows a step, and two ranks are slowed
by work on either: `fastest` adds up the fastest run of each step, on one rank and on two, for the
speed-up and the ceiling (`apart`). `CPU` compares the processor's own seconds, of one rank and of
the busier of two: the speed-up that is left if no rank waits for another or for its core.

The headline is the slowest model at 256 tasks a step: each of two ranks then has the 128 that one
rank alone is timed with elsewhere, and production steps are larger still. At 128 tasks a step,
which leaves a rank 64, the calls that a step makes whatever it holds weigh twice as much. They
weigh less where a row takes more arithmetic: `wide` has layers 832-512-256-1 in place of
832-256-128-1.

All that is strong scaling, of equal steps. `weak` keeps the work of a rank instead, as G-Meta's
experiments do (arXiv 2401.04338): samples/s of two ranks against those of one rank with half of
every batch, alone on either core."""

import multiprocessing.synchronize
import os
import pickle
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import available_cores, environment, finish, make_parser, print_table
from _synthetic import even_sizes, random_batch, single_id_features

from gmeta.adaptation.algorithms.algorithm import TableSizes
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.sharding import ShardingConfig
from gmeta.config.train_config import TrainConfig
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import barrier, start_ranks
from gmeta.distributed.sharding import shard_learner
from gmeta.distributed.steps import batch_without_tasks, iterate_steps
from gmeta.learner import MetaLearner
from gmeta_models import InputSizes, ModelConfig, build_model

STEPS = 4  # of a turn
FLOAT32, BFLOAT16 = "float32", "bfloat16"  # on the wire
ALONE = ("core 0", "core 1", "half on 0", "half on 1")
# Losses are means over so many tasks in float32.
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Workload:
    """Shapes of a step: one table a feature, so many support and query rows a task."""

    name: str
    tasks: int
    rows_of_tables: tuple[int, ...]
    num_dense: int
    width: int
    hidden: tuple[int, ...]
    bottom: tuple[int, ...]
    algorithm: str
    adapt_embeddings: bool
    rows: tuple[int, int]


DEMO_TABLES = (3_001, 25, 201, 11, 9, 51, 7, 25)
LARGE_TABLES = (100_000,) * 26
# examples/demo.toml on the synthetic recipe, without its one multi-id feature.
DEMO = Workload("demo", 128, DEMO_TABLES, 4, 16, (128, 64), (64,), "maml", True, (20, 10))
LARGE = Workload("26x32", 128, LARGE_TABLES, 0, 32, (256, 128), (), "fomaml", False, (10, 10))
LARGE_MAML = replace(LARGE, name="26x32 maml", algorithm="maml")
# The larger of the two MLPs of maml_step.py.
WIDE = replace(LARGE, name="26x32 wide", hidden=(512, 256))
WIDE_MAML = replace(WIDE, name="26x32 wide maml", algorithm="maml")
WORKLOADS = (
    DEMO,
    LARGE,
    replace(DEMO, tasks=256),
    replace(LARGE, tasks=256),
    replace(WIDE_MAML, tasks=256),
    WIDE_MAML,
    replace(LARGE_MAML, tasks=256),
    replace(WIDE, tasks=256),
    replace(DEMO, tasks=512),
    replace(LARGE, tasks=512),
)
QUICK_WORKLOADS = 5


class Rank:
    """One learner of one process group, and the share of the steps that is its own."""

    def __init__(self, work: Workload, ranks: Any, wire_dtype: str, **sharding: int) -> None:
        self.ranks = ranks
        self.tasks = work.tasks
        num_features = len(work.rows_of_tables)
        self.features = single_id_features(num_features, work.rows_of_tables, work.num_dense)
        config = TrainConfig(
            model=ModelConfig(
                name="dlrm",
                embedding_dim=work.width,
                hidden=work.hidden,
                options={"bottom": work.bottom, "interaction": "cat"},
            ),
            algorithm=AlgorithmConfig(name=work.algorithm, adapt_embeddings=work.adapt_embeddings),
            sharding=ShardingConfig(wire_dtype=wire_dtype, **sharding),
        )
        # All ranks and variants begin with the same weights: their losses are compared.
        torch.manual_seed(0)
        model = build_model(config.model, InputSizes(num_features, 0, work.num_dense))
        tables = TableSizes(num_features, work.width)
        self.learner = MetaLearner(model, config.algorithm, "bce", tables)
        self.sharded = shard_learner(self.learner, self.features, config, ranks)
        self.optimizer = build_optimizer(self.sharded, config.outer)
        support, query = (even_sizes(work.tasks, rows) for rows in work.rows)
        self.batches = [random_batch(self.features, support, query, seed) for seed in range(STEPS)]

    def shares(self, part: int, parts: int) -> list[Any]:
        """Every step's batch, or one of so many parts of its tasks."""
        share = slice(self.tasks * part // parts, self.tasks * (part + 1) // parts)
        return [compacted(batch.tasks(share.start, share.stop)) for batch in self.batches]

    def run(self, shares: list[Any]) -> "Turn":
        """Take every step once."""
        losses = []
        barrier(self.ranks)
        times, cpu = [time.perf_counter()], [time.process_time()]
        steps = iterate_steps(
            map(self.learner.collate, shares),
            self.learner.collate(batch_without_tasks(self.features)),
            self.ranks,
            sharded=self.sharded,
        )
        for episodes, totals in steps:
            loss = self.sharded(episodes, self.ranks.world_size / totals.num_terms)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            # No .item() here: the step must not wait for the value.
            losses.append(loss.detach())
            times.append(time.perf_counter())
            cpu.append(time.process_time())
        barrier(self.ranks)
        # What is left after the last step is part of it.
        times[-1], cpu[-1] = time.perf_counter(), time.process_time()
        return Turn(np.diff(times).tolist(), np.diff(cpu).tolist(), [x.item() for x in losses])


class Turn(NamedTuple):
    """What a run of all steps found."""

    seconds: list[float]  # of each step
    cpu: list[float]  # seconds that the processor worked in each
    losses: list[float]

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return statistics.mean(self.seconds)

    @property
    def cpu_s(self) -> float:
        """Seconds of the processor, a step."""
        return statistics.mean(self.cpu)


def compacted(batch: Any) -> Any:
    """The batch with the ids that its own rows use, as a reader hands it over."""
    used, positions = torch.unique(batch.positions_NF, return_inverse=True)
    table_U = torch.repeat_interleave(
        torch.arange(len(batch.unique_lengths_B)), batch.unique_lengths_B
    )
    return replace(
        batch,
        unique_ids_U=batch.unique_ids_U[used.long()],
        unique_lengths_B=torch.bincount(
            table_U[used.long()], minlength=len(batch.unique_lengths_B)
        ),
        positions_NF=positions.to(torch.int32),
    )


def start_on_core(core: int, store: str, rank: int, world_size: int) -> Any:
    """A rank with one thread and this core, of the group that meets at the file `store`."""
    # Each thread has an affinity of its own: also those that the imports above have started.
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    return start_ranks("cpu", 300, dist.FileStore(store, world_size))


def work_in_turns(
    index: int,
    folder: str,
    works: tuple[Workload, ...],
    rounds: int,
    variants: tuple[str, ...],
    turn: multiprocessing.synchronize.Barrier,
) -> None:
    """Processes 0 and 1 are single ranks on a core each, 2 and 3 the two of a group."""
    alone, part = index < 2, index % 2
    world_size, rank = (1, 0) if alone else (2, part)
    group = os.path.join(folder, f"store-of-{index}" if alone else "store-of-two")
    ranks = start_on_core(available_cores()[part], group, rank, world_size)
    found: list[Turns] = []
    for work in works:
        mine: dict[str, tuple[Rank, list[Any]]] = {}
        if alone:
            one = Rank(work, ranks, FLOAT32)
            half = one, one.shares(part, 2)
            whole = one, one.shares(0, 1)
            mine = {f"core {part}": whole, f"half on {part}": half, "apart": half}
        else:
            for variant in variants:
                one = Rank(work, ranks, variant)
                mine[variant] = one, one.shares(part, 2)
        found.append(take_turns(mine, (*ALONE, "apart", *variants), rounds, turn))
    Path(folder, f"{index}.pickle").write_bytes(pickle.dumps(found))
    turn.wait()
    # gloo's threads may abort an interpreter that ends in order.
    os._exit(0)


Turns = dict[str, list[Turn]]


def take_turns(
    mine: dict[str, tuple[Rank, list[Any]]],
    turns: tuple[str, ...],
    rounds: int,
    turn: multiprocessing.synchronize.Barrier,
) -> Turns:
    """What `Rank.run` found in this process's own turns, round by round; the first warms up."""
    found: Turns = {name: [] for name in mine}
    # All processes come to every turn, so that the others are idle while one is timed.
    for _ in range(rounds + 1):
        for name in turns:
            turn.wait()
            if name in mine:
                one, shares = mine[name]
                found[name].append(one.run(shares))
    return found


def measure(works: tuple[Workload, ...], rounds: int, variants: tuple[str, ...]) -> dict[str, Any]:
    """Milliseconds and ratios of every workload and variant."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work_in_turns, (folder, works, rounds, variants, context.Barrier(4)), nprocs=4)
        processes = [
            pickle.loads(Path(folder, f"{index}.pickle").read_bytes()) for index in range(4)
        ]
    return {
        f"{work.name}, {work.tasks} tasks, {variant}": compared(of_processes, variant)
        for work, *of_processes in zip(works, *processes, strict=True)
        for variant in variants
    }


def compared(processes: list[Turns], variant: str) -> dict[str, Any]:
    """Two ranks against one, from what each of the four processes found."""
    ones = [processes[core][f"core {core}"] for core in range(2)]
    halves = [processes[core][f"half on {core}"] for core in range(2)]
    aparts, pair = [one["apart"] for one in processes[:2]], [one[variant] for one in processes[2:]]
    # Later losses follow other batches, which move the models too.
    losses = torch.tensor([one[0].losses for one in pair]).mean(dim=0)
    difference = (losses - torch.tensor(ones[0][0].losses)).abs().max().item()

    def of_rounds(turns: list[list[Turn]], which: str, several: Any) -> list[float]:
        """One figure a round, of the two processes; without the round that warmed up."""
        rounds = [[getattr(one, which) for one in round_] for round_ in zip(*turns, strict=True)]
        return [several(round_) for round_ in rounds[1:]]

    def fastest_s(turns: list[list[Turn]]) -> float:
        """A step, of the processes that take it together; without the round that warmed up."""
        rounds = [[one.seconds for one in round_] for round_ in zip(*turns, strict=True)][1:]
        slower = [[max(of_step) for of_step in zip(*round_, strict=True)] for round_ in rounds]
        return sum(min(of_step) for of_step in zip(*slower, strict=True)) / STEPS

    def median_ratio(above: list[float], below: list[float]) -> float:
        """Round by round, so that both sides of a ratio are of the same minute."""
        return statistics.median(a / b for a, b in zip(above, below, strict=True))

    one_s, two_s = of_rounds(ones, "step_s", statistics.mean), of_rounds(pair, "step_s", max)
    one_cpu_s, two_cpu_s = of_rounds(ones, "cpu_s", statistics.mean), of_rounds(pair, "cpu_s", max)
    apart_s = of_rounds(aparts, "step_s", max)
    half_s = of_rounds(halves, "step_s", statistics.mean)
    fastest_one_s = statistics.mean(fastest_s([one]) for one in ones)
    return {
        "one_rank_ms": 1e3 * statistics.median(one_s),
        "two_ranks_ms": 1e3 * statistics.median(two_s),
        "speedup": median_ratio(one_s, two_s),
        "speedup_fastest": fastest_one_s / fastest_s(pair),
        "speedup_fastest_apart": fastest_one_s / fastest_s(aparts),
        "speedup_apart": median_ratio(one_s, apart_s),
        "share_of_apart": median_ratio(apart_s, two_s),
        "speedup_if_none_waits": median_ratio(one_cpu_s, two_cpu_s),
        # Two ranks train twice the rows of the half that one rank had.
        "speedup_weak": 2 * median_ratio(half_s, two_s),
        "loss_difference": difference,
        "losses_equal": variant == BFLOAT16 or difference <= LOSS_TOLERANCE,
    }


def main() -> None:
    options = make_parser(__doc__).parse_args()
    rounds = options.rounds or (3 if options.quick else 21)
    if len(available_cores()) < 2:
        raise SystemExit("scaling needs 2 cores, this process has 1: nothing to compare")
    works = WORKLOADS[:QUICK_WORKLOADS] if options.quick else WORKLOADS
    variants = (FLOAT32,) if options.quick else (FLOAT32, BFLOAT16)
    found = measure(works, rounds, variants)
    print("one thread and one core a rank")
    lines = [
        [
            name,
            f"{of['one_rank_ms']:.1f}",
            f"{of['two_ranks_ms']:.1f}",
            f"{of['speedup']:.2f}",
            f"{of['speedup_fastest']:.2f} ({of['speedup_fastest_apart']:.2f})",
            f"{of['speedup_apart']:.2f}",
            f"{of['share_of_apart']:.2f}",
            f"{of['speedup_if_none_waits']:.2f}",
            f"{of['speedup_weak']:.2f}",
            f"{of['loss_difference']:.1e}",
        ]
        for name, of in found.items()
    ]
    header = [
        "workload",
        "1 rank ms",
        "2 ranks ms",
        "speed-up",
        "fastest (apart)",
        "apart",
        "of apart",
    ]
    print_table([*header, "CPU", "weak", "loss diff."], lines)

    def slowest(tasks: int, what: str = "speedup", models: str = "") -> float:
        """The least figure at a size, of all models or of those of this name."""
        ending = f"{tasks} tasks, {FLOAT32}"
        of_size = {name: of for name, of in found.items() if name.endswith(ending)}
        return min(of[what] for name, of in of_size.items() if name.startswith(models))

    finish(
        "scaling",
        {
            "speedup_2_ranks": slowest(256),
            "speedup_2_ranks_wide": slowest(256, models=WIDE.name),
            "speedup_2_ranks_at_128": slowest(128),
            "speedup_fastest": slowest(256, "speedup_fastest"),
            "speedup_fastest_apart": slowest(256, "speedup_fastest_apart"),
            "speedup_apart": slowest(256, "speedup_apart"),
            "speedup_weak": slowest(256, "speedup_weak"),
            "share_of_apart": slowest(256, "share_of_apart"),
            "losses_equal": all(of["losses_equal"] for of in found.values()),
            "by_workload": found,
            "environment": environment(("torch", "torchrec")),
        },
    )


if __name__ == "__main__":
    main()
