"""The page of a server: it fetches nothing from elsewhere, and its example is answered."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.exported import FEATURES, write_random_model
from tests.server.serving import RunningServer, get, post, running_server, service_of
from tests.waiting import PATIENCE_S

CHROMIUM, NODE = shutil.which("chromium"), shutil.which("node")
# A page without a page: what the script asks of one, and what it wrote into it.
STAND_IN = """
const elements = {};
const element = (id) => elements[id] ??= {
  id, children: [], listeners: {}, checked: true, value: "", textContent: "", hidden: false,
  append(...more) { this.children.push(...more); },
  addEventListener(kind, work) { this.listeners[kind] = work; },
};
globalThis.document = {
  getElementById: element,
  createElement: (name) => ({ ...element(Math.random()), name, children: [] }),
};
globalThis.location = { hash: "" };
"""


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[RunningServer]:
    with running_server(exported) as found:
        yield found


def test_the_page_asks_nobody_else_for_anything(exported: Path) -> None:
    with service_of(exported) as service:
        answer = get(service, "/docs")
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; ")
    assert "http://" not in answer.text
    assert "https://" not in answer.text
    assert "innerHTML" not in answer.text
    assert not re.search(r"\bNOW\b", answer.text)


def test_no_name_of_a_column_ends_the_script(tmp_path: Path) -> None:
    evil = replace(FEATURES, dense=("</script><script>alert(1)//",))
    write_random_model(tmp_path / "model", features=evil)
    with service_of(tmp_path / "model") as service:
        page = get(service, "/docs").text
    assert page.count("</script>") == 1
    assert "\\u003c/script>" in page


@pytest.mark.skipif(NODE is None, reason="no node here: apt-get install nodejs")
def test_the_example_of_the_page_is_a_request_that_is_answered(exported: Path) -> None:
    assert NODE is not None
    with service_of(exported) as service:
        (script,) = re.findall(r"<script>(.*?)</script>", get(service, "/docs").text, re.DOTALL)
        told = (
            'document.getElementById("key").value = "seven"; fill();'
            'console.log(JSON.stringify({request: elements["request"].value,'
            ' columns: elements["columns"].children.length, title: elements["title"].textContent}))'
        )
        result = subprocess.run(
            [NODE, "-"], input=STAND_IN + script + told, capture_output=True, text=True, check=True
        )
        shown = json.loads(result.stdout)
        assert (shown["title"], shown["columns"]) == ("model", 7)
        answer = post(service, shown["request"].encode())
        assert answer.status_code == 200, answer.text
        assert answer.json()["parameters"] == {"support_rows": 3, "task_cache": "stored"}


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
def test_a_browser_shows_the_columns_and_tries_a_request(
    server: RunningServer, tmp_path: Path
) -> None:
    assert CHROMIUM is not None
    dom = ""
    for patience_ms in (2_000, 10_000, 60_000):
        command = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu",
            f"--user-data-dir={tmp_path}/profile", f"--timeout={patience_ms}",
            f"--virtual-time-budget={patience_ms}", "--dump-dom",
            f"http://127.0.0.1:{server.port}/docs#try",
        ]  # fmt: skip
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        dom = result.stdout
        if "200 in" in dom:
            break
    assert "200 in" in dom, result.stderr[-500:]
    assert "<td>item</td><td>INT64</td><td>[N]</td><td>single</td>" in dom
    assert '"prediction"' in dom
    assert 'role="alert" hidden' in dom
    assert "Uncaught" not in result.stderr
