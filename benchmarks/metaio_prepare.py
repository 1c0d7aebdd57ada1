"""Time and memory of prepare, beside a plain partition-then-sort and a DuckDB ORDER BY of the same
logs.

The two others only sort rows by user and time and write Parquet again; prepare also hashes ids,
cuts episodes, stores each block's unique ids, and takes checksums. Every contestant runs in a
process of its own, whose peak resident memory is read from the system. Full run: 20 million rows of
41 columns and 2 GB of memory."""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from _common import environment, finish, make_parser, positive_int, print_table, spread_of
from _metaio_logs import logs_schema, write_logs

from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions

MEMORY_BYTES = 2 << 30
BUCKET_ROWS = 500_000
CONTESTANTS = ("gmeta prepare", "partition then sort", "DuckDB ORDER BY")


def run_prepare(logs: Path, out: Path, threads: int) -> None:
    prepare([str(logs)], str(out), logs_schema(), PrepareOptions(MEMORY_BYTES, threads))


def run_partition(logs: Path, out: Path, threads: int) -> None:
    """Hash users into buckets on disk, sort each bucket by (user, time): the figure to beat."""
    pa.set_cpu_count(threads)
    out.mkdir()
    source = pq.ParquetFile(logs)
    buckets = max(1, source.metadata.num_rows // BUCKET_ROWS)
    sinks = [pa.OSFile(str(out / f"{i}.arrow"), "wb") for i in range(buckets)]
    writers = [pa.ipc.new_stream(sink, source.schema_arrow) for sink in sinks]
    for batch in source.iter_batches(131_072):
        # Knuth's multiplicative hash: users that follow each other fall into different buckets.
        bucket = (batch["user"].to_numpy() * 0x9E3779B1 >> 8) % buckets
        order = np.argsort(bucket, kind="stable")
        ends = np.searchsorted(bucket[order], np.arange(buckets + 1))
        # One gather for all buckets, each of which is then a slice that copies nothing.
        table = batch.take(pa.array(order))
        for index, writer in enumerate(writers):
            if ends[index] < ends[index + 1]:
                writer.write_batch(table.slice(ends[index], ends[index + 1] - ends[index]))
    for writer, sink in zip(writers, sinks, strict=True):
        writer.close()
        sink.close()
    keys = [("user", "ascending"), ("ts", "ascending")]
    for index in range(buckets):
        path = out / f"{index}.arrow"
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_stream(file).read_all()
        path.unlink()
        table = table.take(pc.sort_indices(table, sort_keys=keys))
        pq.write_table(table, out / f"{index}.parquet", compression="lz4", use_dictionary=False)


def run_duckdb(logs: Path, out: Path, threads: int) -> None:
    """Sorts by user and time, spilling to disk beyond the limit of memory."""
    out.mkdir()
    connection = duckdb.connect()
    connection.execute(f"SET memory_limit = '{MEMORY_BYTES >> 20}MiB'")
    connection.execute(f"SET threads = {threads}")
    connection.execute(f"SET temp_directory = '{out / 'spill'}'")
    connection.execute(
        f"COPY (SELECT * FROM '{logs}' ORDER BY user, ts) TO '{out / 'sorted.parquet'}' "
        "(FORMAT parquet, COMPRESSION lz4)"
    )


RUNNERS = dict(zip(CONTESTANTS, (run_prepare, run_partition, run_duckdb), strict=True))


def measure(name: str, logs: Path, folder: Path, threads: int) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak resident gigabytes of one contestant, in a fresh process."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, __file__, "--child", name, str(logs), str(out), str(threads)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    shutil.rmtree(out, ignore_errors=True)
    return float(answer[-3]), float(answer[-2]), float(answer[-1])


def child(name: str, logs: str, out: str, threads: str) -> None:
    """Runs one contestant; prints seconds, processor seconds and peak resident gigabytes."""
    begin_s = time.perf_counter()
    RUNNERS[name](Path(logs), Path(out), int(threads))
    seconds = time.perf_counter() - begin_s
    cpu_s = time.process_time()
    status = Path("/proc/self/status").read_text()
    # High-water mark of the resident memory since the process began.
    peak_kb = int(status.split("VmHWM:")[1].split()[0])
    print(seconds, cpu_s, peak_kb / (1 << 20))


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:6])
        return 0
    parser = make_parser(__doc__ or "")
    parser.add_argument("--rows", type=positive_int, help="rows of the log")
    parser.add_argument("--threads", type=positive_int, default=2)
    options = parser.parse_args()
    rows = options.rows or (300_000 if options.quick else 20_000_000)
    rounds = options.rounds or 1
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory(prefix="metaio-prepare-") as name:
        folder = Path(name)
        logs = folder / "logs.parquet"
        write_logs(logs, rows)
        for _ in range(rounds):
            for contestant in CONTESTANTS:
                found[contestant].append(measure(contestant, logs, folder, options.threads))
    seconds = {name: spread_of([pair[0] for pair in pairs]) for name, pairs in found.items()}
    cpu = {name: spread_of([pair[1] for pair in pairs]).median for name, pairs in found.items()}
    peak = {name: max(pair[2] for pair in pairs) for name, pairs in found.items()}
    print(f"{rows:,} rows, {options.threads} threads, memory limit {MEMORY_BYTES >> 30} GB")
    table = [
        (
            name,
            f"{s.median:.1f}",
            f"{cpu[name]:.1f}",
            f"{rows / s.median / 1e6:.2f}",
            f"{peak[name]:.2f}",
        )
        for name, s in seconds.items()
    ]
    print_table(("", "s", "CPU s", "M rows/s", "peak GB"), table)
    ours, theirs = seconds[CONTESTANTS[0]], seconds[CONTESTANTS[1]]
    finish(
        "metaio_prepare",
        {
            "rows": rows,
            "threads": options.threads,
            "prepare_s": ours.median,
            "prepare_cpu_s": cpu[CONTESTANTS[0]],
            "partition_then_sort_cpu_s": cpu[CONTESTANTS[1]],
            "prepare_peak_gb": peak[CONTESTANTS[0]],
            "partition_then_sort_s": theirs.median,
            "speedup_vs_partition_then_sort": theirs.median / ours.median,
            "duckdb_order_by_s": seconds[CONTESTANTS[2]].median,
            **environment(("pyarrow", "duckdb", "numpy")),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
