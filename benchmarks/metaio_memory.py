"""Resident memory of the reader over ten shuffled epochs, on data of one size and four times that.

`anonymous` is memory that only this process can give back; `mapped` are clean pages of data files,
which the system takes back when it needs them, and of shared libraries. The cache is 128 MB, the
window 2 blocks. Each size runs in a process of its own.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from _common import environment, finish, make_parser, positive_int, print_table
from _metaio_logs import logs_schema, write_logs

import metaio
from metaio.prepare.job import PrepareOptions
from metaio.prepare.local import prepare

EPOCHS = 10
CACHE_BYTES = 128 << 20


def resident_mb(kind: str) -> float:
    """A size that the kernel keeps of this process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{kind}:")[1].split()[0]) / 1024


def child(path: str) -> None:
    """Print anonymous and mapped megabytes after each epoch."""
    dataset = metaio.open_dataset(path)
    with metaio.BatchReader(
        dataset, "train", tasks_per_step=512, window_blocks=2, cache_bytes=CACHE_BYTES
    ) as reader:
        for epoch in range(EPOCHS):
            for _ in reader.batches(epoch):
                pass
            print(resident_mb("RssAnon"), resident_mb("RssFile"), flush=True)


def measure(folder: Path, rows: int) -> list[tuple[float, float]]:
    """Anonymous and mapped MiB after each epoch, for a log of so many rows."""
    logs, data = folder / f"{rows}.parquet", str(folder / f"{rows}")
    write_logs(logs, rows)
    prepare([str(logs)], data, logs_schema(), PrepareOptions())
    logs.unlink()
    command = [sys.executable, __file__, "--child", data]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    return [(float(line.split()[0]), float(line.split()[1])) for line in lines if line]


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
        return 0
    parser = make_parser(__doc__ or "")
    parser.add_argument("--rows", type=positive_int, help="rows of the smaller log")
    options = parser.parse_args()
    rows = options.rows or (200_000 if options.quick else 1_000_000)
    with tempfile.TemporaryDirectory(prefix="metaio-memory-") as name:
        found = {size: measure(Path(name), size) for size in (rows, 4 * rows)}
    lines = []
    for size, epochs in found.items():
        anonymous = [f"{epochs[index][0]:.0f}" for index in (0, 1, 4, 9)]
        lines.append((f"{size:,} rows", *anonymous, f"{epochs[-1][1]:.0f}"))
    header = ("MB after epoch", "1", "2", "5", "10", "mapped after 10")
    print_table(header, lines)
    small, large = (epochs[-1][0] for epochs in found.values())
    finish(
        "metaio_memory",
        {
            "rows": rows,
            "growth_epoch_2_to_10_mb": max(e[-1][0] - e[1][0] for e in found.values()),
            "anonymous_mb": small,
            "anonymous_mb_at_4_times_the_rows": large,
            "mapped_mb_at_4_times_the_rows": found[4 * rows][-1][1],
            **environment(("pyarrow", "numpy")),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
