"""`gmeta serve` against the loop over `gmeta.load` in one FastAPI process (_lock_server.py).

Two models of random values: the demo's (everything adapts) with 16 support and 10 query rows, and
26 columns 32 wide with tables of 100,000 rows (of adapt_latency.py) with 20 and 100. 16 callers in
a closed loop, JSON both ways, all on the same cores. The servers take turns, and in each round ours
answers single calls too, then calls at 60 % of the most that it answered in that round: of the 16
callers, each at a steady pace (as wrk2 does it), and at random times, however many are under way.
Beside both stands the least that they could be (_latency.py). Figures are medians over rounds,
rates by the clock and by the servers' CPU time. At last, with the demo's model, 20 newer versions
under load.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import adapt_latency
import numpy as np
import torch
from _common import (
    REPOSITORY,
    environment,
    finish,
    interleaved,
    make_parser,
    positive_int,
    print_table,
)
from _http_load import Answers, Connection, closed_loop, for_seconds
from _latency import Latencies, latencies, latency_figures

import gmeta
from gmeta.adaptation.config import AlgorithmConfig
from gmeta.build import build_learner
from gmeta.export import write_model
from gmeta.server.versions import version_in
from gmeta.serving.folder import Columns, ExportedConfig
from gmeta_models import ModelConfig
from metaio.format.destination import replace_folder
from metaio.recipes.synthetic import SyntheticConfig, features

CLIENTS, TASKS, RELOADS = 16, 64, 20
WIDE_ROWS = adapt_latency.SUPPORT_ROWS, adapt_latency.QUERY_ROWS
INFER = "/v2/models/model/infer"
Rows = dict[str, list[Any]]


@dataclass(frozen=True)
class Workload:
    """A model, and requests of it in both servers' forms."""

    folder: Path
    plain: list[bytes]  # for the loop over gmeta.load
    protocol: list[bytes]  # the same as inference requests
    storing: list[bytes]  # with a task key
    hits: list[bytes]  # the task key and the query rows alone
    support: list[Rows]
    query: list[Rows]


def write_demo(folder: Path, lr: float) -> None:
    """The demo's model with random values."""
    config = ExportedConfig(
        model=ModelConfig(embedding_dim=16, hidden=(128, 64), bottom=(64,)),
        algorithm=AlgorithmConfig(inner_steps=1, inner_lr=lr, adapt_embeddings=True),
        loss="bce",
        features=features(SyntheticConfig()),
        columns=Columns("user", "click", None, {}),
        table_format="float32",
        source={},
        files={},
    )
    folder.mkdir()
    torch.manual_seed(0)
    learner = build_learner(config.features, config.model, config.algorithm, config.loss)
    rows_of = {table.name: table.num_rows for table in config.features.tables}
    write_model(
        folder, config, learner.state_dict(), lambda name: 0.1 * torch.randn(rows_of[name], 16)
    )


def demo_rows(rng: np.random.Generator, num_rows: int) -> Rows:
    """Columns of table ids."""
    told, rows = features(SyntheticConfig()), {}
    size = {table.name: table.num_rows for table in told.tables}
    for feature in told.single:
        rows[feature.name] = rng.integers(0, size[feature.table], num_rows).tolist()
    for feature in told.multi:
        lengths = rng.integers(0, 4, num_rows)
        drawn = [rng.integers(0, size[feature.table], length).tolist() for length in lengths]
        rows[feature.name] = drawn
    rows |= {name: rng.standard_normal(num_rows).tolist() for name in told.dense}
    return rows | {"click": rng.integers(0, 2, num_rows).tolist()}


def inputs_of(rows: Rows, prefix: str = "") -> list[dict[str, Any]]:
    """Columns as the protocol's inputs."""
    found: list[dict[str, Any]] = []

    def add(name: str, kind: str, data: list[Any]) -> None:
        found.append({"name": name, "datatype": kind, "shape": [len(data)], "data": data})

    for name, values in rows.items():
        if isinstance(values[0], list):
            add(f"{prefix}{name}", "INT64", [item for value in values for item in value])
            add(f"{prefix}{name}.lengths", "INT64", [len(value) for value in values])
        else:
            kinds = {int: "INT64", float: "FP64", str: "BYTES"}
            add(f"{prefix}{name}", kinds[type(values[0])], values)
    return found


def workload(
    folder: Path, make: Callable[[np.random.Generator, int], Rows], support: int, query: int
) -> Workload:
    """Requests of many tasks."""
    rng = np.random.default_rng(0)
    supports = [make(rng, support) for _ in range(TASKS)]
    queries = [make(rng, query) for _ in range(TASKS)]
    for rows in queries:
        del rows["click"]
    plain, protocol, storing, hits = [], [], [], []
    for task, (known, asked) in enumerate(zip(supports, queries, strict=True)):
        plain.append(json.dumps({"support": known, "query": asked}).encode())
        inputs = inputs_of(asked)
        both = {"inputs": [*inputs, *inputs_of(known, "support.")]}
        key = {"parameters": {"task_key": f"task {task}"}}
        protocol.append(json.dumps(both).encode())
        storing.append(json.dumps(both | key).encode())
        hits.append(json.dumps({"inputs": inputs} | key).encode())
    return Workload(folder, plain, protocol, storing, hits, supports, queries)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Command:
    """What starts a server."""

    arguments: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    port: int
    pid: int

    @property
    def cpu_s(self) -> float:
        """CPU seconds of its process and of the workers that this has now."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        ticks = 0
        for pid in (self.pid, *children):
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(after_name[11]) + int(after_name[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def servers(*commands: Command) -> Iterator[list[Server]]:
    """Processes that all answer on their ports, as long as the block lasts."""
    roots = (REPOSITORY, REPOSITORY / "models", REPOSITORY / "protos")
    path = os.pathsep.join(map(str, roots))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, *each.arguments], env=env, stderr=subprocess.DEVNULL)
        for each in commands
    ]
    try:
        for each, process in zip(commands, processes, strict=True):
            wait_for(each, process)
        pids = [process.pid for process in processes]
        yield [Server(each.port, pid) for each, pid in zip(commands, pids, strict=True)]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def wait_for(command: Command, process: subprocess.Popen[bytes]) -> None:
    """Until it takes connections."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", command.port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None:
                told = f"{' '.join(command.arguments)} ended with {process.returncode}"
                raise RuntimeError(told) from None
            time.sleep(0.05)


def locked(folder: Path) -> Command:
    """The loop over gmeta.load."""
    port, script = free_port(), Path(__file__).with_name("_lock_server.py")
    return Command((str(script), str(folder), str(port)), port)


def serving(folder: Path, workers: int) -> Command:
    """Ours."""
    port = free_port()
    arguments = (
        "-m", "gmeta", "serve", str(folder), "--name", "model", "--insecure", "--no-access-log",
        "--listen", f"127.0.0.1:{port}", "--workers", str(workers), "--reload-every", "0.05",
    )  # fmt: skip
    return Command(arguments, port)


def load(port: int, path: str, bodies: list[bytes], seconds: float) -> Answers:
    """A closed loop of so many seconds."""
    return asyncio.run(closed_loop(port, path, bodies, CLIENTS, for_seconds(seconds)))


def measure(work: Workload, workers: int, rounds: int, seconds: float) -> dict[str, float]:
    """All figures of one model but those of newer versions."""
    failed, per_round = 0, list[Latencies]()
    with servers(locked(work.folder), serving(work.folder, workers)) as (lock, ours):
        per_cpu_s: dict[str, list[float]] = {"lock": [], "serve": [], "hits": []}

        def rate(name: str, of: Server, path: str, bodies: list[bytes]) -> float:
            nonlocal failed
            before_s = of.cpu_s
            answers = load(of.port, path, bodies, seconds)
            failed += answers.failed
            # Neighbours of the machine take wall-clock time from both, and CPU time from none.
            per_cpu_s[name].append(len(answers.seconds) / (of.cpu_s - before_s))
            return answers.per_s

        def serve_rate() -> float:
            """Also the latencies of the same seconds."""
            nonlocal failed
            most = rate("serve", ours, INFER, work.protocol)
            found = latencies(
                ours.port, INFER, work.protocol, CLIENTS, most, seconds, len(per_round)
            )
            per_round.append(found)
            failed += found.failed
            return most

        for path, bodies in (("/predict", work.plain), (INFER, work.storing), (INFER, work.hits)):
            port = lock.port if path == "/predict" else ours.port
            for _ in range(2):  # warm-up, and every worker is given or told of every task
                asyncio.run(closed_loop(port, path, bodies, CLIENTS, counted(TASKS)))
        rates = interleaved(
            {
                "lock": lambda: rate("lock", lock, "/predict", work.plain),
                "serve": serve_rate,
                "hits": lambda: rate("hits", ours, INFER, work.hits),
            },
            rounds,
        )
        ratios = {
            name: float(np.median(np.array(rates[name]) / np.array(rates["lock"])))
            for name in ("serve", "hits")
        }
        cpu_ratios = {
            name: float(np.median(np.array(per_cpu_s[name]) / np.array(per_cpu_s["lock"])))
            for name in ("serve", "hits")
        }
        kept = asyncio.run(
            closed_loop(
                ours.port, INFER, work.protocol, CLIENTS, for_seconds(seconds / 2), keep=True
            )
        )
    return {
        "lock_per_s": float(np.median(rates["lock"])),
        "serve_per_s": float(np.median(rates["serve"])),
        "hits_per_s": float(np.median(rates["hits"])),
        "serve_ratio": ratios["serve"],
        "hits_ratio": ratios["hits"],
        "serve_cpu_ratio": cpu_ratios["serve"],
        "hits_cpu_ratio": cpu_ratios["hits"],
        **latency_figures(per_round),
        "failed": failed,
        "largest_difference": largest_difference(work, kept),
    }


def predicted(work: Workload) -> list[Any]:
    """What `gmeta predict` computes: all tasks in one call."""
    model = gmeta.load(work.folder)

    def joined(sides: list[Rows]) -> Rows:
        rows = {name: [v for side in sides for v in side[name]] for name in sides[0]}
        sizes = [len(next(iter(side.values()))) for side in sides]
        return rows | {"user": np.repeat(np.arange(len(sides)), sizes).tolist()}

    found = model.predict_tasks(joined(work.support), joined(work.query)).after_N.numpy()
    return np.split(found, len(work.query))


def largest_difference(work: Workload, answers: Answers) -> float:
    """Between what was answered, batched as it came, and what `gmeta predict` computes."""
    expected = predicted(work)
    return max(
        float(np.abs(np.array(answer["outputs"][0]["data"], np.float32) - expected[index]).max())
        for index, answer in answers.kept
    )


def reload_under_load(work: Workload, workers: int, folder: Path) -> dict[str, int]:
    """Newer versions while 16 callers call; each answer must be one version's."""
    state = {"ended": False}
    expected: dict[float, list[Any]] = {}
    rates = [0.2 + 0.01 * number for number in range(RELOADS + 1)]
    for lr in rates:
        write_demo(folder / f"lr {lr}", lr)
        expected[lr] = predicted(replace(work, folder=folder / f"lr {lr}"))
    # By the version's own hash, as the server names it.
    names = {version_in(folder / f"lr {lr}"): lr for lr in rates}
    served = folder / "served"
    (folder / f"lr {rates[0]}").rename(served)

    async def swap(port: int) -> None:
        probe = Connection(port)
        for lr in rates[1:]:
            (folder / f"lr {lr}").rename(folder / "next")
            await asyncio.to_thread(replace_folder, folder / "next", served)
            for _ in range(100):
                await asyncio.sleep(0.05)  # a look of every worker
                _, content = await probe.post(INFER, work.protocol[0])
                if names[json.loads(content)["model_version"]] == lr:
                    break
            await asyncio.sleep(0.1)  # and some requests of this version
        probe.close()
        state["ended"] = True

    async def run(port: int) -> Answers:
        bodies = [*work.protocol, *work.hits]
        await closed_loop(port, INFER, work.storing, 1, counted(len(work.storing)))
        calls = closed_loop(port, INFER, bodies, CLIENTS, lambda: not state["ended"], keep=True)
        task = asyncio.create_task(calls)
        await swap(port)
        return await task

    with servers(serving(served, workers)) as (ours,):
        answers = asyncio.run(run(ours.port))
    mixed = 0
    seen = set()
    for index, answer in answers.kept:
        version = answer["model_version"]
        seen.add(version)
        found = np.array(answer["outputs"][0]["data"], np.float32)
        right = expected[names[version]][index % TASKS]
        mixed += bool(np.abs(found - right).max() > 1e-6)
    return {
        "versions_seen": len(seen),
        "requests_meanwhile": len(answers.seconds),
        "failed_requests": answers.failed,
        "mixed_requests": mixed,
    }


def counted(number: int) -> Callable[[], bool]:
    left = iter(range(number))
    return lambda: next(left, None) is not None


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--workers", type=positive_int, default=1, help="of gmeta serve")
    options = parser.parse_args()
    rounds, seconds = options.rounds or (3 if options.quick else 10), 1.0 if options.quick else 5.0
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_demo(folder / "demo", 0.2)
        schema = adapt_latency.make_schema(100_000)
        adapt_latency.write(folder / "wide", schema, "float32", 1)
        works = {
            "demo": workload(folder / "demo", demo_rows, 16, 10),
            "wide": workload(
                folder / "wide",
                adapt_latency.raw_rows,
                adapt_latency.SUPPORT_ROWS,
                adapt_latency.QUERY_ROWS,
            ),
        }
        for name, work in works.items():
            found = measure(work, options.workers, rounds, seconds)
            figures |= {
                f"{name}_{what}": round(value, 9 if "diff" in what else 2)
                for what, value in found.items()
            }
        (folder / "reload").mkdir()
        figures |= reload_under_load(works["demo"], options.workers, folder / "reload")
    names = sorted({name.partition("_")[2] for name in figures if name.startswith("wide_")})
    print_table(
        ["", "demo", "26 x 32"],
        [[name, *(f"{figures[f'{model}_{name}']:.3g}" for model in works)] for name in names],
    )
    finish("serve", {**figures, "workers": options.workers, **environment(("torch", "fastapi"))})


if __name__ == "__main__":
    main()
