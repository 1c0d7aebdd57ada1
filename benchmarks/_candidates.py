"""Requests of one user and many candidates: the user's columns once, and in each row.

A DLRM of random values: 8 user columns and a history of 20 items, 2 dense columns of the user, 3
columns and a price of a candidate. The user's task is kept or adapts by 16 support rows."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import interleaved
from _http_load import closed_loop, counted, for_seconds, inputs_of, run
from _servers import serving

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.runs.build import build_learner
from gmeta.serving.export import write_model
from gmeta.serving.exported_folder import ExportedColumns, ExportedConfig
from gmeta_models import ModelConfig
from metaio.prepare.schema.schema import make_features
from metaio.prepare.schema.schema_file import parse_schema

CANDIDATES, USERS, SUPPORT, HISTORY, WIDTH = 500, 16, 16, 20, 16
INFER = "/v2/models/model/infer"
_NUMBERS, _WORDS, _OF_ITEM = [f"user{i}" for i in range(6)], ["country", "device"], "item"
_Rows = dict[str, list[Any]]


@dataclass(frozen=True)
class _Bodies:
    once: list[bytes]
    full: list[bytes]


def write_candidates_model(folder: Path) -> None:
    """The model: what it predicts does not matter here."""
    names = [*_NUMBERS, *_WORDS, _OF_ITEM, "category", "brand"]
    schema = parse_schema(
        {
            "task": {"column": "user"},
            "label": {"column": "click"},
            "single": [{"column": name, "hash": 10_000} for name in names],
            "multi": [{"column": "history", "hash": 10_000}],
            "dense": [{"column": name} for name in ("age", "activity", "price")],
            "episodes": {"by": "last", "query_rows": 1},
        }
    )
    config = ExportedConfig(
        model=ModelConfig(embedding_dim=WIDTH, hidden=(128, 64), options={"bottom": (64,)}),
        algorithm=AlgorithmConfig(inner_steps=1, adapt_embeddings=True),
        loss="bce",
        features=make_features(schema, {}),
        columns=ExportedColumns("user", "click", schema, {}),
        table_format="float32",
        source={},
        files={},
    )
    folder.mkdir()
    torch.manual_seed(0)
    learner = build_learner(config.features, config.model, config.algorithm, config.loss)
    rows_of = {table.name: table.num_rows for table in config.features.tables}
    write_model(
        folder, config, learner.state_dict(), lambda name: 0.05 * torch.randn(rows_of[name], WIDTH)
    )


def _user(rng: np.random.Generator) -> _Rows:
    rows: _Rows = {name: rng.integers(0, 10**6, 1).tolist() for name in _NUMBERS}
    rows |= {name: [f"{name} {rng.integers(0, 1_000)}"] for name in _WORDS}
    rows["history"] = [rng.integers(0, 10**6, HISTORY).tolist()]
    return rows | {"age": [float(rng.integers(18, 80))], "activity": [round(rng.random(), 3)]}


def _items(rng: np.random.Generator, num_rows: int) -> _Rows:
    return {
        _OF_ITEM: rng.integers(0, 10**6, num_rows).tolist(),
        "category": rng.integers(0, 500, num_rows).tolist(),
        "brand": rng.integers(0, 5_000, num_rows).tolist(),
        "price": rng.exponential(1.0, num_rows).round(2).tolist(),
    }


def _bodies(with_support: bool) -> tuple[_Bodies, list[bytes]]:
    """Requests of many users, and those that keep their tasks."""
    rng, once, full, keeping = np.random.default_rng(0), [], [], []
    for number in range(USERS):
        user, asked = _user(rng), _items(rng, CANDIDATES)
        labels = {"click": rng.integers(0, 2, SUPPORT).tolist()}
        known = _items(rng, SUPPORT) | labels
        key = {} if with_support else {"parameters": {"task_key": f"user {number}"}}
        for bodies, repeats in ((once, (1, 1)), (full, (CANDIDATES, SUPPORT))):
            query, support = ({name: values * n for name, values in user.items()} for n in repeats)
            inputs = inputs_of(query | asked)
            support_inputs = inputs_of(support | known, "support.")
            sent = [*inputs, *support_inputs] if with_support else inputs
            bodies.append(json.dumps({"inputs": sent, **key}).encode())
        keeping.append(json.dumps({"inputs": support_inputs, **key}).encode())
    return _Bodies(once, full), keeping


def measure_candidates(folder: Path, rounds: int, seconds: float) -> dict[str, float]:
    """Medians over rounds of p50 of one caller, as ratios of once to in full, and of bytes."""
    write_candidates_model(folder)
    figures: dict[str, float] = {}
    with serving(folder, 1) as server:
        server.wait()
        for name, with_support in (("candidates", False), ("candidates_adapted", True)):
            bodies, keeping = _bodies(with_support)
            if not with_support:
                run(closed_loop(server.port, INFER, keeping, 1, counted(USERS)))
            figures |= {
                f"{name}_{what}": value
                for what, value in _compare(server.port, bodies, rounds, seconds).items()
            }
    return figures


def _compare(port: int, bodies: _Bodies, rounds: int, seconds: float) -> dict[str, float]:
    failed = 0

    def p50_ms(sent: list[bytes]) -> float:
        nonlocal failed
        answers = run(closed_loop(port, INFER, sent, 1, for_seconds(seconds)))
        failed += answers.failed
        return float(np.median(answers.seconds)) * 1_000

    works = {"once": lambda: p50_ms(bodies.once), "full": lambda: p50_ms(bodies.full)}
    interleaved(works, 1)  # warm-up
    p50 = {form: np.array(values) for form, values in interleaved(works, rounds).items()}
    sizes = [sum(map(len, sent)) for sent in (bodies.once, bodies.full)]
    return {
        "p50_ratio": float(np.median(p50["once"] / p50["full"])),
        "p50_ms": float(np.median(p50["once"])),
        "bytes_ratio": sizes[0] / sizes[1],
        "failed": failed,
    }
