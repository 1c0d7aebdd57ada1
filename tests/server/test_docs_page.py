"""The page of a server: it fetches nothing from elsewhere, and its example is answered."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser import needs_browser, open_browser
from tests.exported import FEATURES, write_random_model
from tests.server.serving import RunningServer, get, post, running_server, service_of

NODE = shutil.which("node")
# A page without a page: what the script asks of one, and what it wrote into it. Only the ids of the
# real page are there.
STAND_IN = """
const made = () => ({
  children: [], listeners: {}, checked: true, value: "", textContent: "", className: "",
  hidden: false,
  append(...more) { this.children.push(...more); },
  addEventListener(kind, work) { this.listeners[kind] = work; },
});
const elements = Object.fromEntries(IDS.map((id) => [id, made()]));
globalThis.document = {
  getElementById: (id) => elements[id] ?? null,
  createElement: made,
};
globalThis.location = { hash: "" };
const fetched = globalThis.fetch;
globalThis.fetch = (path, options) => fetched("ADDRESS" + path, options);
"""
# What somebody does: tick or not, fill in, send, and send what is no JSON.
VISIT = """
(async () => {
  const seen = [];
  const send = async () => {
    await elements.form.listeners.submit({ preventDefault() {} });
    seen.push([elements.outcome.className, elements.outcome.textContent.replace(/in .*/, ""),
               elements.response.textContent, elements.response.hidden]);
  };
  await send();
  elements.key.value = "seven";
  elements.fill.listeners.click();
  await send();
  elements.support.checked = false;
  elements.fill.listeners.click();
  await send();
  elements.request.value = "no JSON";
  await send();
  const rows = elements.columns.children.map((row) => row.children.map((c) => c.textContent));
  console.log(JSON.stringify({ seen, rows, about: elements.about.textContent }));
})();
"""


def run_page(page: str, behind: str, address: str = "") -> Any:
    """What node prints as JSON, having run the page's script and then what stands behind it."""
    assert NODE is not None
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    ids = json.dumps(re.findall(r'\bid="([^"]+)"', page))
    stand_in = STAND_IN.replace("IDS", ids, 1).replace("ADDRESS", address)
    result = subprocess.run(
        [NODE, "-"], input=stand_in + script + behind, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


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
    with service_of(exported) as service:
        told = (
            'document.getElementById("key").value = "seven"; fill();'
            'console.log(JSON.stringify({request: elements["request"].value,'
            ' columns: elements["columns"].children.length, title: elements["title"].textContent}))'
        )
        shown = run_page(get(service, "/docs").text, told)
        assert (shown["title"], shown["columns"]) == ("model", 7)
        answer = post(service, shown["request"].encode())
        assert answer.status_code == 200, answer.text
        assert answer.json()["parameters"] == {"support_rows": 3, "task_cache": "stored"}


@pytest.mark.skipif(NODE is None, reason="no node here: apt-get install nodejs")
def test_a_visit_of_the_page_is_answered_by_the_server(server: RunningServer) -> None:
    """The script of the page, all of it, in node against `gmeta serve`."""
    address = f"http://127.0.0.1:{server.port}"
    shown = run_page(httpx.get(f"{address}/docs").text, VISIT, address)
    told = {each["name"]: each for each in httpx.get(f"{address}/v2/models/model").json()["inputs"]}
    rows = {row[0]: row for row in shown["rows"]}
    assert rows.keys() >= {name.removeprefix("support.") for name in told}
    assert rows["item"] == ["item", "INT64", "[N]", "single", "ids 0 to 49; 0: unknown", "yes"]
    assert rows["click"][-1] == "in support rows"
    first, stored, again, wrong = shown["seen"]
    assert [each[:2] for each in (first, stored, again)] == [["good", "200 "]] * 3
    assert json.loads(first[2])["parameters"] == {"support_rows": 3}
    assert json.loads(stored[2])["parameters"] == {"support_rows": 3, "task_cache": "stored"}
    assert json.loads(again[2])["parameters"] == {"support_rows": 3, "task_cache": "hit"}
    assert wrong[:2] == ["bad", "400 "]
    assert "JSON" in wrong[2]
    assert not any(hidden for *_, hidden in shown["seen"])


@needs_browser
def test_a_person_in_a_browser_reads_the_columns_and_sends_a_request(
    server: RunningServer,
) -> None:
    with open_browser() as browser:
        browser.open(f"http://127.0.0.1:{server.port}/docs")
        assert browser.text("h1") == "model"
        rows = [line.split() for line in browser.texts("#columns tr")]
        assert {row[0] for row in rows} >= {"item", "city", "tags", "seen", "price", "click"}
        browser.write("#key", "browser")
        browser.click("#fill")
        browser.click("button[type=submit]")
        browser.wait_for("#outcome.good", "200 in")
        assert '"task_cache": "stored"' in browser.text("#response")
        assert browser.faults() == []


@needs_browser
def test_a_browser_shows_in_one_line_what_is_wrong_with_a_request(server: RunningServer) -> None:
    with open_browser() as browser:
        browser.open(f"http://127.0.0.1:{server.port}/docs")
        browser.write("#request", "no JSON")
        browser.click("button[type=submit]")
        browser.wait_for("#outcome.bad", "400 in")
        assert "JSON" in browser.text("#response")
        (fault,) = browser.faults()
        assert "400 (Bad Request)" in fault
