"""Spans of requests: below the caller's own, with what was answered; none unless asked for."""

from pathlib import Path
from typing import Any

import pytest

from gmeta.errors import UserError
from gmeta.server import tracing
from gmeta.server.tracing import Tracing, tracing_from_environment
from tests.exported import random_rows
from tests.server.serving import post, request_of, service_of
from tests.waiting import wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_request_is_a_span_below_its_callers(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    export: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = export.InMemorySpanExporter()
    with service_of(exported, tracing=tracing_from_environment(exporter)) as service:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        post(service, request_of(random_rows(6, seed=2)), headers=headers)
        post(service, {"inputs": []})
    wait_until(lambda: len(exporter.get_finished_spans()) == 2, "both spans are exported")
    right, wrong = exporter.get_finished_spans()
    assert right.name == "infer http"
    assert f"{right.context.trace_id:032x}" == TRACE
    assert f"{right.parent.span_id:016x}" == PARENT
    version = service.loaded.version
    assert dict(right.attributes) == {"gmeta.rows": 6, "gmeta.version": version, "gmeta.cache": ""}
    assert wrong.parent is None
    assert wrong.status.status_code.name == "ERROR"


def test_nothing_is_traced_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    found = tracing_from_environment()
    with found.span("http", {}) as span:
        span.set(rows=1)
    assert found._tracer is Tracing()._tracer is None


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            "OTEL_TRACES_EXPORTER = zipkin is unknown; allowed are",
        ),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"},
            "OTEL_EXPORTER_OTLP_PROTOCOL = smoke is unknown; allowed are grpc, http/protobuf",
        ),
    ],
)
def test_an_unknown_exporter_is_told(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], told: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=told):
        tracing_from_environment()


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the extra: pip install 'gmeta\[opentelemetry\]'"):
        tracing_from_environment()
