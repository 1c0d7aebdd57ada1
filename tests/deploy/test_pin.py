"""deploy/pin.py against a registry of its own: what a tag points to now is what the files say."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.rendering import ROOT

OLD, NEW = "sha256:" + "0" * 64, "sha256:" + "a1" * 32


class Registry(BaseHTTPRequestHandler):
    """As much of a registry as tells digests: to who shows a token that anybody gets."""

    def do_HEAD(self) -> None:
        if self.headers["Authorization"] != "Bearer for-anybody":
            self.send_response(401)
            realm = f"http://{self.headers['Host']}/token"
            scope = "repository:team/base:pull"
            told = f'Bearer realm="{realm}",service="registry",scope="{scope}"'
            self.send_header("WWW-Authenticate", told)
        elif self.path == "/v2/team/base/manifests/1.2" and "index" in self.headers["Accept"]:
            self.send_response(200)
            self.send_header("Docker-Content-Digest", NEW)
        else:
            self.send_response(404)
        self.end_headers()

    def do_GET(self) -> None:
        known = self.path == "/token?service=registry&scope=repository%3Ateam%2Fbase%3Apull"
        self.send_response(200 if known else 400)
        self.end_headers()
        self.wfile.write(json.dumps({"token": "for-anybody"}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def pin(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "deploy/pin.py"), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_digests_become_the_registrys_or_nothing_changes(registry: str, tmp_path: Path) -> None:
    docker, compose = tmp_path / "a.Dockerfile", tmp_path / "compose.yaml"
    docker.write_text(f"ARG BASE_IMAGE={registry}/team/base:1.2@{OLD}\nFROM gmeta-own:0.1.0\n")
    compose.write_text(f"image: {registry}/team/gone:9@{OLD}\n")
    refused = pin(docker, compose)
    assert refused.returncode == 1
    expected = f"error: {compose}: no digest: HTTP Error 404: Not Found. Nothing was changed\n"
    assert refused.stderr == expected
    assert OLD in docker.read_text()
    done = pin(docker)
    assert (done.returncode, done.stdout) == (0, f"changed {docker}\n"), done.stderr
    expected = f"ARG BASE_IMAGE={registry}/team/base:1.2@{NEW}\nFROM gmeta-own:0.1.0\n"
    assert docker.read_text() == expected
    assert pin(docker).stdout == f"same    {docker}\n"
