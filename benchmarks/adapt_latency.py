"""Serving one new task on one core: how long adapt and predict take from raw rows to numbers.

A DLRM over 26 sparse columns (16 hashed integers, 8 hashed texts, 2 text vocabularies of 1,000
values) and 13 dense ones, embeddings 32 wide, all of it adapting; tables of 100,000 rows (--quick:
10,000). adapt takes 20 support rows, predict 100 query rows; both begin with Python lists of raw
values, so encoding is in the time. Variants take turns, each call with other rows."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from _common import environment, finish, interleaved, make_parser, print_table, spread_of

import gmeta
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.runs.build import build_learner
from gmeta.serving.export import write_model
from gmeta.serving.exported_folder import ExportedColumns, ExportedConfig, vocabulary_file
from gmeta.serving.served_model import ServedModel
from gmeta.serving.table_format import TableFormat
from gmeta_models import ModelConfig
from metaio.prepare.schema.schema import Schema, make_features
from metaio.prepare.schema.schema_file import parse_schema

INTEGERS, TEXTS, VOCABULARIES, DENSE = 16, 8, 2, 13
VOCABULARY_VALUES, WIDTH = 1_000, 32
SUPPORT_ROWS, QUERY_ROWS, TASKS_AT_ONCE = 20, 100, 200
Rows = dict[str, list[Any]]


def make_schema(table_rows: int) -> Schema:
    """Hashed tables have so many rows; those of words as many as there are words."""
    hashed = [f"int{i}" for i in range(INTEGERS)] + [f"text{i}" for i in range(TEXTS)]
    single: list[dict[str, Any]] = [{"column": name, "hash": table_rows} for name in hashed]
    single += [{"column": f"word{i}", "vocabulary": 1} for i in range(VOCABULARIES)]
    dense = [{"column": f"dense{i}", "log1p": True, "standardise": True} for i in range(DENSE)]
    return parse_schema(
        {
            "task": {"column": "user"},
            "label": {"column": "click"},
            "single": single,
            "dense": dense,
            "episodes": {"by": "last", "query_rows": 1},
        }
    )


def write(folder: Path, schema: Schema, table_format: TableFormat, inner_steps: int) -> None:
    """A model of random values: what it predicts does not matter here."""
    words = pa.array(sorted(f"word {i}" for i in range(VOCABULARY_VALUES)))
    sizes = {f"word{i}": VOCABULARY_VALUES for i in range(VOCABULARIES)}
    config = ExportedConfig(
        model=ModelConfig(embedding_dim=WIDTH, hidden=(256, 128), options={"bottom": (64,)}),
        algorithm=AlgorithmConfig(inner_steps=inner_steps),
        loss="bce",
        features=make_features(schema, sizes),
        columns=ExportedColumns(
            "user", "click", schema, {f"dense{i}": (1.0, 0.5) for i in range(DENSE)}
        ),
        table_format=table_format,
        source={},
        files={},
    )
    (folder / "vocabulary").mkdir(parents=True)
    for table in sizes:
        pq.write_table(pa.table({"value": words}), folder / vocabulary_file(table))
    torch.manual_seed(0)
    learner = build_learner(config.features, config.model, config.algorithm, config.loss)
    rows_of = {table.name: table.num_rows for table in config.features.tables}
    write_model(
        folder, config, learner.state_dict(), lambda name: 0.05 * torch.randn(rows_of[name], WIDTH)
    )


def raw_rows(rng: np.random.Generator, num_rows: int) -> Rows:
    """Columns of raw values as a caller has them, before any encoding."""
    rows: Rows = {f"int{i}": rng.integers(0, 10**9, num_rows).tolist() for i in range(INTEGERS)}
    for i in range(TEXTS):
        rows[f"text{i}"] = [f"value {n}" for n in rng.integers(0, 10**6, num_rows)]
    for i in range(VOCABULARIES):
        rows[f"word{i}"] = [f"word {n}" for n in rng.integers(0, VOCABULARY_VALUES, num_rows)]
    rows |= {f"dense{i}": rng.exponential(1.0, num_rows).tolist() for i in range(DENSE)}
    return rows | {"click": rng.integers(0, 2, num_rows).tolist()}


def milliseconds(work: Callable[[], object]) -> float:
    """Of one call."""
    start_s = time.perf_counter()
    work()
    return (time.perf_counter() - start_s) * 1_000


def measures(name: str, model: ServedModel, seed: int) -> dict[str, Callable[[], float]]:
    """adapt and predict of one variant, each on rows that it has not seen."""
    rng = np.random.default_rng(seed)
    task = model.adapt(raw_rows(rng, SUPPORT_ROWS))

    # The rows are made outside of the clock, encoded inside.
    def adapt() -> float:
        rows = raw_rows(rng, SUPPORT_ROWS)
        return milliseconds(lambda: model.adapt(rows))

    def predict(predictor: Any) -> float:
        rows = raw_rows(rng, QUERY_ROWS)
        return milliseconds(lambda: predictor.predict(rows))

    return {
        f"{name} adapt": adapt,
        f"{name} predict": lambda: predict(task),
        f"{name} predict unadapted": lambda: predict(model),
    }


def many_tasks_per_s(model: ServedModel) -> float:
    """Tasks a second where one call adapts to all of them and predicts."""
    rng = np.random.default_rng(9)
    support = raw_rows(rng, TASKS_AT_ONCE * SUPPORT_ROWS)
    support["user"] = np.repeat(np.arange(TASKS_AT_ONCE), SUPPORT_ROWS).tolist()
    query = raw_rows(rng, TASKS_AT_ONCE * QUERY_ROWS)
    query["user"] = np.repeat(np.arange(TASKS_AT_ONCE), QUERY_ROWS).tolist()
    return TASKS_AT_ONCE / milliseconds(lambda: model.predict_tasks(support, query)) * 1_000


def main() -> None:
    options = make_parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    schema = make_schema(10_000 if options.quick else 100_000)
    variants: dict[str, tuple[TableFormat, int]] = {
        "k=1": ("float32", 1),
        "k=3": ("float32", 3),
        "k=1, int8": ("int8", 1),
    }
    with tempfile.TemporaryDirectory() as folder:
        works: dict[str, Callable[[], float]] = {}
        models, megabytes, load_ms = {}, {}, {}
        for seed, (name, (table_format, steps)) in enumerate(variants.items()):
            out = Path(folder) / name
            write(out, schema, table_format, steps)
            megabytes[name] = sum(p.stat().st_size for p in out.rglob("*") if p.is_file()) / 1e6
            # Without checksums, which read the whole of the tables.
            load_ms[name] = milliseconds(lambda out=out: gmeta.load(out, verify=False))
            models[name] = gmeta.load(out)
            works |= measures(name, models[name], seed)
        interleaved(works, 3)  # warm-up: torch chooses its kernels at first use
        times = interleaved(works, options.rounds or (50 if options.quick else 300))
        tasks_per_s = spread_of([many_tasks_per_s(models["k=1"]) for _ in range(3)]).median
    quantiles = {name: np.quantile(values, [0.5, 0.99]) for name, values in times.items()}
    print_table(
        ["milliseconds, 1 thread", "p50", "p99"],
        [[name, f"{p50:.2f}", f"{p99:.2f}"] for name, (p50, p99) in quantiles.items()],
    )
    figures = {
        f"{what}_ms_{q}": round(float(quantiles[f"k=1 {what}"][index]), 3)
        for what in ("adapt", "predict")
        for index, q in enumerate(("p50", "p99"))
    }
    figures |= {
        "adapt_k3_ms_p50": round(float(quantiles["k=3 adapt"][0]), 3),
        "adapt_int8_ms_p50": round(float(quantiles["k=1, int8 adapt"][0]), 3),
        "many_tasks_per_s": round(tasks_per_s),
        "load_unverified_ms": round(load_ms["k=1"], 1),
        "float32_mb": round(megabytes["k=1"], 1),
        "int8_mb": round(megabytes["k=1, int8"], 1),
    }
    finish("adapt_latency", {**figures, **environment(("torch", "pyarrow"))})


if __name__ == "__main__":
    main()
