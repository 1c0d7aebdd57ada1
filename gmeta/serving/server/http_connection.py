"""uvicorn's connections with bounds on a request's head, and the client certificate for the app."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gmeta.access.credentials import ReloadedValue, ServerTls
from gmeta.access.log import event

HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 10.0
# Longer than nginx and the clouds' balancers keep an idle connection (60 s): the server must not be
# the first to close, while a request is on its way.
KEEP_ALIVE_S = 75
# Keys of the scope's extensions: the client's certificate; whether there are too many connections.
CERTIFICATE, TOO_MANY = "gmeta.certificate", "gmeta.too_many"

_LOOK_EVERY_S = 1.0  # at the files of the certificate


class _Http11Parser(httptools.HttpRequestParser):
    """httptools' parser, but a request to upgrade, whose body httptools would drop, is read as one
    of HTTP/1.1: Java's own client always asks for HTTP/2."""

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__(connection)
        self._connection = connection
        # As uvicorn sets it for its own.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    @property
    def asks_upgrade(self) -> bool:
        """Return whether the head that was just read asks for another protocol."""
        return bool(self.should_upgrade()) and self.get_method() != b"CONNECT"

    def feed_data(self, data: Any) -> None:
        """Parse what has come; after a head that asks to upgrade, the same head without that."""
        parser, rest = self, memoryview(data)
        while len(rest):  # a loop, as one read may bring thousands of such heads
            try:
                super(_Http11Parser, parser).feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not parser.asks_upgrade:
                    raise
                head, rest = parser._render_head(), rest[upgrade.args[0] :]
                # Another one: after a head that also says `close`, the first reads nothing more.
                parser = self._connection.parser = _Http11Parser(self._connection)
                super(_Http11Parser, parser).feed_data(head)

    def _render_head(self) -> bytes:
        version = self.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.get_method(), self._connection.url, version)]
        headers = self._connection.headers
        lines += [b"%s: %s" % (name, value) for name, value in headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


class HttpConnection(HttpToolsProtocol):
    """One connection of a client."""

    parser: _Http11Parser
    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.parser = _Http11Parser(self)

    def connection_made(self, transport: Any) -> None:
        """Wait for the head of the first request, but not for ever."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._refuse_slow_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Refuse a head that does not end."""
        super().data_received(data)
        if self._in_head:
            # Not what came with it of requests before.
            self._head_bytes += len(data) - max(data.rfind(b"\r\n\r\n"), 0)
            if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The head has more than {HEAD_BYTES} bytes. Shorten it.")

    def on_message_begin(self) -> None:
        """Begin a request, with the certificate that the connection has shown."""
        super().on_message_begin()
        self._await_head()
        extensions: dict[str, Any] = {CERTIFICATE: self.transport.get_extra_info("peercert")}
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        """Leave the body's time and size, and a refusal of too many connections, to the app."""
        if self.parser.asks_upgrade:
            return  # the same head comes again, without
        self._refuse_slow_head()
        # uvicorn's own refusal is no JSON, is not counted, and goes to probes: a busy pod would
        # die.
        most, self.limit_concurrency = self.config.limit_concurrency, None
        busy = max(len(self.connections), len(self.tasks))
        extensions: Any = self.scope["extensions"]
        extensions[TOO_MANY] = most is not None and busy >= most
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End a request, unless its head comes again."""
        if not self.parser.asks_upgrade:
            super().on_message_complete()

    def _await_head(self) -> None:
        self._refuse_slow_head()
        self._in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _refuse_slow_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class UvicornServer(uvicorn.Server):
    """uvicorn's server, whose signals are ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the process."""
        yield


def http_server(
    app: Any, max_connections: int, drain_s: float, tls: ServerTls | None
) -> UvicornServer:
    """Return a server of an ASGI app; it listens on the sockets that `serve` is given."""
    config = uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=max_connections + 1,  # uvicorn refuses from this number on
        timeout_graceful_shutdown=int(drain_s) + 1,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    if tls is not None:
        config.ssl = tls.context()
    # uvicorn logs every request that is no HTTP; the log is for our events alone.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    return UvicornServer(config)


async def reload_certificates(context: ssl.SSLContext, tls: ServerTls) -> None:
    """Use replaced certificate files for new connections, until cancelled."""

    # Files that do not fit together yet are logged, and the old ones stay.
    def load() -> None:
        # Into a context of its own first: a misfit would leave the live one half changed.
        tls.context()
        context.load_cert_chain(tls.cert, tls.key)
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)

    loaded = ReloadedValue(tls.files, load, "certificate_not_rotated")
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        if loaded.refresh():
            event(logging.INFO, "certificate_rotated", cert=str(tls.cert))
