"""The service process: listens, recovers, serves, drains. SERVING within a second."""

import asyncio
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gmeta.access.address import DEFAULT_ADDRESS, check_free, split_address
from gmeta.access.auth import MAX_CALLS, Guard
from gmeta.access.credentials import is_loopback, take_port
from gmeta.access.descriptors import raise_descriptor_limit
from gmeta.access.errors import AntdtError
from gmeta.access.http_edge import Route, RouteServer
from gmeta.access.log import DecisionLog, event
from gmeta.access.protection import Protection
from gmeta.access.rate import CallLimits
from gmeta.antdt.dashboard import Dashboard
from gmeta.antdt.ledger.ledger import DEFAULT_LEASE_TTL_S
from gmeta.antdt.model import MAX_NAME_CHARS, MAX_WORKERS
from gmeta.antdt.rpc.event_loop import wait_for
from gmeta.antdt.service.edge import ShardServicer
from gmeta.antdt.service.tickets import deliver
from gmeta.antdt.storage.committer import Committer
from gmeta.antdt.storage.ledger_writer import GroupStats, LedgerWriter
from gmeta.antdt.storage.store_urls import open_store
from gmeta.antdt.stragglers.governor import Governor
from gmeta.antdt.stragglers.straggler_config import StragglerConfig
from gmeta.errors import UserError
from gmeta_keys.stop_flag import StopFlag
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb
from gmeta_protos.antdt.v1 import shard_service_pb2_grpc as pb_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ShardService"].full_name
MAX_MESSAGE_BYTES = 16 << 20  # a manifest; every other message is far smaller
DRAIN_S = 10.0  # how long calls under way at SIGTERM may take
AFTER_DRAIN_S = 5.0  # then gRPC cancels them, which may hang on a peer whose cable was pulled
HANDSHAKE_TIMEOUT_S = 10  # a connection that has said nothing by then is closed
MAX_CONNECTION_IDLE_S = 60  # closed without a call for so long; the next connects anew
# Descriptors that the store, the log and the HTTP address need beside the workers' connections.
RESERVED_DESCRIPTORS = 256
MAX_CONNECTIONS = 2 * MAX_WORKERS
FEW_CONNECTIONS = 1000  # larger jobs, or strangers' idle connections, could use them up
MAX_CONNECTION_AGE_S = 3600  # then a client shakes hands anew: an expired certificate is found out

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second service on the port must fail, not share the callers
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", 256),  # calls at once on one connection
    ("grpc.http2.bdp_probe", 0),  # messages are small: no pings to measure the bandwidth
    ("grpc.http2.max_ping_strikes", 0),  # clients of earlier releases ping every ten seconds
)
_TLS_OPTIONS = (
    ("grpc.max_connection_idle_ms", MAX_CONNECTION_IDLE_S * 1000),
    ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_S * 1000),
    ("grpc.max_connection_age_grace_ms", 60_000),
)


@dataclass(frozen=True)
class ServiceConfig(Protection):
    """How one service runs; `gmeta shard-service --help` explains each."""

    listen: str = DEFAULT_ADDRESS
    store_url: str = "memory:"
    job: str = "default"
    lease_ttl_s: float = DEFAULT_LEASE_TTL_S
    metrics_listen: str = ""
    ends_with_stdin: bool = False
    stragglers: StragglerConfig = field(default_factory=StragglerConfig)
    decisions: Path | None = None

    def __post_init__(self) -> None:
        """Raise ServiceStartError for a job without a printable name."""
        # It stands in manifests, logs and metrics as it is.
        if not (self.job.strip() and self.job.isprintable() and len(self.job) <= MAX_NAME_CHARS):
            raise ServiceStartError(
                f"--job is {self.job[:MAX_NAME_CHARS]!r}; allowed are 1 to {MAX_NAME_CHARS} "
                "printable characters. Name the job."
            )


class ServiceStartError(AntdtError, UserError):
    """The service cannot start: a port in use, no protection, a file that cannot be written."""


@final
class ShardServer:
    """A running service; it can also run inside another process (tests, one-machine jobs)."""

    def __init__(self, config: ServiceConfig) -> None:
        """Bind the address, recover the store and serve. Raise AntdtError."""
        self.config = config
        self.ended = threading.Event()  # nothing can be served any more
        _check_exposure(config)
        self._tls, self._tokens = config.load_credentials()
        certificates = self._tls is not None and self._tls.client_ca is not None
        is_guarded = self._tls or self._tokens
        self._guard = Guard(self._tokens, certificates, CallLimits()) if is_guarded else None
        self.edge = ShardServicer(
            config.lease_ttl_s, config.stragglers.monitor.window_s, self._guard
        )
        self._decisions = _decision_log(config.decisions)
        self.governor = Governor(
            config.stragglers, self.edge.ask, self._decisions and self._decisions.write
        )
        self.edge.metrics.add_governor(self.governor)
        self._dashboard = Dashboard(self.edge.ask, self.governor)
        self._serving = False
        self._stop_http: Callable[[], None] = lambda: None
        self._health = health.aio.HealthServicer()
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        # The store first: a second service on it must fail before it takes any port or call.
        # Whatever fails, store and port are released again.
        with ExitStack() as undo:
            self._store = open_store(config.store_url)
            undo.callback(self._store.close)
            self._server, self.port = wait_for(self._listen())
            undo.callback(lambda: wait_for(self._server.stop(None)))
            self._begin()
            undo.pop_all()

    @property
    def address(self) -> str:
        """Return HOST:PORT for clients, with the port that was bound."""
        return f"{split_address('--listen', self.config.listen)[0]}:{self.port}"

    async def _listen(self) -> tuple[Any, int]:
        options = [*_OPTIONS, *([] if self._tls is None else _TLS_OPTIONS)]
        options.append(("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_S * 1000))
        options.append(("grpc.max_allowed_incoming_connections", _max_connections()))
        server = grpc.aio.server(
            interceptors=[self._guard] if self._guard else [],
            options=options,
            # The guard counts calls that have shown a proof: others must not take up places.
            maximum_concurrent_rpcs=None if self._guard else MAX_CALLS,
        )
        pb_grpc.add_ShardServiceServicer_to_server(self.edge, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        host, port = split_address("--listen", self.config.listen)
        if port:
            check_free("--listen", host, port)
        try:
            return server, take_port(server, self.config.listen, self._tls)
        except RuntimeError as error:
            raise ServiceStartError(
                f"cannot listen on {self.config.listen}: the port was taken just now. Start the "
                "service again, or choose another --listen."
            ) from error

    def _begin(self) -> None:
        began_s = time.perf_counter()
        wait_for(self._server.start())  # health answers NOT_SERVING while the store is read
        committer = Committer(self._store, time.monotonic, self.config.job, self.config.lease_ttl_s)
        # Before the writer: a port that is taken must end the start before a call is answered.
        self.metrics_port = self._start_http()
        self._writer = LedgerWriter(committer, deliver, self._observe, self._set_ended)
        self._writer.start()
        self.edge.open(self._writer)
        self.governor.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)
        event(
            logging.INFO,
            "serving",
            listen=self.address,
            store=self.config.store_url,
            job=self.config.job,
            service_epoch=committer.service_epoch,
            num_events=committer.ledger.num_events,
            metrics_port=self.metrics_port,
            recovery_ms=round((time.perf_counter() - began_s) * 1000, 1),
        )

    def _start_http(self) -> int:
        if not self.config.metrics_listen:
            return 0
        host, port = split_address("--metrics-listen", self.config.metrics_listen)
        routes: dict[str, Route] = {
            "/": self._dashboard.page,
            "/events": self._dashboard.events,
            "/metrics": self.edge.metrics.answer,
        }
        try:
            server = RouteServer(host, port, routes, lambda: self._serving, self._tls, self._tokens)
        except OSError as error:
            raise ServiceStartError(
                f"cannot listen on {self.config.metrics_listen} for metrics: {error.strerror}. "
                "Choose another --metrics-listen."
            ) from error
        self._stop_http = server.stop
        return server.start()

    def stop(self, drain_s: float = DRAIN_S) -> None:
        """Refuse new calls, answer those under way, store a snapshot and release the store."""
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        # Streams first: gRPC would wait for them as long as a drain may take.
        wait_for(self.edge.close())
        self.governor.stop()
        self._dashboard.close()
        wait_for(_drain_server(self._server, drain_s))
        # After the last call and the governor, which both wait for its answers.
        self._writer.stop()
        self._stop_http()
        self._store.close()
        event(logging.INFO, "stopped", listen=self.address)

    def _set_health(self, status: int) -> None:
        self._serving = status == health_pb2.HealthCheckResponse.SERVING
        for name in ("", SERVICE_NAME):
            wait_for(self._health.set(name, status))

    def _observe(self, stats: GroupStats) -> None:
        if stats.num_requests:
            self.edge.metrics.append_seconds.observe(stats.append_s)
            self.edge.metrics.group_size.observe(stats.num_requests)
        for token, worker_id in stats.expired:
            self.edge.metrics.expired.inc()
            event(logging.WARNING, "lease_expired", token=token, worker_id=worker_id)

    def _set_ended(self) -> None:
        event(logging.ERROR, "writer_ended", store=self.config.store_url)
        self.ended.set()


def serve_until_signal(config: ServiceConfig) -> int:
    """Run a service until SIGTERM or SIGINT, then return 0; 1 if it lost the store."""
    # Each worker's connection takes one.
    limit = raise_descriptor_limit(MAX_CONNECTIONS + RESERVED_DESCRIPTORS)
    if (most := _max_connections()) < FEW_CONNECTIONS:
        event(logging.WARNING, "few_descriptors", limit=limit, max_connections=most)
    stop = StopFlag()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.stop)
    if config.ends_with_stdin:
        threading.Thread(target=_wait_for_end_of_stdin, args=(stop,), daemon=True).start()
    server = ShardServer(config)
    # Polled: a signal's handler may set no event that the thread it interrupts waits for.
    while not stop and not server.ended.wait(0.2):
        pass
    event(logging.INFO, "draining", signal=bool(stop))
    server.stop()
    return 1 if server.ended.is_set() else 0


def _check_exposure(config: ServiceConfig) -> None:
    """Raise ServiceStartError for an unprotected address that other machines can reach."""
    if config.secured:
        return
    addresses = (("--listen", config.listen), ("--metrics-listen", config.metrics_listen))
    for option, address in addresses:
        if address and not is_loopback(split_address(option, address)[0]):
            raise ServiceStartError(
                f"{option} {address} can be reached from other machines, and of what protects a "
                f"service there is {config.protection}; --tls-cert, --tls-key and one of "
                "--tls-client-ca and --tokens are needed. Pass them, or listen on 127.0.0.1."
            )


def _max_connections() -> int:
    """Return how many connections of callers the process has descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = max(soft - RESERVED_DESCRIPTORS, soft // 2)
    return MAX_CONNECTIONS if soft < 0 else min(MAX_CONNECTIONS, left)


def _decision_log(path: Path | None) -> DecisionLog | None:
    try:
        return None if path is None else DecisionLog(path)
    except OSError as error:
        raise ServiceStartError(
            f"--decisions {path} cannot be written: {error.strerror}. Name a file in a writable "
            "folder."
        ) from error


def _wait_for_end_of_stdin(stop: StopFlag) -> None:
    """Stop the service when standard input ends."""
    # The parent holds the other end of the pipe: however it dies, the kernel closes it.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop.stop()


async def _drain_server(server: grpc.aio.Server, drain_s: float) -> None:
    """Stop the server within its drain and a little more."""
    # gRPC may not report the end at all: see AFTER_DRAIN_S.
    stopping = asyncio.ensure_future(server.stop(drain_s))
    await asyncio.wait({stopping}, timeout=drain_s + AFTER_DRAIN_S)
