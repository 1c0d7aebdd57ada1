"""uvicorn's connections with bounds on a request's head, and the client certificate for the app."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
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
# Keys of the scope's extensions: the certificate; what gives a caller who has shown a proof
# a place, and returns whether there was one.
CERTIFICATE, ADMIT = "gmeta.certificate", "gmeta.admit"

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


@dataclass
class _Connections:
    """Those of one server: strangers, the oldest first, and those whose callers have a place."""

    most: int  # of each
    strangers: dict[object, Callable[[], None]] = field(default_factory=dict)  # and their ends
    known: set[object] = field(default_factory=set)

    def add_stranger(self, connection: object, end: Callable[[], None]) -> None:
        # Whoever has a proof shows it at once: of too many that have not, the oldest makes room.
        if len(self.strangers) >= self.most:
            with suppress(OSError):  # it has just ended
                self.strangers.pop(next(iter(self.strangers)))()
        self.strangers[connection] = end


class HttpConnection(HttpToolsProtocol):
    """One connection of a client."""

    parser: _Http11Parser
    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, kept: _Connections, **settings: Any) -> None:
        super().__init__(**settings)
        self.parser = _Http11Parser(self)
        self._kept = kept

    def connection_made(self, transport: Any) -> None:
        """Wait for the head of the first request, but not for ever."""
        super().connection_made(transport)
        self._kept.add_stranger(self, transport.abort)
        self._await_head()

    def admit(self) -> bool:
        """Give the connection the place of one whose caller is known; return whether it has one."""
        strangers, known = self._kept.strangers, self._kept.known
        if self in strangers and len(known) < self._kept.most:  # else it may have ended
            del strangers[self]
            known.add(self)
        return self in known

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer and the place."""
        self._kept.strangers.pop(self, None)
        self._kept.known.discard(self)
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
        certificate = self.transport.get_extra_info("peercert")
        extensions: dict[str, Any] = {CERTIFICATE: certificate, ADMIT: self.admit}
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        """Leave the body's time and size to the app."""
        if self.parser.asks_upgrade:
            return  # the same head comes again, without
        self._refuse_slow_head()
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


class _TlsDoor(asyncio.Protocol):
    """Shakes hands on an accepted connection, which is a stranger's; uvicorn's own handshakes last
    for a minute, and nobody counts them."""

    def __init__(self, kept: _Connections, context: ssl.SSLContext, **settings: Any) -> None:
        self._kept, self._context = kept, context
        self._connection = partial(HttpConnection, kept, **settings)

    def connection_made(self, transport: Any) -> None:
        """Begin the handshake, by a transport of its own."""
        wire = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        transport.abort()  # it has read nothing yet
        self._kept.add_stranger(self, partial(wire.shutdown, socket.SHUT_RDWR))
        self._handshake = asyncio.ensure_future(self._shake_hands(wire))

    async def _shake_hands(self, wire: socket.socket) -> None:
        loop, limits = asyncio.get_running_loop(), {"ssl_handshake_timeout": HEAD_TIMEOUT_S}
        try:
            with suppress(OSError):  # a caller that left, or whose certificate is not trusted
                await loop.connect_accepted_socket(
                    self._connection, wire, ssl=self._context, **limits
                )
        finally:
            self._kept.strangers.pop(self, None)


class UvicornServer(uvicorn.Server):
    """uvicorn's server, whose signals and TLS are ours."""

    context: ssl.SSLContext | None = None

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
        timeout_graceful_shutdown=int(drain_s) + 1,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    context = None if tls is None else tls.context()
    kept = _Connections(max_connections)
    make_protocol: Any = partial(HttpConnection, kept)
    if context is not None:
        make_protocol = partial(_TlsDoor, kept, context)
    config.http_protocol_class = make_protocol
    # uvicorn logs every request that is no HTTP; the log is for our events alone.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    server = UvicornServer(config)
    server.context = context
    return server


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
