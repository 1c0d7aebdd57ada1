"""The HTTP address of a server: `/healthz` for probes, and pages for callers with a role."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final
from urllib.parse import urlsplit

from gmeta.access.auth import Tokens
from gmeta.access.credentials import ReloadedValue, ServerTls
from gmeta.access.log import event
from gmeta.access.rate import RateLimit
from gmeta.access.roles import Role, role_of_certificate

MAX_REQUESTS = 64  # answered at once; the connections of more are closed without an answer
MAX_WAITING = 64  # connections that have not shown who looks; of more the oldest is closed
REFUSALS_LOGGED_PER_S = 10.0
REQUEST_TIMEOUT_S = 10.0  # for the handshake and the whole request, and for each answer

Route = Callable[["HttpRequest"], None]


@final
class HttpRequest(BaseHTTPRequestHandler):
    """One request. A route answers it with `send`, or writes a stream to `wfile` itself."""

    server: RouteServer
    server_version = "gmeta"
    sys_version = ""
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        """Answer one request: a probe without a proof, any other once the caller is known."""
        try:
            path = urlsplit(self.path).path
        except ValueError:  # such as http://[
            return self.send(400, "the path of the request cannot be read\n")
        if path == "/healthz":
            serving = self.server.is_serving()
            return self.send(200 if serving else 503, "serving\n" if serving else "not serving\n")
        role = self.server.role_of(self)
        if role is None:
            return self.send(
                401,
                "show a token of the role operator or viewer\n",
                {"WWW-Authenticate": 'Basic realm="gmeta", charset="UTF-8"'},
            )
        if role is Role.WORKER:
            return self.send(403, "a worker's credentials do not open this page\n")
        route = self.server.routes.get(path)
        if route is None:
            return self.send(404, f"no such page; there are {', '.join(self.server.routes)}\n")
        self.server.answer(route, self)
        return None

    def may_look(self) -> bool:
        """Return whether the caller may still look; a stream calls this before each part."""
        return self.server.role_of(self) in (Role.OPERATOR, Role.VIEWER)

    do_HEAD = do_GET

    def send(
        self,
        status: int,
        body: str | bytes,
        headers: Mapping[str, str] | None = None,
        content_type: str = "text/plain; charset=utf-8",
    ) -> None:
        """Send a complete answer; for HEAD its headers alone."""
        # Refusals are logged at a limited rate: strangers must not fill the disk.
        if status in (401, 403) and self.server.refusals.admit(""):
            path, peer = urlsplit(self.path).path[:200], self.client_address[0]
            event(logging.INFO, "refused", path=path, status=status, peer=peer)
        content = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a probe every few seconds is no news."""


@final
class RouteServer(ThreadingHTTPServer):
    """Serves routes in threads of its own from `start` to `stop`."""

    daemon_threads = True
    # A service that is started again gets its port back at once.
    allow_reuse_address = True
    request_queue_size = 2 * MAX_WAITING  # connections that the kernel holds meanwhile

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Route],
        is_serving: Callable[[], bool],
        tls: ServerTls | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """Bind the address. Raise OSError for a port in use, or CredentialError."""
        self.routes = routes
        self.is_serving = is_serving
        self._tls = tls
        self._tokens = tokens
        self.refusals = RateLimit(REFUSALS_LOGGED_PER_S, REFUSALS_LOGGED_PER_S)
        self._places = threading.Semaphore(MAX_REQUESTS)
        self._waiting: dict[socket.socket, float] = {}  # with the time since when, the oldest first
        self._lock = threading.Lock()  # guards those that wait
        if tls is not None:
            self._context = ReloadedValue(tls.files, tls.context, "certificate_not_rotated")
        self._thread = threading.Thread(target=self.serve_forever, name="antdt-http", daemon=True)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host.strip("[]"), port), HttpRequest)

    def start(self) -> int:
        """Begin to serve; return the port."""
        self._thread.start()
        return int(self.server_address[1])

    def stop(self) -> None:
        """Stop now; streams under way end with the process."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def role_of(self, request: HttpRequest) -> Role | None:
        """Return the caller's role: None for a stranger, VIEWER if no proof is required."""
        # A token of the role operator or viewer (Bearer, or as the password of Basic) or a client
        # certificate of one: either is enough, so a browser and a scraper need only one of them.
        if self._tokens is None and (self._tls is None or self._tls.client_ca is None):
            return Role.VIEWER
        if self._tls is not None and self._tls.client_ca is not None:
            certificate: Any = request.connection.getpeercert()  # type: ignore[attr-defined]
            # It was valid at the handshake, and a stream may be older than that.
            if certificate and ssl.cert_time_to_seconds(certificate["notAfter"]) > time.time():
                names = certificate.get("subjectAltName", ())
                return role_of_certificate(name for kind, name in names if kind == "URI")
        authorization = request.headers.get("Authorization", "")
        return self._tokens.role_of(authorization) if self._tokens else None

    def answer(self, route: Route, request: HttpRequest) -> None:
        """Answer a request whose caller may look; one too many is dropped."""
        if not self._places.acquire(blocking=False):
            return
        try:
            self._end_wait(request.connection)
            route(request)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer one connection, in a thread of its own."""
        try:
            request.settimeout(REQUEST_TIMEOUT_S)
            if self._tls is not None:
                # The handshake comes with the first byte that is read, as part of the wait.
                self._context.refresh()
                request = self._context.value.wrap_socket(
                    request, server_side=True, do_handshake_on_connect=False
                )
            self._begin_wait(request)
            HttpRequest(request, client_address, self)
        except OSError:
            pass  # a caller that left, or whose certificate is not trusted
        finally:
            self._end_wait(request)
            request.close()

    def service_actions(self) -> None:
        """Hang up on callers whose request did not come in time; runs twice a second."""
        # The socket's own timeout is for each read alone: a caller could send a byte at a time.
        late_s = time.monotonic() - REQUEST_TIMEOUT_S
        with self._lock:
            for connection, since_s in self._waiting.items():
                if since_s < late_s:
                    _hang_up(connection)

    def _begin_wait(self, connection: socket.socket) -> None:
        with self._lock:
            # Of too many the oldest is closed: a probe sends its request at once and is answered.
            if len(self._waiting) >= MAX_WAITING:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                _hang_up(oldest)
            self._waiting[connection] = time.monotonic()

    def _end_wait(self, connection: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(connection, None)


def _hang_up(connection: socket.socket) -> None:
    """Wake the thread that reads from the connection: it finds the connection at its end."""
    # Below TLS, whose state belongs to that thread.
    with suppress(OSError):  # it has ended by itself
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
