"""Runs of `gmeta train` for gpu.py, each a process of its own: the losses of a device beside those
of the CPU, and the rows that it trains on a second."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _common import REPOSITORY, available_cores, print_table

from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic

CONFIG = """
[data]
valid_split = "valid"
[model]
name = "melu"
[algorithm]
name = "maml"
adapt_embeddings = false
[outer]
loss = "bce"
[run]
epochs = 1
cuda_graphs = "off"
"""
# Of losses and AUC to the CPU's: float32 in another order, over a few updates; inputs of 8 bits.
CLOSE, CLOSE_BF16 = 1e-4, 2e-2
SMALL = ["data.tasks_per_step=40", "model.embedding_dim=8", "model.hidden=[16,8]"]
SMALL += ["run.log_every_steps=1", "run.valid_every_steps=5", "run.checkpoint_every_steps=4"]
AGREEING: dict[str, list[str]] = {
    "maml": [],
    "plain": ["algorithm.name=none"],
    "embeddings adapt": ["algorithm.adapt_embeddings=true"],
    "metasgd, dlrm": [
        "algorithm.name=metasgd",
        "model.name=dlrm",
        'algorithm.adapt_layers=["top.*"]',
    ],
    "ridge": ["algorithm.name=ridge"],
    "encoder": ["algorithm.name=encoder"],
    "clipped, micro-batches": ["outer.clip_norm=0.1", "outer.accumulate_steps=2"],
    "adam on tables": ["outer.sparse_optimizer=adam"],
    "graphs": ["run.cuda_graphs=on"],
    "graphs, bf16": ["run.cuda_graphs=on", "run.precision=bf16"],
    "bf16": ["run.precision=bf16"],
    "stopped and resumed": ["run.max_steps=5"],
}
MOST_SECONDS = 200  # of a run
LARGE = ["model.embedding_dim=32", "model.hidden=[512,256]"]
LARGE += ["data.valid_split=", "run.epochs=1000"]
FAST: dict[str, list[str]] = {
    "plain": ["algorithm.name=none"],
    "maml": [],
    "maml, graphs": ["run.cuda_graphs=on"],
    "maml, graphs, bf16": ["run.cuda_graphs=on", "run.precision=bf16"],
    "maml, 3 steps, graphs": ["algorithm.inner_steps=3", "run.cuda_graphs=on"],
}
# Who reads and arranges, of two of the runs above.
WAYS = {
    "1 thread": ["data.threads=1", "data.processes=0"],
    "4 threads": ["data.threads=4", "data.processes=0"],
    "4 processes": ["data.threads=1", "data.processes=4"],
    "8 processes": ["data.threads=1", "data.processes=8"],
}
FED = {f"maml, graphs, {way}": [*FAST["maml, graphs"], *keys] for way, keys in WAYS.items()}
FED |= {f"plain, {way}": [*FAST["plain"], *WAYS[way]] for way in ("4 threads", "4 processes")}
FED |= {
    f"maml, graphs, leased, {way}": [*FAST["maml, graphs"], *WAYS[way], "data.source=service"]
    for way in ("1 thread", "4 processes")
}
# What `trained` compares.
PARTS = ("losses", "speeds", "feeds")


def trained(device: str, quick: bool, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """Print these comparisons; return how far the losses are from the CPU's, by run, which of them
    are too far, and rows a second by tasks a step and run."""
    found: dict[str, Any] = {}
    tasks = [128] if quick else [128, 1_024]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if "losses" in parts:
            names = list(AGREEING)[:: 3 if quick else 1]
            found["far"], found["wrong"] = agreement(device, root, names)
        for part, runs in (("speeds", FAST), ("feeds", FED)):
            if part in parts:
                names = list(runs)[:: 3 if quick else 1]
                found[part] = speeds(
                    device, root, tasks, {name: runs[name] for name in names}, quick
                )
    return found


def agreement(device: str, root: Path, names: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """Train on the CPU and on the device, several runs at a time; return how far the losses are
    from each other, and the names of those that are too far."""
    data = root / "small"
    prepare_synthetic(str(data), SyntheticConfig(num_tasks=400, num_items=60))

    def readings(name: str, is_expected: bool) -> list[float]:
        on = "cpu" if is_expected else device
        # What is CUDA's alone makes no difference to what is computed.
        keys = [key for key in AGREEING[name] if not is_expected or "cuda_graphs" not in key]
        again = [key for key in keys if not key.startswith("run.max_steps")]
        run = root / "runs" / f"{name}{'-expected' if is_expected else ''}"
        train(run, data, on, [*SMALL, *keys])
        if again != keys:
            train(run, data, on, [*SMALL, *again], "--resume")
        return readings_of(run)

    with ThreadPoolExecutor(max(1, len(available_cores()) // 2)) as pool:
        pairs = {
            n: [pool.submit(readings, n, is_expected) for is_expected in (True, False)]
            for n in names
        }
        return compared("train", names, lambda name: [one.result() for one in pairs[name]])


def readings_of(run: Path) -> list[float]:
    """Return the losses of a run's steps, and its AUCs between them."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [one["valid"]["auc"] if "valid" in one else one["loss"] for one in lines]


def compared(
    what: str, names: Sequence[str], pair: Callable[[str], Sequence[Sequence[float]]]
) -> tuple[dict[str, float], list[str]]:
    """Print how far the readings of each pair of runs, expected and found, are from each other at
    most, relatively; return that by name, and the names of those that are too far, or failed."""
    far: dict[str, float] = {}
    wrong: list[str] = []
    for name in names:
        try:
            expected, found = pair(name)
        except RuntimeError as error:
            wrong.append(name)
            print(f"{what}: {name:40s} FAILED\n{error}", flush=True)
            continue
        assert len(expected) == len(found) > 1, f"{name}: {expected}, {found}"
        far[name] = max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))
        is_close = far[name] < (CLOSE_BF16 if "bf16" in name else CLOSE)
        wrong += [] if is_close else [name]
        told = f"{'right' if is_close else 'WRONG'}  {far[name]:.1e} off"
        print(f"{what}: {name:40s} {told} in {len(found)} readings", flush=True)
    return far, wrong


def speeds(
    device: str, root: Path, tasks: Sequence[int], runs: Mapping[str, list[str]], quick: bool
) -> dict[str, dict[str, int]]:
    """Train for a while, one run after the other; return the median of rows a second, without the
    first readings, by tasks a step and run."""
    data = root / "large"
    if not data.exists():
        prepare_synthetic(str(data), SyntheticConfig(num_tasks=2_000 if quick else 60_000))
    found: dict[str, dict[str, int]] = {}
    for number in tasks:
        found[str(number)] = {}
        for name, keys in runs.items():
            run, steps = root / "runs" / f"{name}-{number}", 12 if quick else 300
            keys = [f"data.tasks_per_step={number}", f"run.max_steps={steps}", *keys]
            keys += [f"run.log_every_steps={2 if quick else 10}"]
            start = time.perf_counter()
            train(run, data, device, [*LARGE, *keys])
            seconds = time.perf_counter() - start
            lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            readings = [one for one in lines if "loss" in one][1:]
            counted = readings[len(readings) // 4 :]  # the first take what was read ahead
            rate = statistics.median(one["samples_per_s"] for one in counted)
            waits = statistics.median(one["data_wait_share"] for one in counted)
            found[str(number)][name] = round(rate)
            row = [f"{number} tasks a step, {name}", f"{rate:,.0f}", f"{waits:.0%}"]
            heads = ["gmeta train", "rows/s", "waits for data", "seconds in all"]
            print_table(heads, [[*row, f"{seconds:.0f}"]])
    return found


def train(run: Path, data: Path, device: str, keys: Sequence[str], *options: str) -> None:
    """Run `gmeta train`.

    Raises:
        RuntimeError: it failed; with the end of what it said."""
    finish_train(start_train(run, data, device, [*keys, *options], {}))


def start_train(
    run: Path, data: Path, device: str, arguments: Sequence[str], environment: dict[str, str]
) -> subprocess.Popen[str]:
    """Start `gmeta train` with so much more in its environment."""
    config = run.parent / f"{run.name}.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(CONFIG)
    where = [f"run.dir={run}", f"data.path={data}", f"run.device={device}"]
    rooms = [str(REPOSITORY / room) for room in (".", "models", "protos")]
    path = os.pathsep.join([*rooms, os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "gmeta", "train", str(config), *where, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )


def finish_train(process: subprocess.Popen[str]) -> None:
    """Wait for it.

    Raises:
        RuntimeError: it failed; with the end of what it said."""
    said, _ = process.communicate(timeout=MOST_SECONDS)
    if process.returncode:
        raise RuntimeError(f"{process.args}\n{said[-3000:]}")
