"""What every benchmark shares: options, interleaved timing, the line of JSON at its end."""

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated measurements, in the unit of the measurements."""

    median: float
    lowest: float
    highest: float
    repeats: int


def make_parser(description: str) -> argparse.ArgumentParser:
    """Parser with the options that every benchmark has: `--quick` and `--rounds`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="end within a minute: fewer rounds, fewer sizes"
    )
    parser.add_argument(
        "--rounds", type=positive_int, metavar="N", help="interleaved rounds to take the median of"
    )
    return parser


def positive_int(text: str) -> int:
    """Argument type: a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def spread_of(values: Sequence[float]) -> Spread:
    """Median and range of at least one measurement."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def seconds_of(work: Callable[[], object], calls: int = 1) -> float:
    """Wall-clock seconds of one call of `work`, as the mean over `calls` calls in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


def interleaved(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call every measure once a round, so that a slow minute of the machine falls on all of them.

    Each returns what it measured. Every second round runs backwards, so nobody always comes first.
    """
    values: dict[str, list[float]] = {name: [] for name in measures}
    for round_number in range(rounds):
        names = list(measures) if round_number % 2 == 0 else list(measures)[::-1]
        for name in names:
            values[name].append(measures[name]())
    return values


def environment(packages: Sequence[str] = ("torch", "numpy")) -> dict[str, Any]:
    """How a figure was measured: command, date, commit, processor, cores, versions of packages."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        # With -dirty where the tree differs: such figures belong to no commit.
        "commit": _commit(),
        "processor": _processor(),
        "cores": len(available_cores()),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def available_cores() -> list[int]:
    """Cores that this process may run on (all of them where the system has no affinity)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header, first column to the left, the others to the right."""
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    for line in [header, *rows]:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells).rstrip(), flush=True)


def finish(benchmark: str, figures: Mapping[str, Any]) -> None:
    """Print the figures as one line of JSON, the last line of the output, for machines to read.

    Raises:
        ValueError: a figure is NaN or infinite, which JSON cannot hold."""
    # Or a warning could land behind the line that must be the last.
    sys.stderr.flush()
    print(json.dumps({"benchmark": benchmark, **figures}, allow_nan=False), flush=True)


def _commit() -> str:
    git = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # an unpacked archive has no git history


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
