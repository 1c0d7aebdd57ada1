"""The service's HTTP address: `/healthz` for probes, and pages for who may look, over TLS where
the service has it.

Who looks shows a token of the role operator or viewer (Bearer, or as the password of Basic), or a
client certificate of one; either is enough, so that a browser and a scraper need only one of them.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, final
from urllib.parse import urlsplit

from gmeta.antdt.access.credentials import CredentialError, ServerTls, WatchedFiles
from gmeta.antdt.access.roles import Role, role_of_certificate
from gmeta.antdt.log import event

if TYPE_CHECKING:
    from gmeta.antdt.access.auth import Tokens

MAX_REQUESTS = 64  # answered at once; the connections of more are closed without an answer
REQUEST_TIMEOUT_S = 10.0  # for the handshake, and for a caller to send its request

Route = Callable[["HttpRequest"], None]


@final
class HttpRequest(BaseHTTPRequestHandler):
    """One request. A route answers it with `send`, or writes a stream to `wfile` by itself."""

    server: HttpServer
    server_version = "gmeta"
    sys_version = ""
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        """Probes are open; every other path asks who looks."""
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
        route(self)
        return None

    do_HEAD = do_GET

    def send(
        self,
        status: int,
        body: str | bytes,
        headers: Mapping[str, str] | None = None,
        content_type: str = "text/plain; charset=utf-8",
    ) -> None:
        """A whole answer."""
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
        """Nothing: a probe every few seconds is no news, and a request line may hold anything."""


@final
class HttpServer(ThreadingHTTPServer):
    """Serves routes in threads of its own from `start` to `stop`."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Route],
        is_serving: Callable[[], bool],
        tls: ServerTls | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """Binds the address. Raises OSError for a port in use, CredentialError."""
        self.routes = routes
        self.is_serving = is_serving
        self._tls = tls
        self._tokens = tokens
        self._places = threading.Semaphore(MAX_REQUESTS)
        if tls is not None:
            self._files = WatchedFiles([tls.cert, tls.key, tls.client_ca])
            self._context = _context(tls)
        self._thread = threading.Thread(target=self.serve_forever, name="antdt-http", daemon=True)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host.strip("[]"), port), HttpRequest)

    def start(self) -> int:
        """Returns the port."""
        self._thread.start()
        return int(self.server_address[1])

    def stop(self) -> None:
        """Ends at once; streams under way end with the process."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def role_of(self, request: HttpRequest) -> Role | None:
        """Whose request it is; where nothing asks for a proof, a viewer's."""
        if self._tokens is None and (self._tls is None or self._tls.client_ca is None):
            return Role.VIEWER
        if self._tls is not None and self._tls.client_ca is not None:
            certificate: Any = request.connection.getpeercert()  # type: ignore[attr-defined]
            if certificate:
                names = certificate.get("subjectAltName", ())
                return role_of_certificate(name for kind, name in names if kind == "URI")
        return (
            self._tokens.role_of(request.headers.get("Authorization", "")) if self._tokens else None
        )

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the request's thread: the handshake, then the request."""
        # No answer: under TLS it would take the handshake, which is what is too much just now.
        if not self._places.acquire(blocking=False):
            return
        try:
            request.settimeout(REQUEST_TIMEOUT_S)
            if self._tls is not None:
                request = self._fresh_context().wrap_socket(request, server_side=True)
            HttpRequest(request, client_address, self)
        except OSError:
            pass  # a caller that left, or whose certificate is not trusted
        finally:
            self._places.release()
            request.close()

    def _fresh_context(self) -> ssl.SSLContext:
        assert self._tls is not None
        if self._files.changed():
            try:
                self._context = _context(self._tls)
            except CredentialError as error:
                event(logging.ERROR, "certificate_not_rotated", message=str(error))
        return self._context


def _context(tls: ServerTls) -> ssl.SSLContext:
    tls.check()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(tls.cert, tls.key)
    if tls.client_ca is not None:
        context.load_verify_locations(tls.client_ca)
        context.verify_mode = ssl.CERT_OPTIONAL  # a token is enough too: see the top
    return context
