"""As much of Kubernetes' API server as the pods ask: objects of one namespace by name, for who
shows an account's token, as far as the rendered Roles let that account.
"""

import ctypes
import json
import os
import secrets
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.antdt.pki import Authority
from tests.deploy.network import Host
from tests.deploy.rbac import can_i
from tests.deploy.rendering import Manifest

_CLONE_NEWNET = 0x40000000


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"

    def do_GET(self) -> None:
        resource, name = self._asked()
        if self._allowed("get", resource, name):
            found = self.server.api.objects.get((resource, name))
            self._answer(200 if found else 404, found or {})

    def do_POST(self) -> None:
        resource, _ = self._asked()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._allowed("create", resource, None):
            key = (resource, body["metadata"]["name"])
            taken = key in self.server.api.objects
            self.server.api.objects.setdefault(key, body)
            self._answer(409 if taken else 201, body)

    def _asked(self) -> tuple[str, str]:
        """(resource, name) of /api/v1/namespaces/NAMESPACE/RESOURCE/NAME."""
        parts = [*self.path.split("/")[5:], "", ""]
        return parts[0], parts[1]

    def _allowed(self, verb: str, resource: str, name: str | None) -> bool:
        api = self.server.api
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        account = api.accounts.get(token)
        if account is not None and can_i(api.manifests, account, verb, resource, name):
            return True
        api.refused.append(f"{account} {verb} {resource} {name}")
        self._answer(401 if account is None else 403, {})
        return False

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    api: "ApiServer"


class ApiServer:
    """Listens with TLS on port 443 of a host."""

    def __init__(self, host: Host, manifests: list[Manifest], folder: Path) -> None:
        self.manifests = manifests
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.accounts: dict[str, str] = {}  # by token
        self.refused: list[str] = []
        self.address = host.address
        self._pki = Authority(folder)
        cert, key = self._pki.issue("api", address=host.address)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        server = _listen(host)
        server.api = self
        server.socket = context.wrap_socket(server.socket, server_side=True)
        self._server = server
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def account_folder(self, account: str, folder: Path) -> Path:
        """What a pod of the account finds in /var/run/secrets/kubernetes.io/serviceaccount."""
        token = secrets.token_hex(16)
        self.accounts[token] = account
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "token").write_text(token)
        (folder / "ca.crt").write_bytes(self._pki.ca.read_bytes())
        (folder / "namespace").write_text("gmeta")
        return folder

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _listen(host: Host) -> _Server:
    """A server whose socket is in the host's network: only the thread that makes it goes there."""
    made: list[_Server | OSError] = []

    def make() -> None:
        try:
            with open(f"/run/netns/{host.namespace}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            made.append(_Server((host.address, 443), _Handler))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]
