"""Events in a request: beside its rows, beside support rows, and appended to a kept task."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from prometheus_client import CollectorRegistry

from gmeta.serving.model_loader import load
from gmeta.serving.served_model import ServedModel
from gmeta.serving.server import traffic
from gmeta.serving.server.compute import answer_all
from gmeta.serving.server.inference_protocol import (
    InferenceAnswer,
    InferenceRequest,
    make_inference,
    model_metadata,
)
from gmeta.serving.server.input_columns import describe_columns
from gmeta.serving.server.request_errors import RequestError
from gmeta.serving.server.server_limits import RequestLimits
from gmeta.serving.server.shared_support import SharedSupport
from gmeta.serving.server.task_cache import TaskCache
from gmeta.serving.server.tensors import Tensor
from gmeta.serving.server.traffic import Traffic
from tests.serving.test_append_events import events_of, rows_of
from tests.serving.test_events import trained


def inputs(table: pa.Table, front: str, leave_out: tuple[str, ...] = ()) -> list[Tensor]:
    return [
        Tensor(front + name, (table.num_rows,), table[name].combine_chunks())
        for name in table.column_names
        if name not in leave_out
    ]


class Server:
    """A model, and the cache of a process."""

    def __init__(self, model: ServedModel, cache: TaskCache, version: str = "1") -> None:
        self.model, self.cache, self.version = model, cache, version
        self.columns = describe_columns(model.config)
        self.registry = CollectorRegistry()
        self._traffic = Traffic(self.registry)

    def request(
        self,
        query: pa.Table | None = None,
        support: pa.Table | None = None,
        events: pa.Table | None = None,
        most: int = 10_000,
        **parameters: Any,
    ) -> InferenceRequest:
        tensors = [] if query is None else inputs(query, "", ("time", "row", "click"))
        tensors += [] if support is None else inputs(support, "support.")
        tensors += [] if events is None else inputs(events, "events.")
        return make_inference(self.columns, tensors, parameters, (), RequestLimits(rows=most))

    def answer(self, *asked: Any, **more: Any) -> InferenceAnswer:
        request = self.request(*asked, **more)
        (outcome,) = answer_all(
            self.model, self.version, self.cache, [request], lambda stage, seconds: None,
            self._traffic,
        )  # fmt: skip
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome


def check(answer: InferenceAnswer, wanted: torch.Tensor, cache: str = "") -> None:
    found = torch.from_numpy(answer.outputs["prediction"])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert answer.cache == cache


@pytest.mark.parametrize("encoder", ["sasrec", "sim"])
def test_a_request_brings_events_and_a_kept_task_takes_them(
    tmp_path: Path, encoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "EVERY_BATCHES", 1)
    out, rows = trained(tmp_path, encoder)
    model, query = load(out), rows.slice(0, 20)
    store = tmp_path / "tasks.sqlite"
    caches = [TaskCache(1 << 20, 60.0, SharedSupport(store, 1 << 20)) for _ in range(2)]
    one, other = (Server(model, cache) for cache in caches)
    support, last = rows_of(rows, 3), int(rows["time"].to_numpy().max())
    parts = [events_of(3, 2, last + 100 * at, at) for at in range(4)]
    known = [pa.concat_tables(parts[:count]) for count in range(1, 5)]
    wanted = [model.adapt(support, events).predict(query) for events in known]
    # Without labels, and without a key.
    check(one.answer(query, events=parts[0]), model.adapt(events=parts[0]).predict(query))
    check(one.answer(query, support, parts[0]), wanted[0])
    # Kept, appended to, with rows to predict and without.
    check(one.answer(query, support, parts[0], task_key="u"), wanted[0], "stored")
    check(one.answer(query, events=parts[1], task_key="u"), wanted[1], "appended")
    check(one.answer(query, task_key="u"), wanted[1], "hit")
    assert one.answer(events=parts[2], task_key="u").cache == "appended"
    check(one.answer(query, task_key="u"), wanted[2], "hit")
    # Another process of the server, and a newer version.
    check(other.answer(query, task_key="u"), wanted[2], "restored")
    check(other.answer(query, events=parts[3], task_key="u"), wanted[3], "appended")
    check(one.answer(query, task_key="u"), wanted[3], "restored")
    newer = Server(model, caches[0], "2")
    check(newer.answer(query, task_key="u"), wanted[3], "restored")
    # Each time that it adapts; events have no label.
    scored = one.registry.get_sample_value("gmeta_serve_scored_label_count", {"label": ""})
    assert scored == 3 * support.num_rows
    # A state that the caller keeps.
    state = one.answer(query, support, parts[0], return_state=True).parameters["task_state"]
    answer = one.answer(query, events=parts[1], task_state=state)
    check(answer, wanted[1], "appended")
    kept = model.task(answer.state)
    torch.testing.assert_close(kept.predict(query), wanted[1], rtol=0, atol=1e-5)


def test_wrong_events_are_refused_in_a_line(tmp_path: Path) -> None:
    out, rows = trained(tmp_path, "sasrec")
    model, query = load(out), rows.slice(0, 4)
    server = Server(model, TaskCache(1 << 20, 60.0))
    events = events_of(3, 2, 0)

    def refused(*asked: Any, **more: Any) -> tuple[int, str]:
        with pytest.raises(RequestError) as caught:
            server.answer(*asked, **more)
        assert "\n" not in str(caught.value)
        return caught.value.status, str(caught.value)

    assert refused(query, events=events, task_key="nobody")[0] == 404
    status, message = refused(query, events=events.drop_columns(["time"]))
    assert status == 400
    assert message.startswith("events: event rows have no column time; ")
    misspelt = events.rename_columns(["itme", *events.column_names[1:]])
    status, message = refused(query, events=misspelt)
    assert status == 400
    assert message.startswith("input 'events.itme' is no column of this model; did you mean ")
    assert refused(events=events)[1].startswith("the request has no rows to predict")
    assert server.answer(query, rows_of(rows, 3), events, task_key="u").cache == "stored"
    status, message = refused(None, None, events_of(3, 8, 5_000), most=9, task_key="u")
    assert status == 413
    assert message.startswith("the task has 10 events; at most 9 are kept. Send it anew")
    names = [one["name"] for one in model_metadata("m", "1", server.columns)["inputs"]]
    assert {name for name in names if name.startswith("events.")} == {
        f"events.{name}" for name in ("time", "item", "kind", "number", "click")
    }
