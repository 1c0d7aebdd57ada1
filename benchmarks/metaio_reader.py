"""Rows/s from disk to torch tensors, beside the bare Parquet decode of the same files and beside
peers.

`gmeta, a block a batch` hands out stored blocks in order, `gmeta, blocks shuffled` in a random one
(`data.blocks_per_step`: batch-level shuffle). `gmeta, shuffled` makes batches of 1,024 episodes
from a window of shuffled blocks, of the logs as `gmeta prepare` stores them by default: from
524,288 rows on in bundles of 64 tasks. `gmeta, episodes shuffled` draws each episode by itself, as
of a smaller split or `--bundle-tasks 0`. All give unique ids and positions, and read every block
anew in every epoch; of bundles what lies in the file as in memory is copied into batches and not
decoded. `bare decode` reads the files without bundles with pyarrow, in a loop, to Arrow arrays and
nothing more; the faster of read() and mmap counts. `unique_ids_per_row` counts the ids that a
trainer looks up, of steps of 1,024 episodes and of 128, the default. Peers read the same rows from
a row table in the encodings that suit pyarrow best (DELTA ids, PLAIN floats, no compression), to
one tensor a feature group; they compute no unique ids unless their name says so. Files are in the
page cache; the first epoch, in which gmeta also verifies every checksum, is reported by itself.
Polars and Mosaic streaming take part once --setup has installed them into .venv-peers-data."""

import functools
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from _common import (
    REPOSITORY,
    Spread,
    environment,
    finish,
    interleaved,
    make_parser,
    positive_int,
    print_table,
    spread_of,
)
from _metaio_logs import logs_schema, write_logs
from _metaio_peers import PEERS, Batch, available_peers, has_mosaic, mosaic, row_table, write_mosaic
from peers.setup import set_up_data

import metaio
import metaio.format.layout
from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from metaio.read.episode_order import BlockEpisodes
from metaio.read.pipeline import BatchPipeline, Plan
from metaio.read.reader import DEFAULT_WINDOW_BLOCKS

DECODES = ("bare decode, read()", "bare decode, mmap")
OURS, MOSAIC = "gmeta, a block a batch", "Mosaic, a block a sample"
SHUFFLED_BLOCKS = "gmeta, blocks shuffled"
SHUFFLED, EPISODES = "gmeta, shuffled", "gmeta, episodes shuffled"
SHUFFLED_EPISODES = 1_024
CLOCK = [time.perf_counter]


def bare_decode(dataset: metaio.Dataset, mapped: bool) -> int:
    """Decode every file of the split with pyarrow alone; rows read."""
    root = Path(dataset.url)
    split = dataset.splits["train"]
    for shard in range(len(split.shards)):
        files = [
            pq.ParquetFile(root / stream.path("train", shard), memory_map=mapped)
            for stream in metaio.format.layout.list_streams(dataset.features)
        ]
        for group in range(files[0].num_row_groups):
            for file in files:
                file.read_row_group(group, use_threads=pa.cpu_count() > 1)
    return split.num_rows


class Readers:
    """Our readers, alive for all rounds as in training: their threads and memory are warm."""

    def __init__(self, dataset: metaio.Dataset, default: metaio.Dataset, threads: int) -> None:
        # Two batches ahead for each thread: one is made while the other waits to be taken.
        self._blocks = BatchPipeline(
            dataset, threads=threads, prefetch_batches=2 * threads, cache_bytes=1
        )
        self._shuffled_blocks = metaio.BatchReader(
            dataset, "train", tasks_per_step=1, blocks_per_step=1, threads=threads, cache_bytes=1
        )
        self._shuffled = shuffled(default, threads)
        self._episodes = shuffled(dataset, threads)
        split = dataset.splits["train"]
        self._plans: list[Plan] = [
            [("train", BlockEpisodes(block, np.arange(count)))]
            for block, count in enumerate(split.blocks.num_episodes_Z.tolist())
        ]
        self._epochs = itertools.count()

    def blocks(self) -> int:
        """Every block as a batch, in stored order; rows read."""
        return sum(batch.num_rows for batch in self._blocks.run(self._plans))

    def shuffled_blocks(self) -> int:
        """One epoch of stored blocks in a random order; rows read."""
        return sum(batch.num_rows for batch in self._shuffled_blocks.batches(next(self._epochs)))

    def shuffled(self) -> int:
        """One epoch in the default way; rows read."""
        return sum(batch.num_rows for batch in self._shuffled.batches(next(self._epochs)))

    def episodes(self) -> int:
        """One epoch of episodes drawn one by one; rows read."""
        return sum(batch.num_rows for batch in self._episodes.batches(next(self._epochs)))

    def close(self) -> None:
        self._blocks.close()
        self._shuffled_blocks.close()
        self._shuffled.close()
        self._episodes.close()


def shuffled(dataset: metaio.Dataset, threads: int) -> metaio.BatchReader:
    """A reader of shuffled steps that decodes every block in every epoch."""
    # A cache of two windows of four in all.
    block_bytes = dataset.block_bytes("train")
    window = max(len(block_bytes) // 4, 1)
    return metaio.BatchReader(
        dataset,
        "train",
        tasks_per_step=SHUFFLED_EPISODES,
        window_blocks=window,
        threads=threads,
        cache_bytes=2 * window * int(block_bytes.max()),
    )


def ids_per_row(dataset: metaio.Dataset, tasks_per_step: int) -> float:
    """Unique ids a row of an epoch's steps, from windows of eight blocks."""
    num_ids = num_rows = 0
    with metaio.BatchReader(
        dataset, "train", tasks_per_step=tasks_per_step, window_blocks=DEFAULT_WINDOW_BLOCKS
    ) as reader:
        for batch in reader.batches(0):
            num_ids += len(batch.unique_ids_U)
            num_rows += batch.num_rows
    return num_ids / num_rows


def rate(work: Callable[[], int]) -> float:
    """Million rows/s of one run."""
    begin_s = CLOCK[0]()
    rows = work()
    return rows / (CLOCK[0]() - begin_s) / 1e6


def peer_rate(peer: Callable[[Path], Iterator[Batch]], path: Path) -> float:
    """Million rows/s of a peer: the first tensor of its batches has an entry a row."""
    return rate(lambda: sum(len(batch[0]) for batch in peer(path)))


def works(
    dataset: metaio.Dataset, readers: Readers, folder: Path, mosaic_too: bool
) -> dict[str, Callable[[], float]]:
    """Million rows/s of every contestant, by name."""
    found: dict[str, Callable[[], float]] = {
        DECODES[0]: lambda: rate(lambda: bare_decode(dataset, mapped=False)),
        DECODES[1]: lambda: rate(lambda: bare_decode(dataset, mapped=True)),
        OURS: lambda: rate(readers.blocks),
        SHUFFLED_BLOCKS: lambda: rate(readers.shuffled_blocks),
        SHUFFLED: lambda: rate(readers.shuffled),
        EPISODES: lambda: rate(readers.episodes),
    }
    for name, peer in available_peers().items():
        found[name] = functools.partial(peer_rate, peer, folder / "rows.parquet")
    if mosaic_too:
        found[MOSAIC] = functools.partial(peer_rate, mosaic, folder / "mds")
    return found


def summary(spreads: dict[str, Spread], first_epoch: float, threads: int) -> dict[str, object]:
    """The figures of one thread count."""
    decode = max(spreads[name].median for name in DECODES)
    readers = {name: spreads[name].median for name in PEERS if name in spreads}
    best = max(readers, key=lambda name: readers[name])
    ours, drawn = spreads[OURS].median, spreads[SHUFFLED].median
    found: dict[str, object] = {
        "ratio_to_decode": ours / decode,
        "ratio_to_decode_first_epoch": first_epoch / decode,
        "ratio_to_decode_shuffled_blocks": spreads[SHUFFLED_BLOCKS].median / decode,
        "ratio_to_decode_shuffled": drawn / decode,
        "ratio_to_decode_shuffled_episodes": spreads[EPISODES].median / decode,
        "best_peer": best,
        "speedup_vs_best_peer": ours / readers[best],
        "speedup_vs_best_peer_shuffled": drawn / readers[best],
    }
    if MOSAIC in spreads:
        found["speedup_vs_mosaic"] = ours / spreads[MOSAIC].median
    suffix = "" if threads == 1 else f"_{threads}_threads"
    return {f"{name}{suffix}": value for name, value in found.items()}


def run(folder: Path, rows: int, rounds: int) -> dict[str, object]:
    """Write the logs in every form, time all readers with one and with two threads."""
    logs, data = folder / "logs.parquet", str(folder / "data")
    write_logs(logs, rows)
    prepare([str(logs)], data, logs_schema(), PrepareOptions(bundle_tasks=0))
    prepare([str(logs)], f"{data}-default", logs_schema(), PrepareOptions())
    row_table(logs, folder / "rows.parquet")
    mosaic_too = has_mosaic()
    if mosaic_too:
        write_mosaic(metaio.open_dataset(data), folder / "mds")
    default = metaio.open_dataset(f"{data}-default")
    figures: dict[str, object] = {"bundle_tasks": default.splits["train"].blocks.bundle_tasks}
    for threads in (1, 2):
        pa.set_cpu_count(threads)
        # Threads are those of the readers; torch has hardly anything to compute.
        torch.set_num_threads(1)
        dataset = metaio.open_dataset(data)
        readers = Readers(dataset, default, threads)
        # By itself: only the first pass over a file verifies its checksums.
        first_epoch = rate(readers.blocks)
        readers.shuffled()  # reads files of its own
        found = interleaved(works(dataset, readers, folder, mosaic_too), rounds)
        readers.close()
        spreads = {name: spread_of(values) for name, values in found.items()}
        print(f"\n{threads} thread{'s' * (threads > 1)}, {rows:,} rows, million rows/s")
        lines = [
            (name, f"{s.median:.2f}", f"{s.lowest:.2f}", f"{s.highest:.2f}")
            for name, s in spreads.items()
        ]
        print_table(("", "median", "lowest", "highest"), lines)
        figures |= summary(spreads, first_epoch, threads)
    for name, kind in (("", "-default"), ("_episodes", "")):
        for tasks in (SHUFFLED_EPISODES, 128):
            found_ids = ids_per_row(metaio.open_dataset(f"{data}{kind}"), tasks)
            figures[f"unique_ids_per_row{name}_{tasks}"] = found_ids
    return figures


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--rows", type=positive_int, help="rows of the log")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count CPU seconds, for a machine that others use too",
    )
    parser.add_argument(
        "--setup", action="store_true", help="install the peers into --peers-env, then stop"
    )
    parser.add_argument(
        "--peers-env",
        type=Path,
        default=REPOSITORY / ".venv-peers-data",
        help="folder of the peers' packages; default: .venv-peers-data",
    )
    options = parser.parse_args()
    if options.setup:
        set_up_data(options.peers_env)
        print(f"The peers are installed in {options.peers_env}.")
        return 0
    # At the end: what the project has itself is the project's own.
    sys.path.append(str(options.peers_env.absolute()))
    if options.cpu_time:
        CLOCK[0] = time.process_time
    rows = options.rows or (1_200_000 if options.quick else 2_000_000)
    rounds = options.rounds or (3 if options.quick else 7)
    with tempfile.TemporaryDirectory(prefix="metaio-reader-") as name:
        figures = run(Path(name), rows, rounds)
    packages = ("pyarrow", "duckdb", "torch", "numpy")
    finish(
        "metaio_reader",
        {"rows": rows, "cpu_time": options.cpu_time, **figures, **environment(packages)},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
