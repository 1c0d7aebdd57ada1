"""Spans of requests: below the caller's own, with what was answered; none unless asked for."""

import importlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from gmeta.errors import UserError
from gmeta.serving.server import tracing
from gmeta.serving.server.inference_protocol import Stage
from gmeta.serving.server.tracing import Tracing, tracing_from_environment
from tests.serving.server.serving import INFER, post, request_of, running_server, service_of
from tests.support.exported import random_rows
from tests.support.waiting import PATIENCE_S, wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_request_is_its_callers_span(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    export: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = export.InMemorySpanExporter()
    with service_of(exported, tracing=tracing_from_environment(exporter)) as service:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        post(service, request_of(random_rows(6, seed=2)), headers=headers)
        post(service, {"inputs": []})
    wait_until(lambda: len(exporter.get_finished_spans()) == 6, "all spans are exported")
    *stages, right, wrong = exporter.get_finished_spans()
    # One for each stage, inside the request's, one after the other.
    assert [one.name for one in stages] == ["parse", "queue", "encode", "predict"]
    assert {one.parent.span_id for one in stages} == {right.context.span_id}
    times = [at for one in stages for at in (one.start_time, one.end_time)]
    assert times == sorted(times)
    slack_ns = 10**6  # the two clocks are read one after the other
    assert right.start_time - slack_ns <= times[0]
    assert times[-1] <= right.end_time + slack_ns
    assert right.name == "infer http"
    assert f"{right.context.trace_id:032x}" == TRACE
    assert f"{right.parent.span_id:016x}" == PARENT
    told = {"gmeta.rows": 6, "gmeta.version": service.loaded.version, "gmeta.cache": ""}
    assert dict(right.attributes) == told
    assert wrong.parent is None
    assert wrong.status.status_code.name == "ERROR"


def test_a_collector_gets_the_last_spans(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over OTLP, as the environment says, however long spans wait for a batch."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    pb: Any = importlib.import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    received: list[Any] = []

    def export(content: bytes, context: Any) -> Any:
        received.append(pb.ExportTraceServiceRequest.FromString(content))
        return pb.ExportTraceServiceResponse()

    collector = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(
        export, response_serializer=pb.ExportTraceServiceResponse.SerializeToString
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    collector.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"Export": handler}),)
    )
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    try:
        with running_server(exported) as server:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            url = f"http://127.0.0.1:{server.port}{INFER}"
            body = request_of(random_rows(6, seed=2))
            httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S)
            assert received == []
            os.kill(server.process.pid, signal.SIGTERM)
            wait_until(lambda: server.process.poll() is not None, "the server ends")
    finally:
        collector.stop(None)
    (message,) = received
    (of_service,) = message.resource_spans
    names = {each.key: each.value.string_value for each in of_service.resource.attributes}
    assert names["service.name"] == "gmeta-serve"
    *stages, span = of_service.scope_spans[0].spans
    assert [one.name for one in stages][:2] == ["parse", "queue"]
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == (
        "infer http", TRACE, PARENT,
    )  # fmt: skip


def test_nothing_is_traced_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    found = tracing_from_environment()
    with found.span("http", {}) as span:
        span.set_attributes(rows=1)
        span.add_stages([Stage("parse", 0.0, 1.0)])
    assert found._tracer is Tracing()._tracer is None


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the extra: pip install 'gmeta\[opentelemetry\]'"):
        tracing_from_environment()
