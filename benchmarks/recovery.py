"""How long a job takes to its next step after kill -9 of one of its four ranks.

Two launchers take turns: torchrun, whose ranks are fresh interpreters that go on from the newest
checkpoint, as all did before; and `gmeta train`, whose ranks are forked with everything imported
and go on from the step kept in memory. Counted is the time from the kill to the end of the first
step that was not taken before it, steps that are taken again included. `recovery_ratio` is the
median of the second over that of the first."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _common import environment, finish, interleaved, make_parser, print_table

from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic

RANKS = 4
# Steps between checkpoints, and before the kill.
STEPS, QUICK_STEPS = (20, 30), (10, 15)
TIMEOUT_S = 600.0
CONFIG = """
[data]
path = "{data}"
tasks_per_step = 32
[model]
name = "dlrm"
embedding_dim = 16
hidden = [64]
options.bottom = [32]
[algorithm]
name = "maml"
[run]
dir = "{run}"
epochs = 1000
log_every_steps = 1
loggers = []
checkpoint_every_steps = {every}
"""
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
TORCHRUN += ["--monitor-interval=0.2", "--max-restarts=1", f"--nproc-per-node={RANKS}"]
GMETA = [f"--nproc-per-node={RANKS}", "--max-restarts=1", "run.memory_checkpoint_every_steps=1"]


def command_of(launcher: str, config: Path) -> list[str]:
    train = ["-m", "gmeta", "train", str(config)]
    words = [*TORCHRUN, *train] if launcher == "torchrun" else [*train, *GMETA]
    return [sys.executable, *words]


@contextmanager
def running(command: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A job with one thread a rank, which is killed in the end."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("wb") as file, subprocess.Popen(command, env=env, stderr=file) as job:
        try:
            yield job
        finally:
            job.terminate()


def descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from descendants(child)


def last_step(run: Path) -> int:
    """The newest step of the log; 0 where it has none."""
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    try:
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except ValueError:  # half-written
        return 0


def wait_for(reached: Any) -> float:
    """Wait until `reached()`; return that moment."""
    until_s = time.monotonic() + TIMEOUT_S
    while not reached():
        if time.monotonic() > until_s:
            raise SystemExit("recovery: the job did not get there within 10 minutes")
        time.sleep(0.03)  # of seconds; the ranks need the processors
    return time.monotonic()


def measure_s(launcher: str, data: str, every: int, killed_behind: int) -> float:
    """Seconds from the kill to the end of the next new step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, log, config = folder / "run", folder / "log", folder / "t.toml"
        config.write_text(CONFIG.format(data=data, run=run, every=every))
        with running(command_of(launcher, config), log) as job:
            wait_for(lambda: last_step(run) >= killed_behind)
            # Ranks lead sessions of their own.
            ranks = sorted(pid for pid in descendants(job.pid) if os.getsid(pid) == pid)
            os.kill(ranks[-1], signal.SIGKILL)
            killed_s, newest = time.monotonic(), 0

            def has_restarted() -> bool:
                nonlocal newest
                newest = max(newest, last_step(run))  # of a step that was under way
                return b"restart 1 of 1" in log.read_bytes()

            wait_for(has_restarted)
            return wait_for(lambda: last_step(run) > newest) - killed_s


def main() -> None:
    options = make_parser(__doc__).parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    steps = QUICK_STEPS if options.quick else STEPS
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/data"
        prepare_synthetic(data, SyntheticConfig(num_tasks=2_000, num_items=500))
        seconds = interleaved(
            {
                "torchrun": lambda: measure_s("torchrun", data, *steps),
                "gmeta": lambda: measure_s("gmeta", data, *steps),
            },
            rounds,
        )
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    lines = [[name, *(f"{one:.1f}" for one in seconds[name])] for name in seconds]
    print_table(["seconds to the next step", *map(str, range(1, rounds + 1))], lines)
    finish(
        "recovery",
        {
            "recovery_ratio": medians["gmeta"] / medians["torchrun"],
            "recovery_s": medians,
            "rounds": rounds,
            "environment": environment(("torch", "torchrec")),
        },
    )


if __name__ == "__main__":
    main()
