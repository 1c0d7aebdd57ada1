"""Real service processes for the fault suite: SQLite store, gRPC, killed by signal.

They are forked from a server that has the imports ready, so that 200 kills fit into CI; nothing
else differs from `gmeta shard-service`.
"""

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

from gmeta.antdt.server import ServiceConfig, serve_until_signal
from tests.processes import with_imports_ready

CONTEXT = with_imports_ready()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(config: ServiceConfig, wall_clock_step_s: float) -> None:
    if wall_clock_step_s:
        began_s, real_time = time.monotonic(), time.time
        # The step comes while the service runs, as from an NTP daemon.
        time.time = lambda: (
            real_time() + (wall_clock_step_s if time.monotonic() > began_s + 1 else 0)
        )
    raise SystemExit(serve_until_signal(config))


class ServiceProcess:
    """One service on a fixed port and store; `start` after `kill` is a restart."""

    def __init__(
        self, store: Path, lease_ttl_s: float = 30.0, wall_clock_step_s: float = 0.0
    ) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.config = ServiceConfig(self.address, f"sqlite:///{store}", lease_ttl_s=lease_ttl_s)
        self.step_s = wall_clock_step_s
        self.process: Any = None

    def start(self) -> "ServiceProcess":
        self.process = CONTEXT.Process(target=_serve, args=(self.config, self.step_s), daemon=True)
        self.process.start()
        return self

    def wait_until_serving(self, timeout_s: float = 20.0) -> None:
        with grpc.insecure_channel(
            self.address, (("grpc.initial_reconnect_backoff_ms", 50),)
        ) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            until_s = time.monotonic() + timeout_s
            while stub.Check(request, wait_for_ready=True, timeout=timeout_s).status != 1:
                assert time.monotonic() < until_s
                time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.signal(signal.SIGTERM)
        self.process.join(20)
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
