"""Steps with a table in a file, at four times the memory that is left for it, against the same
steps with the table in memory.

Two processes take turns with the same batches. This one has its tables in memory. The other has the
large one in a file (`sharding.placements`), and goes into a memory cgroup of a quarter of the
table's bytes before it makes it: the cache of `sharding.cache_share` of the rows, what is kept of
rows and slots, a step's own memory and the page cache have to do with that. The interpreter and its
libraries, loaded before, do not count. The most popular rows are in the cache from the start, as
after hours of training. Ids follow Zipf's law (exponent 0.93), spread over the table as hashed ids
are. Losses must be equal to the bit.

`file_ratio` is the time of a step in memory over that with a file, medians of interleaved turns
(`processor_ms`: what the processors took of it, the thread that moves rows included);
`hit_rate` the share of a step's distinct rows of the large table that were in the cache. Without a
cgroup to write to (it takes root), `limited` is false: then the page cache may hold all of it."""

import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _common import environment, finish, make_parser, print_table
from _synthetic import SPREAD, even_sizes, random_batch, single_id_features

from gmeta.adaptation.algorithms.algorithm import TableSizes
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.sharding import ShardingConfig
from gmeta.config.train_config import OuterConfig, TrainConfig
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import start_ranks
from gmeta.distributed.sharding import shard_learner
from gmeta.distributed.steps import batch_without_tasks, iterate_steps
from gmeta.distributed.tables.cached_group import CachedGroup
from gmeta.distributed.tables.row_mover import HostMover
from gmeta.distributed.tables.rows_to_send import RowsToSend
from gmeta.learner import MetaLearner
from gmeta_models import InputSizes, ModelConfig, build_model

ROWS, QUICK_ROWS = 12_000_000, 4_000_000
WARM_ROWS = 100_000  # at a time, for less memory
SMALL_TABLES = (201, 25, 9, 51, 3_001)
WIDTH, TASKS, ROWS_OF_TASK, SKEW = 64, 128, 10, 15.0
TURN_STEPS = 10
TURNS, QUICK_TURNS = 12, 4
CACHE_SHARE, OVERSIZE = 0.1, 4
MEMORY, FILE = "memory", "file"


def make_cgroup(num_bytes: int) -> Path | None:
    """A memory cgroup of this size inside this process's own, version 1 or 2; None: not allowed."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    for root, limit in (
        (Path("/sys/fs/cgroup/memory", own.get("memory", "")), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup", own.get("", "")), "memory.max"),
    ):
        folder = root / f"placement-{os.getpid()}"
        with suppress(OSError):
            folder.mkdir()
            try:
                (folder / limit).write_text(str(num_bytes))
            except OSError:
                folder.rmdir()
                raise
            return folder
    return None


class Steps:
    """A learner of one rank, and steps that it takes again and again."""

    def __init__(self, placement: str, rows: int, num_steps: int, folder: str) -> None:
        self.ranks = start_ranks("cpu", 300)
        features = single_id_features(1 + len(SMALL_TABLES), (rows, *SMALL_TABLES))
        placements = (f"f0={FILE}",) if placement == FILE else ()
        config = TrainConfig(
            model=ModelConfig(name="dlrm", embedding_dim=WIDTH, hidden=(128, 64)),
            algorithm=AlgorithmConfig(name="maml", adapt_embeddings=False),
            outer=OuterConfig(sparse_optimizer="rowwise_adagrad"),
            sharding=ShardingConfig(
                placements=placements, cache_share=CACHE_SHARE, file_dir=folder
            ),
        )
        torch.manual_seed(0)
        sizes = InputSizes(len(features.single), 0, 0)
        tables = TableSizes(len(features.single), WIDTH)
        model = build_model(config.model, sizes)
        self.learner = MetaLearner(model, config.algorithm, "bce", tables)
        self.sharded = shard_learner(self.learner, features, config, self.ranks)
        self.optimizer = build_optimizer(self.sharded, config.outer)
        self.idle = self.learner.collate(batch_without_tasks(features))
        share = even_sizes(TASKS, ROWS_OF_TASK)
        self.batches = [
            random_batch(features, share, share, seed, SKEW) for seed in range(num_steps)
        ]
        for group in self.sharded.local.exchange.groups:
            if isinstance(group, CachedGroup):
                self.cached = group
                popular = torch.arange(int(CACHE_SHARE * rows) - 1) * SPREAD % rows
                mover = HostMover([group])
                for some in popular.split(WARM_ROWS):
                    mover.admit([group], [RowsToSend(some, None)], lambda: True)

    def turn(self, first: int) -> tuple[float, float, list[float]]:
        """Seconds a step, elapsed and of processors, and the losses, of one turn's steps."""
        losses = []
        own = self.batches[first : first + TURN_STEPS]
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for episodes, totals in iterate_steps(
            map(self.learner.collate, own), self.idle, self.ranks, sharded=self.sharded
        ):
            self.optimizer.begin_step(0, 1)
            loss = self.sharded(episodes, weight=1 / totals.num_terms)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        return elapsed_s / len(own), cpu_s / len(own), losses


def work(parent: Connection, rows: int, num_steps: int, folder: str) -> None:
    """Take a turn with the table in a file whenever the parent asks for one."""
    torch.set_num_threads(1)
    cgroup = make_cgroup(rows * 4 * (WIDTH + 1) // OVERSIZE)
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    steps = Steps(FILE, rows, num_steps, folder)
    parent.send(cgroup is not None)
    while (first := parent.recv()) is not None:
        before = _counts(steps)
        taken = steps.turn(first)
        asked, found = (now - then for now, then in zip(_counts(steps), before, strict=True))
        parent.send((*taken, asked, found))
    if cgroup is not None:
        # A process cannot be in what is removed: back to where it came from.
        (cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))
        with suppress(OSError):
            cgroup.rmdir()
    parent.send(None)
    # gloo's threads may abort an interpreter that ends in order.
    os._exit(0)


def _counts(steps: Steps) -> tuple[int, int]:
    return steps.cached.slots.num_asked, steps.cached.slots.num_found


def main() -> None:
    options = make_parser(__doc__).parse_args()
    rows = QUICK_ROWS if options.quick else ROWS
    turns = options.rounds or (QUICK_TURNS if options.quick else TURNS)
    torch.set_num_threads(1)
    spawn = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(dir=os.environ.get("PLACEMENT_DIR", "."), prefix=".placement-")
    try:
        # The first turn warms up.
        num_steps = (turns + 1) * TURN_STEPS
        other, end = spawn.Pipe()
        child = spawn.Process(target=work, args=(end, rows, num_steps, folder), daemon=True)
        child.start()
        end.close()  # or the end of a process that is killed would not be heard
        steps = Steps(MEMORY, rows, num_steps, folder)
        try:
            limited = other.recv()
        except EOFError:
            child.join()
            raise SystemExit(
                f"placement: the process with the file ended with {child.exitcode}"
            ) from None
        found: dict[str, list[Any]] = {MEMORY: [], FILE: []}

        def turn_in_file(first: int) -> Any:
            other.send(first)
            return other.recv()

        take_turn = {MEMORY: steps.turn, FILE: turn_in_file}
        for turn in range(turns + 1):
            # Nobody always comes first.
            for placement in sorted(found, reverse=turn % 2 == 1):
                found[placement].append(take_turn[placement](turn * TURN_STEPS))
            assert found[MEMORY][-1][2] == found[FILE][-1][2], "losses differ"
        other.send(None)
        other.recv()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds, cpu_s = (
        {name: statistics.median(turn[at] for turn in own[1:]) for name, own in found.items()}
        for at in (0, 1)
    )
    asked, hits = (sum(turn[at] for turn in found[FILE][1:]) for at in (3, 4))
    table_bytes = rows * 4 * (WIDTH + 1)
    print(
        f"one table of {rows:,} rows x {WIDTH}, {table_bytes / 1e9:.2f} GB with its optimizer, "
        f"{TASKS} tasks a step, row-wise Adagrad, MAML"
    )
    print_table(
        ["table in", "step ms", "memory"],
        [
            [MEMORY, f"{1e3 * seconds[MEMORY]:.1f}", "all"],
            [FILE, f"{1e3 * seconds[FILE]:.1f}", f"1/{OVERSIZE}" if limited else "not limited"],
        ],
    )
    finish(
        "placement",
        {
            "file_ratio": seconds[MEMORY] / seconds[FILE],
            "hit_rate": hits / asked,
            "limited": limited,
            "step_ms": {name: 1e3 * each for name, each in seconds.items()},
            "processor_ms": {name: 1e3 * each for name, each in cpu_s.items()},
            "rows_asked_a_step": asked / (turns * TURN_STEPS),
            "table_bytes": table_bytes,
            "environment": environment(("torch", "torchrec", "numpy")),
        },
    )
    os._exit(0)


if __name__ == "__main__":
    main()
