"""Real service processes for the fault suite: SQLite store, gRPC, killed by signal. They are forked
from a server that has the imports ready, so that many kills fit into CI; nothing else differs from
`gmeta shard-service`."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gmeta.antdt.service.shard_server import ServiceConfig, serve_until_signal
from tests.support.processes import with_imports_ready
from tests.support.waiting import PATIENCE_S, wait_until

CONTEXT = with_imports_ready()
_held: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody else is given by chance as long as this process lives: it stays bound.
    Who listens on it sets SO_REUSEADDR, as servers do, and may; until then callers are refused."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    return int(held.getsockname()[1])


def _serve(config: ServiceConfig, wall_step_s: Any, skipped_s: Any) -> None:
    real_time, real_monotonic = time.time, time.monotonic
    time.time = lambda: real_time() + wall_step_s.value
    time.monotonic = lambda: real_monotonic() + skipped_s.value
    raise SystemExit(serve_until_signal(config))


class ServiceProcess:
    """A service on a fixed port and store; its clocks go ahead by what a test says."""

    def __init__(self, store: Path, lease_ttl_s: float = 30.0) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.config = ServiceConfig(self.address, f"sqlite:///{store}", lease_ttl_s=lease_ttl_s)
        # Without a lock: a service that is killed while it holds one would leave it locked.
        self._wall_step_s = CONTEXT.Value("d", 0.0, lock=False)
        self._skipped_s = CONTEXT.Value("d", 0.0, lock=False)
        self.process: Any = None

    def start(self) -> "ServiceProcess":
        arguments = (self.config, self._wall_step_s, self._skipped_s)
        self.process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        return self

    def wait_until_serving(self) -> None:
        with grpc.insecure_channel(
            self.address, (("grpc.initial_reconnect_backoff_ms", 50),)
        ) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            wait_until(
                lambda: stub.Check(request, wait_for_ready=True, timeout=PATIENCE_S).status == 1,
                "serving",
            )

    def step_wall_clock(self, seconds: float) -> None:
        """As an NTP daemon does, while the service runs."""
        self._wall_step_s.value += seconds

    def let_time_pass(self, seconds: float) -> None:
        """For the service, at once: its monotonic clock and so its leases' ages."""
        self._skipped_s.value += seconds

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.signal(signal.SIGTERM)
        self.process.join(PATIENCE_S)
        return int(self.process.exitcode)


@contextmanager
def running(store: Path, **options: Any) -> Iterator[ServiceProcess]:
    service = ServiceProcess(store, **options).start()
    try:
        service.wait_until_serving()
        yield service
    finally:
        if service.process.is_alive():
            service.kill()
