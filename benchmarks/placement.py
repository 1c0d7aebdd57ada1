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
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _common import environment, finish, make_parser, print_table

# Both processes import what takes seconds, _placement_steps, at the same time.
FILE, MEMORY = "file", "memory"
ROWS, QUICK_ROWS = 12_000_000, 4_000_000
TURNS, QUICK_TURNS = 12, 4
OVERSIZE = 4  # the table over the memory


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


def work(parent: Connection, rows: int, turns: int, folder: str) -> None:
    """Take a turn with the table in a file whenever the parent asks for one."""
    from _placement_steps import BYTES_OF_ROW, Steps

    cgroup = make_cgroup(rows * BYTES_OF_ROW // OVERSIZE)
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    steps = Steps(rows, turns, folder)
    parent.send(cgroup is not None)
    while (number := parent.recv()) is not None:
        before = steps.counts()
        taken = steps.turn(number)
        asked, found = (now - then for now, then in zip(steps.counts(), before, strict=True))
        parent.send((*taken, asked, found))
    if cgroup is not None:
        # A process cannot be in what is removed: back to where it came from.
        (cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))
        with suppress(OSError):
            cgroup.rmdir()
    parent.send(None)
    # gloo's threads may abort an interpreter that ends in order.
    os._exit(0)


def main() -> None:
    options = make_parser(__doc__).parse_args()
    rows = QUICK_ROWS if options.quick else ROWS
    turns = options.rounds or (QUICK_TURNS if options.quick else TURNS)
    spawn = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(dir=os.environ.get("PLACEMENT_DIR", "."), prefix=".placement-")
    try:
        other, end = spawn.Pipe()
        # The first turn warms up.
        child = spawn.Process(target=work, args=(end, rows, turns + 1, folder), daemon=True)
        child.start()
        end.close()  # or the end of a process that is killed would not be heard
        from _placement_steps import BYTES_OF_ROW, TASKS, TURN_STEPS, WIDTH, Steps

        steps = Steps(rows, turns + 1)
        try:
            limited = other.recv()
        except EOFError:
            child.join()
            raise SystemExit(
                f"placement: the process with the file ended with {child.exitcode}"
            ) from None
        found: dict[str, list[Any]] = {MEMORY: [], FILE: []}

        def turn_in_file(number: int) -> Any:
            other.send(number)
            return other.recv()

        take_turn = {MEMORY: steps.turn, FILE: turn_in_file}
        for turn in range(turns + 1):
            # Nobody always comes first.
            for placement in sorted(found, reverse=turn % 2 == 1):
                found[placement].append(take_turn[placement](turn))
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
    table_bytes = rows * BYTES_OF_ROW
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
