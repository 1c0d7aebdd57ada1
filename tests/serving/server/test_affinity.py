"""Servers behind a proxy that hashes X-Task-Key, as the Ingress does: each keeps its own tasks."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gmeta.serving.served_model import ServedModel
from tests.deploy.rendering import ROOT
from tests.serving.server.serving import INFER, free_port, request_of, running_server
from tests.support.exported import random_rows
from tests.support.waiting import wait_until

INGRESS = ROOT / "deploy/k8s/components/serve-ingress/ingress.yaml"
KEYS = [f"user-{number}" for number in range(40)]


def hash_expression() -> str:
    annotations: dict[str, Any] = yaml.safe_load(INGRESS.read_text())["metadata"]["annotations"]
    return str(annotations["nginx.ingress.kubernetes.io/upstream-hash-by"])


@contextmanager
def proxy(folder: Path, ports: Sequence[int]) -> Iterator[httpx.Client]:
    """nginx, with the directive that ingress-nginx makes of the annotation."""
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("no nginx on PATH (Debian: nginx-light)")
    folder.mkdir()
    servers = "".join(f"server 127.0.0.1:{port};" for port in ports)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;\n"
        "events {}\n"
        f"http {{ access_log off; {temporary}\n"
        f"upstream gmeta {{ hash {hash_expression()} consistent; {servers} }}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://gmeta; }} }} }}\n"
    )
    process = subprocess.Popen([program, "-c", str(config), "-e", str(folder / "errors")])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            def answers() -> bool:
                assert process.poll() is None, (folder / "errors").read_text()
                try:
                    return client.get("/v2/health/ready").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(answers, "the proxy answers")
            yield client
    finally:
        process.kill()
        process.wait()


def kept(client: httpx.Client, body: dict[str, Any], header: bool = True) -> dict[str, int]:
    """The status of a request about each key."""
    found = {}
    for key in KEYS:
        headers = {"X-Task-Key": key} if header else {}
        asked = body | {"parameters": {"task_key": key}}
        found[key] = client.post(INFER, json=asked, headers=headers).status_code
    return found


def test_a_key_comes_to_the_server_that_keeps_it(
    exported: Path, served: ServedModel, tmp_path: Path
) -> None:
    rows = random_rows(4)
    support, query = request_of(support=rows), request_of(rows)
    with running_server(exported) as one, running_server(exported) as two:
        with proxy(tmp_path / "both", [one.port, two.port]) as client:
            assert set(kept(client, support).values()) == {200}
            assert set(kept(client, query).values()) == {200}
        on_first = {
            key
            for key in KEYS
            if httpx.post(
                f"http://127.0.0.1:{one.port}{INFER}",
                json=query | {"parameters": {"task_key": key}},
                timeout=60,
            ).status_code
            == 200
        }
        # Both have some; a key lies on one of them alone.
        assert 5 < len(on_first) < 35
        # A third one takes keys over, but those that stay with a server stay there.
        with running_server(exported) as three:
            with proxy(tmp_path / "three", [one.port, two.port, three.port]) as client:
                found = kept(client, query)
            moved = [key for key, status in found.items() if status == 404]
            assert set(found.values()) <= {200, 404}
            assert 0 < len(moved) < 30
