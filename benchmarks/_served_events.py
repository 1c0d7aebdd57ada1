"""Requests of `gmeta serve` for one user of a thousand events: one event more of a kept task, and
all of them anew.

A model of random values over states of `sasrec`, 64 wide, that adapts by 10 support rows and
predicts 10 rows. In turn one caller appends an event by `task_key`, and sends support rows and all
events up to it without a key: the predictions must be equal."""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _candidates import INFER, write_random_model
from _http_load import closed_loop, counted, inputs_of, run
from _servers import serving

from gmeta.config.algorithm import AlgorithmConfig
from gmeta_models import ModelConfig

EVENTS, SUPPORT, ROWS = 1_000, 10, 10
_COLUMNS = {"item": 10**6, "kind": 500}
_SCHEMA: dict[str, Any] = {
    "task": {"column": "user"},
    "label": {"column": "click"},
    "time": {"column": "time"},
    "single": [{"column": name, "hash": 10_000} for name in _COLUMNS],
    "events": {"columns": [*_COLUMNS], "longest": 0},
    "episodes": {"by": "last", "query_rows": 1},
}


def _make_bodies(turns: int) -> tuple[bytes, list[bytes], list[bytes]]:
    """Requests: of the rows and events that the task is kept with; of each further event; of all
    up to it."""
    rng, length = np.random.default_rng(0), EVENTS + turns
    rows = {name: rng.integers(0, most, length).tolist() for name, most in _COLUMNS.items()}
    rows["time"] = list(range(length))
    query = {name: rng.integers(0, most, ROWS).tolist() for name, most in _COLUMNS.items()}
    clicks = {"click": rng.integers(0, 2, SUPPORT).tolist()}
    support = {name: values[:SUPPORT] for name, values in rows.items()} | clicks
    candidates, known = inputs_of(query), inputs_of(support, "support.")

    def encode(first: int, stop: int, is_kept: bool) -> bytes:
        events = {name: values[first:stop] for name, values in rows.items()}
        before = known if first == SUPPORT else []
        body: dict[str, Any] = {"inputs": [*candidates, *before, *inputs_of(events, "events.")]}
        key = {"parameters": {"task_key": "user"}} if is_kept else {}
        return json.dumps(body | key).encode()

    places = range(EVENTS, length)
    appending = [encode(at, at + 1, True) for at in places]
    return (
        encode(SUPPORT, EVENTS, True),
        appending,
        [encode(SUPPORT, at + 1, False) for at in places],
    )


def measure_served_append(turns: int) -> dict[str, float]:
    """Time and bytes of a request that sends a thousand events, over one that appends one to the
    task: medians over the turns."""
    keeping, appending, anew = _make_bodies(turns)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        model = ModelConfig(name="melu", embedding_dim=64, events="sasrec")
        write_random_model(folder, _SCHEMA, model, AlgorithmConfig(adapt_embeddings=False))
        with serving(folder, 1) as server:
            server.wait()
            # Warm, with the first event and the shape of both.
            bodies = [keeping, anew[0]]
            for pair in zip(appending, anew, strict=True):
                bodies += pair
            answers = run(closed_loop(server.port, INFER, bodies, 1, counted(len(bodies)), True))
    assert not answers.failed, answers.failed
    predictions = [
        next(one["data"] for one in content["outputs"] if one["name"] == "prediction")
        for _, content in answers.kept[2:]
    ]
    np.testing.assert_allclose(predictions[::2], predictions[1::2], rtol=0, atol=1e-5)
    seconds = [statistics.median(answers.seconds[first::2]) for first in (2, 3)]
    return {
        "served_append_ms": 1e3 * seconds[0],
        "served_append_speedup": seconds[1] / seconds[0],
        "served_append_bytes_ratio": len(anew[0]) / len(appending[0]),
    }
