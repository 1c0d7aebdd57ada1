"""As much of Kubernetes' API server as the pods ask: Secrets, pods and Jobs of one namespace, for
who shows an account's token, as far as the rendered Roles let that account."""

import ctypes
import json
import os
import queue
import secrets
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.antdt.pki import Authority
from tests.deploy.network import Host
from tests.deploy.rbac import can_i
from tests.deploy.rendering import Manifest

_CLONE_NEWNET = 0x40000000
Object = dict[str, Any]


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        resource, name, query = self._asked()
        verb = "get" if name else "watch" if query.get("watch") == "true" else "list"
        if not self._allowed(verb, resource, name):
            return
        if verb == "watch":
            if self.headers.get("Upgrade"):  # clients go on with plain HTTP then
                self._answer(503, {})
            else:
                self._watch(resource, query)
        elif verb == "list":
            items = self.server.api.select(resource, query.get("labelSelector", ""))
            self._answer(200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items})
        else:
            found = self.server.api.objects.get((resource, name))
            self._answer(200 if found else 404, found or {"kind": "Status"})

    def do_POST(self) -> None:
        resource, _, _ = self._asked()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._allowed("create", resource, None):
            made = self.server.api.create(resource, body)
            self._answer(201 if made else 409, body)

    def do_DELETE(self) -> None:
        resource, name, query = self._asked()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._allowed("delete" if name else "deletecollection", resource, name):
            api = self.server.api
            chosen = [api.objects.get((resource, name))] if name else None
            for each in chosen or api.select(resource, query.get("labelSelector", "")):
                if each is not None:
                    api.delete(resource, each["metadata"]["name"])
            self._answer(200, {"kind": "Status", "status": "Success"})

    def do_PATCH(self) -> None:
        resource, name, _ = self._asked()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._allowed("patch", resource, name):
            found = self.server.api.objects.get((resource, name))
            if found is None:
                self._answer(404, {"kind": "Status"})
            elif self.headers["Content-Type"] != "application/merge-patch+json":
                self._answer(415, {"kind": "Status"})
            else:
                found["spec"] = {**found["spec"], **body["spec"]}
                self._answer(200, found)

    def _watch(self, resource: str, query: dict[str, str]) -> None:
        events = self.server.api.watch(resource)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while (event := events.get()) is not None:
            if _matches(event["object"], query.get("labelSelector", "")):
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()

    def _asked(self) -> tuple[str, str, dict[str, str]]:
        """(resource, name, query) of /api/v1/namespaces/NAMESPACE/RESOURCE/NAME, or of
        /apis/GROUP/VERSION/namespaces/NAMESPACE/RESOURCE/NAME."""
        url = urlsplit(self.path)
        parts = [*url.path.partition("/namespaces/")[2].split("/")[1:], "", ""]
        return parts[0], parts[1], {key: each[-1] for key, each in parse_qs(url.query).items()}

    def _allowed(self, verb: str, resource: str, name: str | None) -> bool:
        api = self.server.api
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        account = api.accounts.get(token)
        api.asked.add((account, verb, resource))
        group = self.path.split("/")[2] if self.path.startswith("/apis/") else ""
        if account is not None and can_i(api.manifests, account, verb, resource, name, group):
            return True
        api.refused.append(f"{account} {verb} {resource} {name}")
        self._answer(401 if account is None else 403, {"kind": "Status"})
        return False

    def _answer(self, status: int, body: Object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    api: "ApiServer"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a pod that was killed in the middle of a watch


class ApiServer:
    """Listens with TLS on port 443 of a host."""

    def __init__(self, host: Host, manifests: list[Manifest], folder: Path) -> None:
        self.manifests = manifests
        self.objects: dict[tuple[str, str], Object] = {}
        self.accounts: dict[str, str] = {}  # by token
        self.asked: set[tuple[str | None, str, str]] = set()  # account, verb, resource
        self.refused: list[str] = []
        self.address = host.address
        self._watches: list[tuple[str, queue.Queue[Object | None]]] = []
        self._pki = Authority(folder)
        cert, key = self._pki.issue("api", address=host.address, host="kubernetes.default.svc")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        server = _listen(host)
        server.api = self
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
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

    def create(self, resource: str, body: Object) -> bool:
        """Whether it is new, and now there."""
        key = (resource, body["metadata"]["name"])
        if key in self.objects:
            return False
        if resource == "pods":
            body.setdefault("status", {"phase": "Pending", "containerStatuses": []})
        body["metadata"] |= {"uid": secrets.token_hex(8), "resourceVersion": "1"}
        self.objects[key] = body
        self._tell("ADDED", resource, body)
        return True

    def set_status(self, resource: str, name: str, status: Object) -> None:
        """What has become of an object, for those who watch."""
        if self.objects[resource, name].get("status") != status:
            self.objects[resource, name]["status"] = status
            self._tell("MODIFIED", resource, self.objects[resource, name])

    def delete(self, resource: str, name: str) -> None:
        """It is gone."""
        self._tell("DELETED", resource, self.objects.pop((resource, name)))

    def select(self, resource: str, selector: str) -> list[Object]:
        """The objects with all of these labels."""
        return [
            body
            for (kind, _), body in list(self.objects.items())
            if kind == resource and _matches(body, selector)
        ]

    def watch(self, resource: str) -> "queue.Queue[Object | None]":
        """What happens from now on; None at the end."""
        events: queue.Queue[Object | None] = queue.Queue()
        self._watches.append((resource, events))
        return events

    def close(self) -> None:
        """Stop listening."""
        for _, events in self._watches:
            events.put(None)
        self._server.shutdown()
        self._server.server_close()

    def _tell(self, what: str, resource: str, body: Object) -> None:
        # As it is now: the object goes on changing.
        event = json.loads(json.dumps({"type": what, "object": body}))
        for watched, events in self._watches:
            if watched == resource:
                events.put(event)


def _matches(body: Object, selector: str) -> bool:
    """Label selectors as Spark writes them: a=b, a!=b and !a, all of which must hold."""
    labels = body["metadata"].get("labels", {})
    for term in filter(None, selector.split(",")):
        name, equals, value = term.partition("=")
        if term.startswith("!"):
            holds = term[1:] not in labels
        elif name.endswith("!"):
            holds = labels.get(name[:-1]) != value
        else:
            holds = labels.get(name) == value if equals else name in labels
        if not holds:
            return False
    return True


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
