"""Requests of one user and many candidates: the user's columns once, and in each row.

A DLRM of random values: 12 user columns, the last 20 items that the user saw and their categories,
2 dense columns of the user; 3 columns and a price of a candidate. The user's task is kept or adapts
by 16 support rows; or it is a state in the request, of the version that answers or of the one
before."""

import base64
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import interleaved
from _http_load import closed_loop, counted, for_seconds, inputs_of, run
from _servers import Server, serving

import gmeta
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.runs.build import build_learner
from gmeta.serving.export import write_model
from gmeta.serving.exported_folder import ExportedColumns, ExportedConfig
from gmeta_models import ModelConfig
from metaio.prepare.schema.schema import make_features
from metaio.prepare.schema.schema_file import parse_schema

CANDIDATES, USERS, SUPPORT, HISTORY, WIDTH = 500, 16, 16, 20, 16
_TURNS = 5  # of each form in a round: neighbours of the machine come and go
INFER = "/v2/models/model/infer"
_NUMBERS, _WORDS, _OF_ITEM = [f"user{i}" for i in range(10)], ["country", "device"], "item"
_LISTS = {"seen_items": 10**6, "seen_categories": 500}
_Rows = dict[str, list[Any]]


def write_candidates_model(folder: Path, rate: float) -> None:
    """The model: what it predicts does not matter here."""
    names = [*_NUMBERS, *_WORDS, _OF_ITEM, "category", "brand"]
    schema = {
        "task": {"column": "user"},
        "label": {"column": "click"},
        "single": [{"column": name, "hash": 10_000} for name in names],
        "multi": [{"column": name, "hash": 10_000} for name in _LISTS],
        "dense": [{"column": name} for name in ("age", "activity", "price")],
        "episodes": {"by": "last", "query_rows": 1},
    }
    model = ModelConfig(embedding_dim=WIDTH, hidden=(128, 64), options={"bottom": (64,)})
    algorithm = AlgorithmConfig(inner_steps=1, inner_lr=rate, adapt_embeddings=True)
    write_random_model(folder, schema, model, algorithm)


def write_random_model(
    folder: Path, body: dict[str, Any], model: ModelConfig, algorithm: AlgorithmConfig
) -> None:
    """An export of random values for the clicks of users, by a schema of hashed columns."""
    schema = parse_schema(body)
    config = ExportedConfig(
        model=model,
        algorithm=algorithm,
        loss="bce",
        features=make_features(schema, {}),
        columns=ExportedColumns("user", "click", schema, {}),
        table_format="float32",
        source={},
        files={},
    )
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    learner = build_learner(config.features, config.model, config.algorithm, config.loss)
    rows_of = {table.name: table.num_rows for table in config.features.tables}
    width = model.embedding_dim
    write_model(
        folder, config, learner.state_dict(), lambda name: 0.05 * torch.randn(rows_of[name], width)
    )


def _user(rng: np.random.Generator) -> _Rows:
    rows: _Rows = {name: rng.integers(0, 10**6, 1).tolist() for name in _NUMBERS}
    rows |= {name: [f"{name} {rng.integers(0, 1_000)}"] for name in _WORDS}
    rows |= {name: [rng.integers(0, most, HISTORY).tolist()] for name, most in _LISTS.items()}
    return rows | {"age": [float(rng.integers(18, 80))], "activity": [round(rng.random(), 3)]}


def _items(rng: np.random.Generator, num_rows: int) -> _Rows:
    return {
        _OF_ITEM: rng.integers(0, 10**6, num_rows).tolist(),
        "category": rng.integers(0, 500, num_rows).tolist(),
        "brand": rng.integers(0, 5_000, num_rows).tolist(),
        "price": rng.exponential(1.0, num_rows).round(2).tolist(),
    }


def _bodies(with_support: bool) -> tuple[dict[str, list[bytes]], list[bytes]]:
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
    return {"once": once, "full": full}, keeping


def measure_candidates(folder: Path, rounds: int, seconds: float) -> dict[str, float]:
    """p50 of one caller and the server's CPU time a request, as ratios of columns once to in full
    and of a state of the version before to one of this; and of bytes."""
    old, new = folder / "old", folder / "new"
    for version, rate in ((old, 0.1), (new, 0.2)):
        write_candidates_model(version, rate)
    figures: dict[str, float] = {}
    with serving(new, 1) as server:
        server.wait()
        for name, with_support in (("candidates", False), ("candidates_adapted", True)):
            bodies, keeping = _bodies(with_support)
            if not with_support:
                run(closed_loop(server.port, INFER, keeping, 1, counted(USERS)))
            sizes = [sum(map(len, sent)) for sent in bodies.values()]
            figures |= _compare(name, server, bodies, rounds, seconds)
            figures[f"{name}_bytes_ratio"] = sizes[0] / sizes[1]
        states = _state_bodies(old, new)
        figures |= _compare("state_renewal", server, states, rounds, seconds)
    figures["state_renewal_ratio"] = figures.pop("state_renewal_p50_ratio")
    return figures


def _compare(
    name: str, server: Server, bodies: Mapping[str, list[bytes]], rounds: int, seconds: float
) -> dict[str, float]:
    """The first form's requests against the second's, which take short turns."""
    taken_s: dict[str, list[float]] = {form: [] for form in bodies}
    cpu_s, failed = dict.fromkeys(bodies, 0.0), 0

    def call(form: str) -> float:
        nonlocal failed
        before_s = server.cpu_s
        turn = for_seconds(seconds / _TURNS)
        answers = run(closed_loop(server.port, INFER, bodies[form], 1, turn))
        cpu_s[form] += server.cpu_s - before_s
        taken_s[form] += answers.seconds
        failed += answers.failed
        return answers.per_s

    for sent in bodies.values():  # warm-up
        run(closed_loop(server.port, INFER, sent, 1, counted(2 * USERS)))
    interleaved({form: partial(call, form) for form in bodies}, rounds * _TURNS)
    first, second = bodies
    each_s = {form: cpu_s[form] / len(taken_s[form]) for form in bodies}
    return {
        f"{name}_p50_ratio": float(np.median(taken_s[first]) / np.median(taken_s[second])),
        f"{name}_p50_ms": float(np.median(taken_s[first])) * 1_000,
        f"{name}_cpu_ratio": each_s[first] / each_s[second],
        f"{name}_failed": failed,
    }


def _state_bodies(old: Path, new: Path) -> dict[str, list[bytes]]:
    """Requests of 100 candidates with a state of either version."""
    rng, bodies = np.random.default_rng(0), dict[str, list[bytes]]()
    users = [_user(rng) for _ in range(USERS)]
    for form, version in (("renewed", old), ("kept", new)):
        model, bodies[form] = gmeta.load(version), []
        for user in users:
            support = {name: values * SUPPORT for name, values in user.items()}
            support |= _items(rng, SUPPORT) | {"click": rng.integers(0, 2, SUPPORT).tolist()}
            state = model.adapt(support).state(with_support=True)
            body = {
                "inputs": inputs_of(user | _items(rng, 100)),
                "parameters": {"task_state": base64.b64encode(state).decode()},
            }
            bodies[form].append(json.dumps(body).encode())
    return bodies
