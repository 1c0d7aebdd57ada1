"""deploy/credentials.py for real: it lets each role in, and an API server gets its Secrets."""

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gmeta.access.errors import RefusedError
from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.cli.commands.shards import shards
from tests.deploy.policy import HOLDERS
from tests.deploy.rendering import ROOT

ROLES = ("worker", "operator", "viewer")
SCRIPT = ROOT / "deploy/credentials.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True,
        env={**os.environ, **environment}, check=False,
    )  # fmt: skip


def test_what_was_begun_and_not_finished_is_made_anew(tmp_path: Path) -> None:
    """With half of it some pods would wait for files that never come, and nobody would say why."""
    (tmp_path / "bin").mkdir()
    broken = tmp_path / "bin" / "openssl"
    broken.write_text(
        f"#!/bin/sh\necho . >> {tmp_path}/calls\n[ $(wc -l < {tmp_path}/calls) -lt 5 ] || "
        f'{{ echo "no space left" >&2; exit 1; }}\nexec {shutil.which("openssl")} "$@"\n'
    )
    broken.chmod(0o755)
    folder = tmp_path / "made"
    path = f"{broken.parent}{os.pathsep}{os.environ['PATH']}"
    failed = run(str(folder), PATH=path)
    assert (failed.returncode, failed.stderr) == (1, "error: openssl x509 failed: no space left\n")
    done = run(str(folder))
    assert done.stdout == f"credentials are in {folder}\n"
    assert {path.name for path in folder.iterdir()} == {"service", "tokens", "spark", *ROLES}
    authorities = {path.read_bytes() for path in folder.glob("*/ca.crt")}
    assert len(authorities) == 1
    assert all((folder / role / "token").is_file() for role in ROLES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("credentials")
    done = run(str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def options(folder: Path, holder: str) -> dict[str, Path]:
    own = folder / holder
    return {
        "tls_ca": own / "ca.crt", "tls_cert": own / "tls.crt", "tls_key": own / "tls.key",
        "token_file": own / "token",
    }  # fmt: skip


def test_a_service_with_them_lets_each_role_do_its_work(made: Path) -> None:
    service = made / "service"
    server = ShardServer(
        ServiceConfig(
            "localhost:0", tls_cert=service / "tls.crt", tls_key=service / "tls.key",
            tls_client_ca=service / "ca.crt", tokens=made / "tokens",
        )
    )  # fmt: skip
    with ShardClient(server.address, "rank0", **options(made, "worker")) as client:
        assert client.service_epoch == 1
    with pytest.raises(RefusedError, match="Register is not a call of the role viewer"):
        ShardClient(server.address, "rank1", **options(made, "viewer"))
    # A worker's certificate with an operator's token, as a thief of one of them would have it.
    mixed = {**options(made, "worker"), "token_file": made / "operator" / "token"}
    with pytest.raises(RefusedError, match="Register is not a call of the role operator"):
        ShardClient(server.address, "rank1", **mixed)
    flags = [
        text
        for name, path in options(made, "operator").items()
        for text in (f"--{name.replace('_', '-')}", str(path))
    ]
    done = CliRunner().invoke(shards, ["drain", "--service", server.address, *flags])
    assert done.output == "the service is draining; shards that went back: 0\n"
    server.stop(0.0)


def test_python_that_checks_strictly_takes_them(made: Path) -> None:
    ca = made / "service" / "ca.crt"
    for holder in ("service", *ROLES):  # as Python 3.13 does
        command = ["openssl", "verify", "-x509_strict", "-CAfile", ca, made / holder / "tls.crt"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_they_are_made_once_and_nobody_else_may_read_the_keys(made: Path) -> None:
    before = (made / "worker" / "token").read_text()
    assert run(str(made)).stdout == f"{made} has credentials: nothing to do\n"
    assert (made / "worker" / "token").read_text() == before
    secret = [*made.glob("*/tls.key"), *made.glob("*/token"), *made.glob("tokens/*")]
    assert {path.stat().st_mode & 0o777 for path in secret} == {0o440}
    assert not list(made.rglob("ca.key"))


class ApiServer(HTTPServer):
    """As much of Kubernetes as makes and finds Secrets."""

    secrets: dict[str, Any]


class Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/v1/namespaces/gmeta/secrets/")
        self.answer(200 if name in self.server.secrets else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        allowed = self.headers["Authorization"] == "Bearer the-pods-own-token"
        if allowed and self.path == "/api/v1/namespaces/gmeta/secrets":
            self.server.secrets[body["metadata"]["name"]] = body
        self.answer(201 if allowed else 403)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer(("127.0.0.1", 0), Handler)
    server.secrets = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def bootstrap(api: ApiServer, folder: Path, token: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(token)
    url = f"http://127.0.0.1:{api.server_address[1]}"
    return run("--kubernetes", "gmeta", KUBERNETES_API=url, KUBERNETES_ACCOUNT=str(folder))


def test_the_cluster_gets_each_secret_of_the_manifests_once(api: ApiServer, tmp_path: Path) -> None:
    done = bootstrap(api, tmp_path / "account", "the-pods-own-token")
    assert done.returncode == 0, done.stderr
    assert set(api.secrets) == {f"gmeta-{holder}" for holder in HOLDERS}
    keys = {name: set(secret["data"]) for name, secret in api.secrets.items()}
    assert keys["gmeta-service"] == {"ca.crt", "tls.crt", "tls.key"}
    assert keys["gmeta-tokens"] == {"worker", "operator", "viewer"}
    assert keys["gmeta-worker"] == {"ca.crt", "tls.crt", "tls.key", "token"}
    assert keys["gmeta-spark"] == {"token"}
    worker = api.secrets["gmeta-worker"]["data"]["token"]
    assert worker == api.secrets["gmeta-tokens"]["data"]["worker"]
    assert base64.b64decode(worker).decode() not in done.stdout + done.stderr
    before = dict(api.secrets)
    again = bootstrap(api, tmp_path / "account", "the-pods-own-token")
    assert again.stdout == "every Secret is there: nothing to do\n"
    assert api.secrets == before


def test_half_the_secrets_or_no_right_to_make_them_fails(api: ApiServer, tmp_path: Path) -> None:
    refused = bootstrap(api, tmp_path / "account", "somebody-elses")
    assert (refused.returncode, api.secrets) == (1, {})
    assert refused.stderr == "error: Secret gmeta-operator was not created: HTTP 403\n"
    api.secrets["gmeta-worker"] = {}
    half = bootstrap(api, tmp_path / "account", "the-pods-own-token")
    assert half.returncode == 1
    assert "all or none must be there, for they belong together" in half.stderr
    assert set(api.secrets) == {"gmeta-worker"}


def test_an_api_server_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = run("--kubernetes", "gmeta", KUBERNETES_API=url, KUBERNETES_ACCOUNT=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        f"error: the API server at {url} does not answer: <urlopen error [Errno 111] Connection "
        "refused>. Is port 443 or 6443 open to it?\n"
    )
