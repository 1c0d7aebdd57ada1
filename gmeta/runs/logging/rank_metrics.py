"""Prometheus metrics of a training rank, where the environment asks for them."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gmeta.access.address import HIGHEST_PORT, split_address
from gmeta.access.credentials import is_loopback
from gmeta.access.http_edge import HttpRequest, RouteServer
from gmeta.access.protection import Protection
from gmeta.distributed.ranks import Ranks
from gmeta.errors import UserError
from gmeta.runs.logging.logger import RunInfo

LISTEN_VARIABLE = "GMETA_METRICS"  # HOST:PORT; the machine's rank r listens at PORT + r
_FILE_VARIABLES = {
    "tls_cert": "GMETA_METRICS_TLS_CERT",
    "tls_key": "GMETA_METRICS_TLS_KEY",
    "tls_client_ca": "GMETA_METRICS_TLS_CLIENT_CA",
    "tokens": "GMETA_METRICS_TOKENS",
}


@final
class RankMetrics:
    """What one rank has done, served at /metrics from a thread of its own."""

    def __init__(self, info: RunInfo, ranks: Ranks, wait_s: Callable[[], float]) -> None:
        """Make the metrics; `wait_s` returns for how long the rank has waited for data."""
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_DataWait(wait_s))
        self._steps = Counter("gmeta_train_steps", "Steps since the start.", registry=registry)
        text = "Rows of this rank since the start: rate() is its rows a second."
        self._rows = Counter("gmeta_train_rows", text, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"gmeta_train_{name}", text, labels, registry=registry)

        about = gauge("info", "1, with what the rank is of.", "run", "rank", "ranks")
        about.labels(info.folder.name, str(ranks.rank), str(ranks.world_size)).set(1)
        self._step = gauge("step", "Step that the run has reached.")
        gauge("planned_steps", "Steps of the whole run.").set(info.total_steps)
        self._values = gauge("value", "Of the newest reading: loss, rates, norms.", "name")
        self._scores = gauge("validation", "Of the newest validation.", "metric")
        text = "When this rank last knew of a whole checkpoint."
        self._saved = gauge("checkpoint_timestamp_seconds", text)
        if ranks.device.type == "cuda":
            memory = gauge("device_memory_bytes", "Of tensors on the GPU.")
            memory.set_function(lambda: torch.cuda.memory_allocated(ranks.device))
        self._step.set(info.done_steps)
        self._server: RouteServer | None = None

    def listen(self) -> None:
        """Serve where the environment says. Raises UserError: the address is wrong or taken, or can
        be reached from elsewhere without protection."""
        address = os.environ[LISTEN_VARIABLE]
        given = {name: os.environ.get(variable) for name, variable in _FILE_VARIABLES.items()}
        protection = Protection(**{name: Path(path) for name, path in given.items() if path})
        host, port = split_address(LISTEN_VARIABLE, address)
        port += int(os.environ.get("LOCAL_RANK", "0")) if port else 0
        if not is_loopback(host) and not protection.secured:
            raise UserError(
                f"{LISTEN_VARIABLE} = {address} can be reached from other machines. Set "
                f"{LISTEN_VARIABLE}_TLS_CERT, _TLS_KEY and one of _TOKENS and _TLS_CLIENT_CA; or "
                "listen on 127.0.0.1"
            )
        tls, tokens = protection.load_credentials()
        routes = {"/metrics": self._answer}
        try:
            port = min(port, HIGHEST_PORT)
            self._server = RouteServer(host, port, routes, lambda: True, tls, tokens)
        except OSError as error:
            raise UserError(
                f"{LISTEN_VARIABLE} = {address}: cannot listen on port {port}, {error.strerror}. "
                "Each rank of a machine takes the next port; choose another"
            ) from error
        self.port = self._server.start()

    def stop(self) -> None:
        """Serve no more."""
        if self._server is not None:
            self._server.stop()

    def count_step(self, step: int, num_rows: int) -> None:
        """Count a step with so many rows of this rank."""
        self._steps.inc()
        self._rows.inc(num_rows)
        self._step.set(step)

    def show(self, values: Mapping[str, Any]) -> None:
        """Show a reading's values."""
        _set_all(self._values, values)

    def show_scores(self, scores: Mapping[str, Any]) -> None:
        """Show a validation's scores."""
        _set_all(self._scores, scores)

    def note_checkpoint(self) -> None:
        """Note that a checkpoint is whole."""
        self._saved.set_to_current_time()

    def _answer(self, request: HttpRequest) -> None:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        request.send(200, encode(self.registry), content_type=content_type)


def _set_all(gauge: Gauge, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        # NaN where it is not defined: an alert's comparison with that does not hold.
        gauge.labels(name).set(float("nan") if value is None else float(value))


@final
class _DataWait(Collector):
    def __init__(self, wait_s: Callable[[], float]) -> None:
        self._wait_s = wait_s

    def collect(self) -> Iterable[Metric]:
        text = "Seconds that this rank has waited for data."
        yield CounterMetricFamily("gmeta_train_data_wait_seconds", text, value=self._wait_s())
