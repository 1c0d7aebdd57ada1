"""One worker process: loads the model, listens, and answers until a signal ends it."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import grpc
import torch
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gmeta.access.address import AddressError, split_address
from gmeta.access.credentials import ServerTls, take_port
from gmeta.access.descriptors import raise_descriptor_limit
from gmeta.access.log import event
from gmeta.platform.numerics import keep_freed_memory
from gmeta.serving.server.access import ServerAccess
from gmeta.serving.server.grpc_service import (
    SERVICE_NAME,
    InferenceGuard,
    UnknownCalls,
    inference_handler,
)
from gmeta.serving.server.http_app import http_app
from gmeta.serving.server.http_connection import KEEP_ALIVE_S, http_server, reload_certificates
from gmeta.serving.server.inference_service import InferenceService
from gmeta.serving.server.serve_config import ServeConfig
from gmeta.serving.server.server_metrics import ServerMetrics, share_metrics
from gmeta.serving.server.shared_support import SharedSupport
from gmeta.serving.server.task_cache import TaskCache
from gmeta.serving.server.tracing import tracing_from_environment
from gmeta.serving.server.version_loader import load_version
from gmeta_keys.stop_flag import stop_signals

BACKLOG = 1024
_HANDSHAKE_MS = 10_000
# Of open files: as many as a service of shards has; what files and logs take of them.
_DESCRIPTORS, _RESERVED = 1 << 17, 256
_REPORT_EVERY_S = 1.0
_KEPT_BYTES = 256 << 20  # of memory that batches freed, kept for the next


def run_worker(config: ServeConfig, report_life: Callable[[int], None]) -> None:
    """Serve until a signal, then answer what is under way and return; `report_life` is called each
    second while it serves, unless it hangs, with the port."""
    torch.set_num_threads(config.threads)
    keep_freed_memory(_KEPT_BYTES)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_stopped(config, report_life))


async def _serve_until_stopped(config: ServeConfig, report_life: Callable[[int], None]) -> None:
    share_metrics()
    raise_descriptor_limit(_DESCRIPTORS)
    tls, tokens = config.load_credentials()
    certificates = tls is not None and tls.client_ca is not None
    # The addresses first: one that is taken must end the start before a large model is read.
    sockets = [bind_socket("--listen", config.listen, config.workers > 1)]
    shared = None
    if config.shared_file is not None:
        shared = SharedSupport(config.shared_file, config.cache_bytes)
    service = InferenceService(
        config,
        load_version,
        TaskCache(config.cache_bytes, config.cache_ttl_s, shared),
        ServerMetrics,
        ServerAccess(tokens, certificates),
        tracing_from_environment(),
    )
    service.warm_up()
    ended = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    server = http_server(http_app(service), config.max_connections, config.drain_s, tls)
    coroutines: list[Coroutine[Any, Any, Any]] = [server.serve(sockets)]
    if config.reload_every_s:
        coroutines.append(service.watch())
    if tls is not None and server.context is not None:
        coroutines.append(reload_certificates(server.context, tls))
    tasks = [asyncio.create_task(each) for each in coroutines]
    # One of several workers listens only now, and the kernel may refuse it.
    while not server.started and not tasks[0].done():
        await asyncio.sleep(0.01)
    if tasks[0].done():
        try:
            tasks[0].result()
        except OSError as error:
            raise _bind_error("--listen", config.listen, error) from error
    grpc_server, grpc_health, grpc_port = None, None, 0
    if config.grpc_listen:
        grpc_server, grpc_health, grpc_port = await _grpc_server(config, service, tls)
    port = sockets[0].getsockname()[1]
    listen = f"{split_address('--listen', config.listen)[0]}:{port}"
    what = {"model": config.name, "version": service.loaded.version, "folder": str(config.folder)}
    event(logging.INFO, "serving", listen=listen, grpc_port=grpc_port, **what)
    tasks.append(asyncio.create_task(_report_life(service, partial(report_life, port))))
    await asyncio.wait([asyncio.create_task(ended.wait()), tasks[0]], return_when="FIRST_COMPLETED")
    event(logging.INFO, "draining", listen=config.listen)
    service.ready = False
    if grpc_health is not None:
        await grpc_health.enter_graceful_shutdown()
    # Balancers look every few seconds, and send requests until they have.
    await asyncio.sleep(config.drain_delay_s)
    server.should_exit = True
    ending = [tasks[0]]
    if grpc_server is not None:
        ending.append(asyncio.create_task(grpc_server.stop(config.drain_s)))
    # Longer than either side's own limit, which closes what is left.
    await asyncio.wait(ending, timeout=config.drain_s + 5)
    # The watchers of versions and certificates never end by themselves.
    for task in tasks[1:]:
        task.cancel()
    service.stop()
    if shared is not None:
        shared.close()
    event(logging.INFO, "stopped", listen=config.listen)


async def _report_life(service: InferenceService, report_life: Callable[[], None]) -> None:
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(_REPORT_EVERY_S):
            if not service.is_stuck:
                report_life()

    report_life()
    # A thread: the loop itself computes batches, which may take longer than expected.
    threading.Thread(target=report, name="serve-report", daemon=True).start()
    try:
        while True:
            service.turned_s = time.perf_counter()
            await asyncio.sleep(_REPORT_EVERY_S)
    finally:
        ended.set()


def bind_socket(option: str, address: str, shared: bool) -> socket.socket:
    """Return a socket bound to HOST:PORT; it listens unless `shared`. Raise AddressError."""
    host, port = split_address(option, address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind, protocol)
        try:
            # Else the address would stay taken for a while after a restart.
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                # The kernel divides connections among the processes of this user that have it.
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            opened.bind(where)
            # Of several, one that reads its model must not be given connections yet.
            if not shared:
                opened.listen(BACKLOG)
        except OSError:
            opened.close()
            raise
    except OSError as error:
        raise _bind_error(option, address, error) from error
    opened.setblocking(False)
    return opened


def _bind_error(option: str, address: str, error: OSError) -> AddressError:
    return AddressError(
        f"cannot serve at {option} {address}: {(error.strerror or str(error)).lower()}. Stop "
        "what has it, or name another address of this machine"
    )


async def _grpc_server(
    config: ServeConfig, service: InferenceService, tls: ServerTls | None
) -> tuple[Any, Any, int]:
    """Return a started gRPC server, its health service and its port. Raise AddressError."""
    size = config.limits.body_bytes
    # gRPC cannot tell who has shown a proof: idle strangers must not use up what there is.
    connections = raise_descriptor_limit(_DESCRIPTORS) - 2 * config.max_connections - _RESERVED
    certificates = tls is not None and tls.client_ca is not None
    server = grpc.aio.server(
        interceptors=[InferenceGuard(service, certificates)],
        options=(
            ("grpc.so_reuseport", int(config.workers > 1)),
            ("grpc.max_receive_message_length", size),
            ("grpc.max_send_message_length", size),
            ("grpc.max_metadata_size", 16 << 10),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", KEEP_ALIVE_S * 1000),
            ("grpc.max_allowed_incoming_connections", max(connections, config.max_connections)),
        ),
    )
    server.add_generic_rpc_handlers((inference_handler(service),))
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    server.add_generic_rpc_handlers((UnknownCalls(),))  # the last that is asked
    for name in ("", SERVICE_NAME):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        port = take_port(server, config.grpc_listen, tls)
    except RuntimeError as error:
        raise AddressError(
            f"cannot serve at --grpc {config.grpc_listen}: the address is taken, or not of this "
            "machine. Name another one"
        ) from error
    await server.start()
    return server, checks, port
