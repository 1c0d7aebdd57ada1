"""Two ranks on two cores against one rank on one core: the same steps, shared between them.

Strong scaling of the whole training step from a batch in memory: arranging, exchange, inner loop,
backward, AllReduce, updates. Every rank has one thread and a core of its own. All processes live at
once and take turns, so a slow minute falls on both. The losses must be equal.

`CPU` compares the processor's own seconds, of one rank and of the busier of two: the speed-up that
is left if no rank waits for another or for its core. `half` does so for one rank with half of each
batch: what two ranks would reach if talking cost nothing.
"""

import multiprocessing.synchronize
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from _common import available_cores, environment, finish, make_parser, print_table, spread_of
from _synthetic import even_sizes, random_batch, single_id_features

TASKS, STEPS = 128, 6
TRANSPORTS = ("tcp", "shared memory")  # sharding.shared_memory = false, true
# Losses are means over 128 tasks in float32.
LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Workload:
    """Shapes of a step: one table a feature, so many support and query rows a task."""

    name: str
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
WORKLOADS = (
    # examples/demo.toml on the synthetic recipe, without its one multi-id feature.
    Workload("demo", DEMO_TABLES, 4, 16, (128, 64), (64,), "maml", True, (20, 10)),
    Workload("26x32", LARGE_TABLES, 0, 32, (256, 128), (), "fomaml", False, (10, 10)),
    Workload("26x32 maml", LARGE_TABLES, 0, 32, (256, 128), (), "maml", False, (10, 10)),
)


class Rank:
    """One learner of one process group, and the share of the steps that is its own."""

    def __init__(self, work: Workload, ranks: Any, wire_dtype: str) -> None:
        from gmeta.adaptation.algorithm import TableSizes
        from gmeta.adaptation.config import AlgorithmConfig
        from gmeta.config import TrainConfig
        from gmeta.learner import MetaLearner
        from gmeta.optimizers import build_optimizer
        from gmeta.parallel import shard_learner
        from gmeta.table_sharding import ShardingConfig
        from models import InputSizes, ModelConfig, build_model

        self.ranks = ranks
        num_features = len(work.rows_of_tables)
        self.features = single_id_features(num_features, work.rows_of_tables, work.num_dense)
        config = TrainConfig(
            model=ModelConfig(
                name="dlrm",
                embedding_dim=work.width,
                hidden=work.hidden,
                bottom=work.bottom,
                interaction="cat",
            ),
            algorithm=AlgorithmConfig(name=work.algorithm, adapt_embeddings=work.adapt_embeddings),
            sharding=ShardingConfig(wire_dtype=wire_dtype),
        )
        torch.manual_seed(0)
        model = build_model(config.model, InputSizes(num_features, 0, work.num_dense))
        tables = TableSizes(num_features, work.width)
        self.learner = MetaLearner(model, config.algorithm, "bce", tables)
        self.sharded = shard_learner(self.learner, self.features, config, ranks)
        self.optimizer = build_optimizer(self.sharded, config.outer)
        support, query = (even_sizes(TASKS, rows) for rows in work.rows)
        self.batches = [random_batch(self.features, support, query, seed) for seed in range(STEPS)]

    def shares(self, part: int, parts: int) -> list[Any]:
        """Every step's batch, or one of so many parts of its tasks."""
        share = slice(TASKS * part // parts, TASKS * (part + 1) // parts)
        return [compacted(batch.tasks(share.start, share.stop)) for batch in self.batches]

    def run(self, shares: list[Any]) -> tuple[float, float, list[float]]:
        """Seconds a step, seconds that the processor worked for it, and the losses."""
        from gmeta.parallel import barrier, in_step

        losses = []
        barrier(self.ranks)
        start, cpu_start = time.perf_counter(), time.process_time()
        steps = in_step(
            iter(shares), self.learner.arrange, self.features, self.ranks, sharded=self.sharded
        )
        for episodes, totals in steps:
            loss = self.sharded(episodes, self.ranks.world_size / totals.num_terms)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        barrier(self.ranks)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        return seconds / STEPS, cpu_s / STEPS, [loss.item() for loss in losses]


def compacted(batch: Any) -> Any:
    """The batch with the ids that its own rows use, as a reader hands it over."""
    from dataclasses import replace

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


def work_in_turns(
    index: int,
    folder: str,
    work: Workload,
    rounds: int,
    wire_dtype: str,
    transport: str,
    turn: multiprocessing.synchronize.Barrier,
) -> None:
    """Process 0 is the only rank of a group, 1 and 2 are the two of another."""
    alone = index == 0
    world_size, rank = (1, 0) if alone else (2, index - 1)
    cores = available_cores()
    os.sched_setaffinity(0, {cores[0] if alone else cores[rank]})
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    import torch.distributed as dist

    from gmeta.parallel import start_ranks

    store = dist.FileStore(os.path.join(folder, f"store-of-{world_size}"), world_size)
    ranks = start_ranks("cpu", 300, store, shared_memory=transport == "shared memory")
    one = Rank(work, ranks, wire_dtype)
    share = one.shares(rank, world_size)
    half = one.shares(0, 2)
    found: dict[str, list[float]] = {"alone": [], "pair": [], "half": []}
    cpu: dict[str, list[float]] = {who: [] for who in found}
    for number in range(rounds + 1):  # the first warms up
        for who in found:
            turn.wait()
            if (who != "pair") != alone:
                continue
            seconds, cpu_s, losses = one.run(half if who == "half" else share)
            if number:
                found[who].append(seconds)
                cpu[who].append(cpu_s)
            elif who != "half":
                first_losses = losses  # later ones follow half batches, which move the model too
    torch.save({**found, "cpu": cpu, "losses": first_losses}, os.path.join(folder, f"{index}.pt"))
    turn.wait()
    os._exit(0)


def measure(work: Workload, rounds: int, wire_dtype: str, transport: str) -> dict[str, Any]:
    """Median milliseconds and ratios of a workload."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, work, rounds, wire_dtype, transport, context.Barrier(3))
        mp.spawn(work_in_turns, arguments, nprocs=3)
        alone, *pair = (torch.load(Path(folder) / f"{index}.pt") for index in range(3))
    losses = torch.tensor([one["losses"] for one in pair]).mean(dim=0)
    difference = (losses - torch.tensor(alone["losses"])).abs().max().item()
    one_ms, two_ms = (
        1e3 * spread_of(values).median for values in (alone["alone"], pair[0]["pair"])
    )
    one_cpu_s = spread_of(alone["cpu"]["alone"]).median
    two_cpu_s = max(spread_of(one["cpu"]["pair"]).median for one in pair)
    return {
        "one_rank_ms": one_ms,
        "two_ranks_ms": two_ms,
        "speedup": one_ms / two_ms,
        "speedup_if_none_waits": one_cpu_s / two_cpu_s,
        "half": one_cpu_s / spread_of(alone["cpu"]["half"]).median,
        "loss_difference": difference,
        "losses_equal": wire_dtype != "float32" or difference <= LOSS_TOLERANCE,
    }


def main() -> None:
    options = make_parser(__doc__).parse_args()
    rounds = options.rounds or (4 if options.quick else 11)
    if len(available_cores()) < 2:
        raise SystemExit("scaling needs 2 cores, this process has 1: nothing to compare")
    found = {
        f"{work.name}, {transport}": measure(work, rounds, "float32", transport)
        for transport in TRANSPORTS
        for work in WORKLOADS[: 2 if options.quick else 3]
    }
    if not options.quick:
        for work in WORKLOADS[:2]:
            found[f"{work.name}, tcp, bfloat16"] = measure(work, rounds, "bfloat16", "tcp")
    print(f"{TASKS} tasks a step, one thread and one core a rank")
    lines = [
        [
            name,
            f"{of['one_rank_ms']:.1f}",
            f"{of['two_ranks_ms']:.1f}",
            f"{of['speedup']:.2f}",
            f"{of['speedup_if_none_waits']:.2f}",
            f"{of['half']:.2f}",
            f"{of['loss_difference']:.1e}",
        ]
        for name, of in found.items()
    ]
    print_table(
        ["workload", "1 rank ms", "2 ranks ms", "speed-up", "CPU", "half", "loss diff."], lines
    )
    exact = {name: of for name, of in found.items() if "bfloat16" not in name}
    slowest = {
        transport: min(of["speedup"] for name, of in exact.items() if transport in name)
        for transport in TRANSPORTS
    }
    finish(
        "scaling",
        {
            "speedup_2_ranks": slowest["shared memory"],
            "speedup_2_ranks_tcp": slowest["tcp"],
            "losses_equal": all(of["losses_equal"] for of in exact.values()),
            "by_workload": found,
            "environment": environment(("torch", "torchrec")),
        },
    )


if __name__ == "__main__":
    main()
