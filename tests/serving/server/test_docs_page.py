"""The page of a server: it fetches nothing from elsewhere, and its example is answered."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import httpx
import numpy as np
import pytest

from gmeta.serving.served_model import ServedModel
from tests.serving.server.serving import RunningServer, get, post, running_server, service_of
from tests.support.browser import Browser, needs_browser, open_browser
from tests.support.exported import FEATURES, write_random_model

NODE = which("node")
# A page without a page: what the script asks of one, and what it wrote into it. Only the ids of the
# real page are there.
STAND_IN = """
const made = () => ({
  children: [], listeners: {}, value: "", textContent: "", className: "", hidden: false,
  attributes: {}, style: {}, offsetTop: 0,
  append(...more) {
    this.children = [...this.children.filter((one) => !more.includes(one)), ...more];
  },
  replaceChildren(...these) { this.children = these; },
  addEventListener(kind, work) { this.listeners[kind] = work; },
  setAttribute(name, value) { this.attributes[name] = String(value); },
  focus() { document.activeElement = this; },
  animate() {},
});
const elements = Object.fromEntries(IDS.map((id) => [id, made()]));
globalThis.document = {
  getElementById: (id) => elements[id] ?? null,
  createElement: made,
  activeElement: null,
};
globalThis.matchMedia = () => ({ matches: false });
globalThis.location = { origin: "ADDRESS" };
const fetched = globalThis.fetch;
globalThis.fetch = (path, options) => fetched("ADDRESS" + path, options);
"""
# What somebody does: like, like and dislike with a key, ask by the key alone, send what is no JSON.
VISIT = """
(async () => {
  const seen = [];
  const send = async () => {
    await elements.form.listeners.submit({ preventDefault() {} });
    seen.push([elements.outcome.className, elements.outcome.textContent.replace(/in [0-9]+ ms/, ""),
               elements.response.textContent, elements.response.hidden]);
  };
  candidates[0].pair[1].listeners.click();
  await send();
  candidates[3].pair[0].listeners.click();
  elements.key.value = "seven";
  elements.key.listeners.change();
  await send();
  clicked.clear();
  compose();
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
            "clicked.set(0, 1).set(2, 0); elements.key.value = 'seven'; compose();"
            'console.log(JSON.stringify({request: elements["request"].value,'
            ' columns: elements["columns"].children.length, title: elements["title"].textContent}))'
        )
        shown = run_page(get(service, "/docs").text, told)
        assert (shown["title"], shown["columns"]) == ("model", 7)
        answer = post(service, shown["request"].encode())
        assert answer.status_code == 200, answer.text
        assert answer.json()["parameters"] == {"support_rows": 2, "task_cache": "stored"}


@pytest.mark.skipif(NODE is None, reason="no node here: apt-get install nodejs")
def test_integers_of_64_bits_and_texts_are_sent_as_they_are(exported: Path) -> None:
    text = 'null "quoted" \\ \n \u2028 true'
    with service_of(exported) as service:
        columns = service.loaded.columns
        item, city, *others = columns.read
        item = replace(item, examples=(2**62 + 1, -(2**53) - 1))
        city = replace(city, datatype="BYTES", examples=(text,))
        service.loaded = replace(
            service.loaded, columns=replace(columns, read=(item, city, *others))
        )
        page = get(service, "/docs").text
    shown = run_page(
        page,
        "form = 2; quote();"
        "console.log(JSON.stringify([elements.request.value, elements.quoted.textContent]))",
    )
    request = json.loads(shown[0])
    data = {one["name"]: one["data"] for one in request["inputs"]}
    assert (data["item"], data["city"]) == ([2**62 + 1, -(2**53) - 1], [text] * 2)
    literal = re.search(r"^request = (.*?)\nheaders", shown[1], re.DOTALL | re.MULTILINE)
    assert literal is not None
    assert ast.literal_eval(literal[1]) == request


@pytest.mark.skipif(NODE is None, reason="no node here: apt-get install nodejs")
def test_a_visit_of_the_page_is_answered_by_the_server(server: RunningServer) -> None:
    """The script of the page, all of it, in node against `gmeta serve`."""
    address = f"http://127.0.0.1:{server.port}"
    shown = run_page(httpx.get(f"{address}/docs").text, VISIT, address)
    told = {each["name"]: each for each in httpx.get(f"{address}/v2/models/model").json()["inputs"]}
    rows = {row[0]: row for row in shown["rows"]}
    assert rows.keys() >= {name.removeprefix("support.") for name in told}
    words = "ids 0 to 49; 0: unknown"
    assert rows["item"] == ["item", "INT64", "[N]", "single", words, "1, 6, 11", "yes"]
    assert rows["click"][-1] == "in support rows"
    assert ", predicts probabilities; POST /v2/models/model/infer" in shown["about"]
    first, stored, again, wrong = shown["seen"]
    assert [each[:2] for each in (first, stored, again)] == [
        ["good", "200 : adapted by 1 support rows"],
        ["good", "200 : adapted by 2 support rows, task stored"],
        ["good", "200 : adapted by 2 support rows, task hit"],
    ]
    assert json.loads(first[2])["parameters"] == {"support_rows": 1}
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
        browser.open(f"http://127.0.0.1:{server.port}/")
        yield browser
        assert browser.faults() == []


@needs_browser
def test_a_person_in_a_browser_reads_the_inputs_and_the_prediction(server: RunningServer) -> None:
    with page_of(server) as page:
        assert page.driver.current_url.endswith("/docs")
        assert page.text("h1") == "model"
        inputs = [line.split() for line in page.texts("#columns tr")]
        assert [line[0] for line in inputs] == [
            "user", "click", "item", "city", "tags", "seen", "price",
        ]  # fmt: skip
        assert page.texts("#columns tr:nth-child(2) td") == [
            "click", "FP32", "[N]", "label", "0 to 1", "0.0, 1.0", "in support rows",
        ]  # fmt: skip
        # Nothing was clicked or typed.
        page.wait_for("#outcome.good", "not adapted")
        assert page.text("#moved").startswith("10 candidates as everybody gets them.")
        answer = {one["name"]: one["data"] for one in json.loads(page.text("#response"))["outputs"]}
        assert page.texts("#names th") == ["row", "prediction", "prediction_before"]
        for place, line in enumerate(page.texts("#rows tr")):
            shown = [f"{answer[name][place]:.4f}" for name in ("prediction", "prediction_before")]
            assert line.split() == [str(place + 1), *shown]
        assert ["GET", "/openapi.json"] in [
            line.split()[:2] for line in page.texts("#endpoints tr")
        ]


ITEMS = [1, 6, 11, 17, 22, 27, 33, 38, 43, 49]


def candidate_rows(items: list[int], **more: Any) -> dict[str, Any]:
    """What the page says of these items, in Python."""
    same = {"city": 4, "tags": [6], "seen": [27], "price": 1.5}
    return {"item": items, **{name: [value] * len(items) for name, value in same.items()}, **more}


@needs_browser
def test_clicks_move_the_candidates_as_the_model_adapts(
    server: RunningServer, model: ServedModel
) -> None:
    before = model.predict(candidate_rows(ITEMS)).tolist()
    support = candidate_rows([22, 1, 43], click=[1.0, 0.0, 1.0])
    after = model.adapt(support).predict(candidate_rows(ITEMS)).tolist()
    order, was = (sorted(range(10), key=lambda at: -scores[at]) for scores in (after, before))
    assert order != was
    with page_of(server) as page:
        page.wait_for("#outcome.good", "not adapted")
        assert page.texts("#ranking .name") == [str(ITEMS[at]) for at in was]
        page.click("[aria-label='like 22']")
        # By keys, as the candidates move away from the pointer: the focus goes with its button.
        page.find("[aria-label='dislike 1']").send_keys(" ")
        page.find("[aria-label='like 43']").send_keys("\n")
        page.wait_for("#moved", "Adapted to 3 support rows")
        assert page.driver.switch_to.active_element.get_attribute("aria-label") == "like 43"
        moved = sum(one != other for one, other in zip(order, was, strict=True))
        assert page.text("#moved").endswith(f": {moved} of 10 candidates changed places.")
        assert page.texts("#ranking .name") == [str(ITEMS[at]) for at in order]
        shown = [
            f"{before[at]:.4f}"
            + f" to {after[at]:.4f}" * (f"{before[at]:.4f}" != f"{after[at]:.4f}")
            for at in order
        ]
        assert page.texts("#ranking .scores") == shown
        widths = [
            float(bar.value_of_css_property("width").removesuffix("px"))
            for bar in page.driver.find_elements("css selector", "#ranking .after")
        ]
        longest = widths[0] / after[order[0]]
        np.testing.assert_allclose(widths, [after[at] * longest for at in order], atol=0.1)
        pressed = page.texts("#ranking [aria-pressed=true]")
        assert sorted(pressed) == ["dislike", "like", "like"]
        page.click("[aria-label='like 43']")  # again: taken back
        page.wait_for("#moved", "Adapted to 2 support rows")
        page.click("#clear")
        page.wait_for("#outcome.good", "not adapted")
        assert page.texts("#ranking .name") == [str(ITEMS[at]) for at in was]
        page.find("#item").send_keys("city")
        page.wait_for("#moved", "7 candidates")


@needs_browser
def test_the_request_as_a_command_gives_the_same_answer(server: RunningServer) -> None:
    with page_of(server) as page:
        page.wait_for("#outcome.good", "not adapted")
        page.click("#ranking button")
        page.wait_for("#outcome.good", "adapted by 1 support rows")
        answer = json.loads(page.text("#response"))
        said = []
        for place, shell in ((2, ["bash", "-c"]), (3, [sys.executable, "-c"])):
            page.click(f"#forms button:nth-child({place})")
            assert page.text("#request") == ""  # hidden
            command = page.find("#quoted").get_property("textContent")
            if which(shell[0]) and (place > 2 or which("curl")):
                done = subprocess.run([*shell, command], capture_output=True, text=True, check=True)
                said.append(ast.literal_eval(done.stdout))
        assert said == [answer] * len(said)
        assert said


@needs_browser
def test_a_person_in_a_browser_keeps_a_task_and_asks_for_it_again(server: RunningServer) -> None:
    with page_of(server) as page:
        page.wait_for("#outcome.good", "not adapted")
        page.write("#key", "browser")
        page.click("#ranking button")  # the field is left: its key stands in the request
        page.wait_for("#outcome.good", "task stored")
        stored = page.texts("#rows tr")
        page.click("#clear")
        assert "support." not in page.value("#request")
        page.wait_for("#outcome.good", "task hit")
        assert page.texts("#rows tr") == stored


@needs_browser
def test_a_wrong_value_is_told_in_a_line_in_the_browser(server: RunningServer) -> None:
    with page_of(server) as page:
        page.wait_for("#outcome.good")
        request = json.loads(page.value("#request"))
        next(each for each in request["inputs"] if each["name"] == "item")["data"][1] = 50
        page.write("#request", json.dumps(request))
        page.click("#send")
        page.wait_for("#outcome.bad", "400 in")
        line = (
            "query rows: column item holds id 50; table item has ids 0 to 49. Use 0 for values "
            "that the table does not know"
        )
        assert (page.text("#response"), page.text("#moved")) == (line, line)
        assert not any(page.texts("#rows tr"))  # hidden
        (fault,) = page.faults()  # the console's own line of an answer that is none
        assert "400 (Bad Request)" in fault
        page.click("#clear")
        page.wait_for("#outcome.good")


@needs_browser
@pytest.mark.parametrize("colors", ["light", "dark"])
def test_the_page_fits_a_phone_and_its_colors_are_read(server: RunningServer, colors: str) -> None:
    with page_of(server) as page:
        page.resize(390)
        page.prefer(colors)
        page.wait_for("#outcome.good")
        page.click("#ranking button")
        page.wait_for("#outcome.good", "adapted by 1")
        assert page.overflow() == 0
        read = ("body", "#about", "#moved", "#columns td", "#send", "#outcome", "pre", ".legend")
        pressed = ("#ranking [aria-pressed=true]", "#ranking [aria-pressed=false]", "select")
        assert page.contrast(*read, *pressed, ".scores", "#same", "#endpoints td") >= 4.5
