"""A span for each inference, where OpenTelemetry and an exporter are there; else nothing."""

import importlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, final

from gmeta.errors import UserError
from gmeta.serving.server.inference_protocol import Stage

EXPORTER = "OTEL_TRACES_EXPORTER"
_LAST_SPANS_S = 5.0  # for their export, at the end
_OTLP = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}


@final
class RequestSpan:
    """The span of a request under way; of None nothing is kept."""

    def __init__(self, tracer: Any = None, span: Any = None) -> None:
        self._tracer, self._span = tracer, span

    def set_attributes(self, **values: Any) -> None:
        """Set attributes."""
        if self._span is not None:
            self._span.set_attributes({f"gmeta.{name}": value for name, value in values.items()})

    def add_stages(self, stages: Sequence[Stage]) -> None:
        """Add a child span for each stage; one of a batch stands in each of its requests' spans."""
        # Spans count from 1970, stages on a clock that never jumps.
        offset_ns = time.time_ns() - time.perf_counter_ns()
        for stage in stages if self._span is not None else ():
            began_ns, ended_ns = (int(at_s * 1e9) + offset_ns for at_s in stage[1:])
            # Inside `Tracing.span`: the current span is the request's.
            self._tracer.start_span(stage.name, start_time=began_ns).end(end_time=ended_ns)


@final
class Tracing:
    """Makes spans; without a provider it makes none."""

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider
        self._tracer = provider and provider.get_tracer("gmeta.server")

    def stop(self) -> None:
        """Export the last spans, which wait for a full batch, or give up after a while."""
        if self._provider is not None:
            # In a thread: shutdown waits for an unreachable collector much longer than a server may
            # drain.
            last = threading.Thread(target=self._provider.shutdown, daemon=True)
            last.start()
            last.join(_LAST_SPANS_S)

    @contextmanager
    def span(self, protocol: str, carrier: dict[str, str]) -> Iterator[RequestSpan]:
        """Trace a request inside, as a child of the span that the headers `carrier` name."""
        if self._tracer is None:
            yield RequestSpan()
            return
        # Imported by name: the package is an extra.
        propagate: Any = importlib.import_module("opentelemetry.propagate")
        context = propagate.extract(carrier)
        with self._tracer.start_as_current_span(f"infer {protocol}", context=context) as span:
            yield RequestSpan(self._tracer, span)


def tracing_from_environment(exporter: Any = None) -> Tracing:
    """Return the tracing that OTEL_TRACES_EXPORTER (console, otlp, none) asks for."""
    name = os.environ.get(EXPORTER, "none")
    if exporter is None and name == "none":
        return Tracing()
    # The parent first: find_spec raises for a part of a package that is not there.
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise UserError(
            f"{EXPORTER} = {name} needs the extra: pip install 'gmeta[opentelemetry]'. Install it, "
            "or unset the variable"
        )
    sdk: Any = importlib.import_module("opentelemetry.sdk.trace")
    export: Any = importlib.import_module("opentelemetry.sdk.trace.export")
    if exporter is None:
        exporter = export.ConsoleSpanExporter() if name == "console" else _otlp(name)
    resources: Any = importlib.import_module("opentelemetry.sdk.resources")
    resource = resources.Resource.create({"service.name": "gmeta-serve"})
    provider = sdk.TracerProvider(resource=resource)
    provider.add_span_processor(export.BatchSpanProcessor(exporter))
    return Tracing(provider)


def _otlp(name: str) -> Any:
    if name != "otlp":
        raise UserError(
            f"{EXPORTER} = {name} is unknown; allowed are console, otlp and none. Correct it"
        )
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    module = _OTLP.get(protocol)
    if module is None:
        raise UserError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL = {protocol} is unknown; allowed are {', '.join(_OTLP)}. "
            "Correct it"
        )
    try:
        return importlib.import_module(module).OTLPSpanExporter()
    except ImportError as error:
        raise UserError(
            f"{EXPORTER} = otlp needs the package opentelemetry-exporter-otlp-proto-"
            f"{protocol.partition('/')[0]}. Install it, or unset the variable"
        ) from error
