"""What reading costs a run on a GPU: steps a second while threads, or processes, read and arrange
its batches, beside the same steps with batches that are there already.

The loop is that of `gmeta train` on CUDA, one rank, with all that its host does: batches of 128
tasks, or of --tasks, of about 30 rows and 26 features, from a split in bundles, shuffled, checked,
arranged in buckets and packed; ids announced and rows numbered; forward and backward replayed as a
graph; guard, optimizers, readings. What the GPU would do is left out, and nothing waits for it: a
replayed graph does nothing, and tables move 64 rows. So the main thread needs the interpreter's
lock as it does with a GPU, and shares it with the threads that read.

`fed_ratio` is the speed while reading over the speed with batches that are there: 1 where reading
costs a step nothing. All ways take turns inside one run, 60 steps each; of a turn the first 20 do
not count, as they take what was read ahead. What the main thread does in a step is told apart:
`cpu` is its own work, `core` the wait for a core (that of other programs, too), `data` that for a
batch, and `lock` the rest: the wait for the interpreter's lock. `fed_ratio_with_cores` is the ratio
without `core`: that of a machine with a core for each thread. The milliseconds of a batch are CPU
time of one thread with nothing beside it.
"""

import itertools
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import _metaio_logs
import torch
from _common import environment, finish, make_parser, positive_int, print_table, spread_of

import gmeta.adaptation.fused.loop
import gmeta.learner
import gmeta.train
from gmeta.batches import episodes, transfer
from gmeta.batches.ahead import mapped_ahead
from gmeta.batches.augment import augmented
from gmeta.batches.labels import labels_checked
from gmeta.config import TrainConfig, load_config
from gmeta.feeds.agent import Agent, Arrange
from gmeta.feeds.asked import BatchSettings
from gmeta.feeds.processes import Processes
from gmeta.feeds.reader import open_reader
from gmeta.learner import MetaLearner
from gmeta.parallel import sharding
from gmeta.parallel.ranks import Ranks, start_ranks, stop_ranks
from gmeta.parallel.sharded_learner import ShardedLearner, local_learner
from gmeta.tables import updates
from gmeta.tables.given import GivenRows
from metaio.format.dataset import open_dataset
from metaio.prepare.job import PrepareOptions
from metaio.prepare.local import prepare
from metaio.prepare.schema_file import parse_schema
from metaio.read.batch import TaskBatch
from metaio.read.compose import compose
from metaio.read.order import EpisodeOrder, OrderConfig
from metaio.read.reader import BatchReader

CONFIG = """
[data]
tasks_per_step = {tasks}
[model]
name = "dlrm"
embedding_dim = 4
hidden = [8]
interaction = "cat"
[algorithm]
name = "maml"
adapt_layers = ["top.*"]
adapt_embeddings = false
[run]
device = "cpu"
shape_buckets = "on"
epochs = 1
loggers = []
log_every_steps = 20
checkpoint_every_steps = 1000000
"""
ROWS, QUERY_ROWS = 30, 10  # of a task: on average, and exactly
COUNTED_STEPS = 60  # of batches made by themselves
MOVED_ROWS = 64  # of tables, a step
TURN, COUNTED_FROM = 60, 20  # steps of a way to be fed
FED = "there already"
PARTS = "compose_ms", "arrange_ms", "plan_ms", "pack_ms"
MANY_EPOCHS = 1 << 20
Batches = Iterator[Any]


class Ways(NamedTuple):
    """How many threads, and processes, read and arrange."""

    threads: list[int]
    processes: list[int]


def write_data(folder: Path, tasks: int) -> str:
    """Prepare a log of about so many tasks in bundles; return where."""
    with patch.object(_metaio_logs, "_MEAN_ROWS_OF_USER", ROWS):
        _metaio_logs.write_logs(folder / "logs.parquet", tasks * ROWS)
    sizes = zip(_metaio_logs.IDS, _metaio_logs.CARDINALITIES, strict=True)
    schema = parse_schema(
        {
            "task": {"column": "user"},
            "label": {"column": "click"},
            "time": {"column": "ts"},
            "single": [{"column": name, "hash": size + 2} for name, size in sizes],
            "episodes": {"by": "last", "query_rows": QUERY_ROWS, "min_rows": 12, "max_rows": 4_096},
        }
    )
    options = PrepareOptions(bundle_tasks=64)
    prepare([str(folder / "logs.parquet")], str(folder / "data"), schema, options)
    return str(folder / "data")


@contextmanager
def without_gpu() -> Iterator[None]:
    """Have the host do what it does for CUDA, and nobody what the GPU does."""

    def sent(trees: Sequence[Any], _: torch.device) -> list[Any]:
        """As transfer.sent to a GPU, but for the copy itself."""
        return list(trees) if isinstance(trees[0], transfer.Packed) else transfer.packed(trees)

    def copy(rows: Any, row_U: torch.Tensor, values_UD: torch.Tensor) -> None:
        values_UD.zero_()  # of rows that nobody reads: a step must find numbers there
        chosen = slice(MOVED_ROWS)
        torch.index_select(rows.values_RD, 0, row_U[chosen], out=values_UD[chosen])

    def update(group: Any, given: GivenRows, grad_ND: torch.Tensor) -> None:
        chosen = slice(MOVED_ROWS)
        with torch.no_grad():
            group._update_rows(group, given.row_N[chosen], grad_ND[chosen])

    def choose_shapes(learner: MetaLearner, *_: Any) -> None:
        learner.in_buckets = True
        assert learner.use_graphs(lambda work: (lambda: None, work())) == ""

    def unpinned(*size: int, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
        return empty(*size, **rest)

    empty = torch.empty
    with ExitStack() as patches:
        for owner, name, value in (
            (torch, "empty", unpinned),
            (episodes, "sent", sent),
            (updates, "_HostRows", updates._DeviceRows),
            (updates._DeviceRows, "copy", copy),
            (updates.FastGroup, "update", update),
            (sharding, "_choose_shapes", choose_shapes),
            (gmeta.learner, "kind_of_device", lambda _: "cuda"),
            (gmeta.adaptation.fused.loop, "kind_of_device", lambda _: "cuda"),
        ):
            patches.enter_context(patch.object(owner, name, value))
        yield


class Turns(Agent):
    """Feeds a run in each way in turns, and notes when its steps were taken."""

    def __init__(
        self, config: TrainConfig, local: ShardedLearner, ranks: Ranks, ways: Ways, turns: int
    ) -> None:
        self._config, self._local, self._ranks, self._turns = config, local, ranks, turns
        self._dataset = open_dataset(config.data.path)
        self._feeds = ways
        self.at_s: dict[str, list[float]] = {name: [] for name in ("step", "cpu", "core", "data")}
        self._wait_s, self._readers = 0.0, list[BatchReader | Processes]()
        self.ways: list[str] = []  # of each turn

    def _stored(self, threads: int) -> Iterator[TaskBatch]:
        """Yield batches as a run has them in front of arranging, epoch after epoch."""
        config = replace(self._config, data=replace(self._config.data, threads=threads))
        settings = BatchSettings.of(config, self._dataset)
        with open_reader(config.data, config.run.seed, self._dataset, "train", 0, 1) as reader:
            self._readers.append(reader)
            for epoch in itertools.count():
                checked = labels_checked(
                    reader.batches(epoch), settings.kinds, self._dataset, "train"
                )
                yield from augmented(
                    checked, config.augment, self._dataset.features, config.run.seed, epoch, 0
                )

    def _from_processes(self, number: int) -> Batches:
        """Yield batches that so many processes make, epoch after epoch."""
        config = replace(self._config, run=replace(self._config.run, epochs=MANY_EPOCHS))
        settings = BatchSettings.of(config, self._dataset)
        with open_reader(config.data, config.run.seed, self._dataset, "train", 0, 1) as reader:
            num_steps = reader.num_steps()
        processes = Processes(number, settings, self._ranks)
        self._readers.append(processes)
        try:
            for epoch in range(MANY_EPOCHS):
                yield from processes.episodes(self._local, epoch, 0, num_steps)
        finally:
            processes.close()

    def arranged(self, batches: Iterator[TaskBatch], arrange: Arrange) -> Batches:
        def prepared(batch: TaskBatch) -> Any:
            return self._local.exchange.prepared(arrange(batch))

        sources: dict[str, Batches] = {
            f"threads = {n}": mapped_ahead(prepared, self._stored(n), n, self._waited)
            for n in self._feeds.threads
        }
        sources |= {f"processes = {n}": self._from_processes(n) for n in self._feeds.processes}
        some = itertools.islice(mapped_ahead(prepared, self._stored(1), 1), 16)
        sources[FED] = itertools.cycle(list(some))
        for turn in range(self._turns):
            for way in list(sources) if turn % 2 == 0 else reversed(list(sources)):
                self.ways.append(way)
                yield from itertools.islice(sources[way], TURN)
        for source in sources.values():
            if isinstance(source, Generator):
                source.close()

    def _waited(self, seconds: float) -> None:
        self._wait_s += seconds

    def stepped(self, num_tasks: int) -> None:
        """Note what each clock shows."""
        waited_s = self._wait_s + sum(reader.wait_s for reader in self._readers)
        times_s = time.perf_counter(), *cpu_and_core_s(), waited_s
        for of_clock, now_s in zip(self.at_s.values(), times_s, strict=True):
            of_clock.append(now_s)

    def milliseconds(self, clock: str) -> dict[str, list[float]]:
        """By way, what a clock goes on in a step of each turn."""
        found: dict[str, list[float]] = {}
        for turn, way in enumerate(self.ways):
            # The steps of a turn but the last two, which ask for batches of the next one.
            first, last = turn * TURN + COUNTED_FROM, (turn + 1) * TURN - 3
            between_s = self.at_s[clock][last] - self.at_s[clock][first]
            found.setdefault(way, []).append(1e3 * between_s / (last - first))
        return found


def cpu_and_core_s() -> tuple[float, float]:
    """Seconds that this thread has computed, and that it has waited for a core."""
    on_cpu_ns, queued_ns, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    return on_cpu_ns / 1e9, queued_ns / 1e9


def parts_of_a_batch(config: TrainConfig, local: ShardedLearner) -> dict[str, float]:
    """Milliseconds of CPU that a batch takes to be composed of blocks in memory, arranged, looked
    through for the rows to ask for and to give, and packed.
    """
    dataset = open_dataset(config.data.path)
    split = dataset.splits["train"]
    order = EpisodeOrder(
        split.blocks.num_episodes_X,
        OrderConfig(config.data.tasks_per_step),
        bundle_tasks=split.blocks.bundle_tasks,
    )
    blocks = [dataset.read_block("train", block) for block in range(split.num_blocks)]
    spent_s = [0.0] * len(PARTS)
    for step in range(10 + COUNTED_STEPS):
        times = [time.thread_time()]
        parts = order.step(step % order.num_steps)
        chosen = [(blocks[one.block], one.episodes) for one in parts]
        batch = compose(dataset.features, chosen)
        times.append(time.thread_time())
        arranged = local.learner.arrange(batch)
        times.append(time.thread_time())
        planned = arranged.planned(local.exchange.planner.plan(arranged))
        times.append(time.thread_time())
        planned.packed()
        times.append(time.thread_time())
        if step >= 10:
            for part, (began, ended) in enumerate(itertools.pairwise(times)):
                spent_s[part] += ended - began
    per_batch = [round(1e3 * seconds / COUNTED_STEPS, 2) for seconds in spent_s]
    return dict(zip(PARTS, per_batch, strict=True))


def run(folder: Path, tasks: int, ways: Ways, quick: bool, rounds: int) -> dict[str, Any]:
    """Print and return all figures."""
    (folder / "train.toml").write_text(CONFIG.format(tasks=tasks))
    data = write_data(folder, 8_000 if quick else 40_000)
    num_steps = rounds * (1 + len(ways.threads) + len(ways.processes)) * TURN
    keys = [f"data.path={data}", f"run.dir={folder / 'run'}", f"run.max_steps={num_steps}"]
    config = load_config(folder / "train.toml", keys)
    ranks = start_ranks("cpu", 300)
    turns: list[Turns] = []

    def agent(config: TrainConfig, feed: Any, sharded: Any, ranks: Any, stop: Any) -> Agent:
        local = local_learner(sharded)
        parts.update(parts_of_a_batch(config, local))
        turns.append(Turns(config, local, ranks, ways, rounds))
        return turns[0]

    parts: dict[str, float] = {}
    with (
        without_gpu(),
        patch.object(gmeta.train, "open_agent", agent),
        redirect_stderr(StringIO()),  # the run's own lines
    ):
        gmeta.train.train(config, ranks)
    stop_ranks()
    steps, *parts_of_step = (turns[0].milliseconds(clock) for clock in turns[0].at_s)
    ratios, told, busy, rows = {}, {}, {}, []
    for way, mine in steps.items():
        ratios[way] = spread_of([there / one for there, one in zip(steps[FED], mine, strict=True)])
        cpu, core, waited = (sum(part[way]) / rounds for part in parts_of_step)
        lock = max(0.0, sum(mine) / rounds - cpu - core - waited)
        told[way] = {"cpu": cpu, "core": core, "data": waited, "lock": lock}
        busy[way] = cpu + waited + lock
        spread = spread_of(mine)
        values = spread.median, spread.lowest, spread.highest, *told[way].values()
        rows.append([way, f"{ratios[way].median:.2f}", *(f"{value:.2f}" for value in values)])
    print_table(["batches", "fed_ratio", "ms a step", "lowest", "highest", *told[FED]], rows)
    print_table(list(parts), [[f"{value:.2f}" for value in parts.values()]])
    return {
        "fed_ratio": {way: ratio.median for way, ratio in ratios.items() if way != FED},
        "fed_ratio_with_cores": {way: busy[FED] / mine for way, mine in busy.items() if way != FED},
        "step_ms": told,
        **parts,
    }


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--tasks", type=positive_int, default=128, help="of a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = options.rounds or (6 if options.quick else 20)
    with tempfile.TemporaryDirectory(prefix="feed-") as name:
        ways = Ways([1], [2]) if options.quick else Ways([1, 2, 4], [1, 2, 4])
        figures = run(Path(name), options.tasks, ways, options.quick, rounds)
    finish("feed", {"tasks": options.tasks, **figures, **environment()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
