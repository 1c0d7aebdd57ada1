"""`gmeta serve` against the loop over `gmeta.load` in one FastAPI process (_lock_server.py).

Two models of random values: the demo's (everything adapts) with 16 support and 10 query rows, and
26 columns 32 wide with tables of 100,000 rows (of adapt_latency.py) with 20 and 100. 16 callers in
a closed loop, JSON both ways, all on the same cores. The servers take turns, and in each round ours
answers single calls too, then calls at 60 % of the most that it answered in that round: of the 16
callers, each at a steady pace (as wrk2 does it), and at random times, however many are under way.
Beside both stands the least that they could be (_latency.py). Figures are medians over rounds,
rates by the clock and by the servers' CPU time. Then, with the demo's model, 20 newer versions
under load. At last one caller with 500 candidates of one user, and with states in its requests
(_candidates.py)."""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import adapt_latency
import numpy as np
import torch
from _candidates import measure_candidates
from _common import environment, finish, interleaved, make_parser, positive_int, print_table
from _http_load import Answers, Connection, closed_loop, counted, for_seconds, inputs_of, run
from _latency import Latencies, latencies, latency_figures
from _servers import Server, locked, serving

import gmeta
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.runs.build import build_learner
from gmeta.serving.export import write_model
from gmeta.serving.exported_folder import ExportedColumns, ExportedConfig
from gmeta.serving.server.versions import version_in
from gmeta_models import ModelConfig
from metaio.format.atomic_folder import replace_folder
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
        model=ModelConfig(embedding_dim=16, hidden=(128, 64), options={"bottom": (64,)}),
        algorithm=AlgorithmConfig(inner_steps=1, inner_lr=lr, adapt_embeddings=True),
        loss="bce",
        features=features(SyntheticConfig()),
        columns=ExportedColumns("user", "click", None, {}),
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


def load(port: int, path: str, bodies: list[bytes], seconds: float) -> Answers:
    """A closed loop of so many seconds."""
    return run(closed_loop(port, path, bodies, CLIENTS, for_seconds(seconds)))


def measure(work: Workload, workers: int, rounds: int, seconds: float) -> dict[str, float]:
    """All figures of one model but those of newer versions."""
    failed, per_round = 0, list[Latencies]()
    with locked(work.folder) as lock, serving(work.folder, workers) as ours:
        lock.wait()
        ours.wait()
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
            # Warm-up, and every worker is given or told of every task.
            run(closed_loop(port, path, bodies, CLIENTS, counted(TASKS * workers)))
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
        kept = run(
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
    rates = [0.2 + 0.01 * number for number in range(RELOADS + 1)]
    for lr in rates:
        write_demo(folder / f"lr {lr}", lr)
    # By the version's own hash, as the server names it.
    names = {version_in(folder / f"lr {lr}"): lr for lr in rates}
    served = folder / "served"
    shutil.copytree(folder / f"lr {rates[0]}", served)

    async def swap(port: int) -> None:
        probe = Connection(port)
        for lr in rates[1:]:
            await asyncio.to_thread(shutil.copytree, folder / f"lr {lr}", folder / "next")
            await asyncio.to_thread(replace_folder, folder / "next", served)
            for _ in range(100):
                await asyncio.sleep(0.05)  # a look of every worker
                _, content = await probe.post(INFER, work.protocol[0])
                if names[json.loads(content)["model_version"]] == lr:
                    break
            await asyncio.sleep(0.1)  # and some requests of this version
        probe.close()
        state["ended"] = True

    async def reloads(port: int) -> Answers:
        bodies = [*work.protocol, *work.hits]
        await closed_loop(port, INFER, work.storing, 1, counted(len(work.storing)))
        calls = closed_loop(port, INFER, bodies, CLIENTS, lambda: not state["ended"], keep=True)
        task = asyncio.create_task(calls)
        await swap(port)
        return await task

    with serving(served, workers) as ours:
        # While it starts.
        expected = {lr: predicted(replace(work, folder=folder / f"lr {lr}")) for lr in rates}
        ours.wait()
        answers = run(reloads(ours.port))
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


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--workers", type=positive_int, default=1, help="of gmeta serve")
    options = parser.parse_args()
    rounds, seconds = options.rounds or (3 if options.quick else 10), 0.5 if options.quick else 4.0
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
        candidates = measure_candidates(folder / "candidates", rounds, seconds)
        figures |= {name: round(value, 3) for name, value in candidates.items()}
    names = sorted({name.partition("_")[2] for name in figures if name.startswith("wide_")})
    print_table(
        ["", "demo", "26 x 32"],
        [[name, *(f"{figures[f'{model}_{name}']:.3g}" for model in works)] for name in names],
    )
    finish("serve", {**figures, "workers": options.workers, **environment(("torch", "fastapi"))})


if __name__ == "__main__":
    main()
