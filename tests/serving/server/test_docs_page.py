"""The page of a server: it fetches nothing from elsewhere, and its example is answered."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.server.serving import RunningServer, get, post, running_server, service_of
from tests.support.browser import Browser, needs_browser, open_browser
from tests.support.exported import FEATURES, write_random_model

NODE = shutil.which("node")
# A page without a page: what the script asks of one, and what it wrote into it. Only the ids of the
# real page are there.
STAND_IN = """
const made = () => ({
  children: [], listeners: {}, checked: true, value: "", textContent: "", className: "",
  hidden: false,
  append(...more) { this.children.push(...more); },
  replaceChildren(...these) { this.children = these; },
  addEventListener(kind, work) { this.listeners[kind] = work; },
});
const elements = Object.fromEntries(IDS.map((id) => [id, made()]));
globalThis.document = {
  getElementById: (id) => elements[id] ?? null,
  createElement: made,
};
globalThis.location = { origin: "ADDRESS" };
const fetched = globalThis.fetch;
globalThis.fetch = (path, options) => fetched("ADDRESS" + path, options);
"""
# What somebody does: tick or not, fill in, send, and send what is no JSON.
VISIT = """
(async () => {
  const seen = [];
  const send = async () => {
    await elements.form.listeners.submit({ preventDefault() {} });
    seen.push([elements.outcome.className, elements.outcome.textContent.replace(/in [0-9]+ ms/, ""),
               elements.response.textContent, elements.response.hidden]);
  };
  await send();
  elements.key.value = "seven";
  elements.key.listeners.change();
  await send();
  elements.support.checked = false;
  elements.support.listeners.change();
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
            'document.getElementById("key").value = "seven"; rearrange();'
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
    assert ", predicts probabilities; POST /v2/models/model/infer" in shown["about"]
    first, stored, again, wrong = shown["seen"]
    assert [each[:2] for each in (first, stored, again)] == [
        ["good", "200 : adapted by 3 support rows"],
        ["good", "200 : adapted by 3 support rows, task stored"],
        ["good", "200 : adapted by 3 support rows, task hit"],
    ]
    assert json.loads(first[2])["parameters"] == {"support_rows": 3}
    outputs = {each["name"]: each["data"] for each in json.loads(stored[2])["outputs"]}
    assert outputs["prediction"] != outputs["prediction_before"]
    assert json.loads(stored[2])["outputs"] == json.loads(again[2])["outputs"]
    assert wrong[:2] == ["bad", "400 "]
    assert "JSON" in wrong[2]
    assert not any(hidden for *_, hidden in shown["seen"])


@contextmanager
def page_of(server: RunningServer) -> Iterator[Browser]:
    """The page, open in a browser; it must have left no fault in the console."""
    with open_browser() as browser:
        browser.open(f"http://127.0.0.1:{server.port}/docs")
        yield browser
        assert browser.faults() == []


@needs_browser
def test_a_person_in_a_browser_reads_the_inputs_and_the_prediction(server: RunningServer) -> None:
    with page_of(server) as page:
        assert page.text("h1") == "model"
        inputs = [line.split() for line in page.texts("#columns tr")]
        assert [line[0] for line in inputs] == [
            "user", "click", "item", "city", "tags", "seen", "price",
        ]  # fmt: skip
        assert page.texts("#columns tr:nth-child(2) td") == [
            "click", "FP32", "[N]", "label", "0 to 1", "in support rows",
        ]  # fmt: skip
        page.click("#send")
        page.wait_for("#outcome.good", "adapted by 3 support rows")
        answer = {one["name"]: one["data"] for one in json.loads(page.text("#response"))["outputs"]}
        assert page.texts("#names th") == ["row", "prediction", "prediction_before"]
        for place, line in enumerate(page.texts("#rows tr")):
            shown = [f"{answer[name][place]:.4f}" for name in ("prediction", "prediction_before")]
            assert line.split() == [str(place + 1), *shown]


@needs_browser
def test_a_person_in_a_browser_keeps_a_task_and_asks_for_it_again(server: RunningServer) -> None:
    with page_of(server) as page:
        page.write("#key", "browser")
        page.click("#send")  # the field is left: its key stands in the request
        page.wait_for("#outcome.good", "task stored")
        stored = page.texts("#rows tr")
        page.click("#support")
        assert "support." not in page.value("#request")
        page.click("#send")
        page.wait_for("#outcome.good", "task hit")
        assert page.texts("#rows tr") == stored


@needs_browser
def test_a_wrong_value_is_told_in_a_line_in_the_browser(server: RunningServer) -> None:
    with page_of(server) as page:
        request = json.loads(page.value("#request"))
        next(each for each in request["inputs"] if each["name"] == "item")["data"][1] = 50
        page.write("#request", json.dumps(request))
        page.click("#send")
        page.wait_for("#outcome.bad", "400 in")
        assert page.text("#response") == (
            "query rows: column item holds id 50; table item has ids 0 to 49. Use 0 for values "
            "that the table does not know"
        )
        assert page.texts("#rows tr") == []
        (fault,) = page.faults()  # the console's own line of an answer that is none
        assert "400 (Bad Request)" in fault
        # What is typed stays, but for what the boxes are of.
        page.click("#before")
        kept = json.loads(page.value("#request"))
        assert kept == {"inputs": request["inputs"]}
        page.click("#fill")
        page.click("#send")
        page.wait_for("#outcome.good")


@needs_browser
@pytest.mark.parametrize("colors", ["light", "dark"])
def test_the_page_fits_a_phone_and_its_colors_are_read(server: RunningServer, colors: str) -> None:
    with page_of(server) as page:
        page.resize(390)
        page.prefer(colors)
        page.click("#send")
        page.wait_for("#outcome.good")
        assert page.overflow() == 0
        assert page.contrast("body", "#about", "#columns td", "#send", "#outcome", "pre") >= 4.5
