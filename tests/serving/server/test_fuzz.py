"""Requests that are wrong in random ways: each is refused in a line, the server stays as it was.
GMETA_FUZZ_REQUESTS=5000 sends more of them, and as many that are right."""

import copy
import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.server.serving import INFER, RunningServer, request_of, running_server
from tests.support.exported import random_rows
from tests.support.waiting import PATIENCE_S

NUM_REQUESTS = int(os.environ.get("GMETA_FUZZ_REQUESTS", "300"))
GROWTH_BYTES = 48 << 20  # allocators keep some; a leak of 100 KB a request would be more
VALID = request_of(random_rows(6, seed=2), random_rows(9, seed=1), key="fuzz")
NUM_KEYS = 500
Body = tuple[bytes, dict[str, str]]
SINGLE = ("item", "city", "price", "support.item", "support.city", "support.price", "support.click")


def json_body(request: Any) -> Body:
    return json.dumps(request).encode(), {}


def right_request(number: int) -> dict[str, Any]:
    """One of those between the wrong ones: every second with a task's key, which comes again."""
    key = {"task_key": f"k{number % (2 * NUM_KEYS)}"} if number % 2 else {}
    return {**VALID, "parameters": key}


def inputs_of(request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in request["inputs"]}


def some_json(rng: random.Random) -> Any:
    return rng.choice(
        [
            None, True, -1, 2**80, 1e308, "", "x", "\ud800", [], [[]], {}, {"a": [1]}, [None],
            float("nan"),
        ]
    )  # fmt: skip


def no_input(rng: random.Random, request: dict[str, Any]) -> Body:
    del request["inputs"][rng.choice([0, 1, 2, 4, 6])]
    return json_body(request)


def another_name(rng: random.Random, request: dict[str, Any]) -> Body:
    one = rng.choice(request["inputs"])
    one["name"] = rng.choice([one["name"] + "x", None, 3, "", ["item"], "support." + one["name"]])
    return json_body(request)


def another_datatype(rng: random.Random, request: dict[str, Any]) -> Body:
    each = inputs_of(request)[rng.choice(SINGLE)]
    each["datatype"] = rng.choice(["BYTES", "BOOL", "BF16", "INT63", None, 7, ["INT64"], {}])
    return json_body(request)


def another_shape(rng: random.Random, request: dict[str, Any]) -> Body:
    each = rng.choice(request["inputs"])
    size = each["shape"][0]
    wrong = [
        [], [size + 1], [-size - 1], [size, 2], [1, 1, size + 1], None, "6", [2**62, 3], [0.5],
        [True],
    ]  # fmt: skip
    each["shape"] = rng.choice(wrong)
    return json_body(request)


def wrong_element(rng: random.Random, request: dict[str, Any]) -> Body:
    each = inputs_of(request)[rng.choice(SINGLE)]
    place = rng.randrange(len(each["data"]))
    each["data"][place] = rng.choice([None, "7", [1], {}, True, 2**64, "\ud800"])
    return json_body(request)


def impossible_value(rng: random.Random, request: dict[str, Any]) -> Body:
    name, values = rng.choice(
        [
            ("item", [-1, 50, 2**62]), ("support.city", [-1, 8, -(2**63)]),
            ("support.click", [2, -1]), ("price", [float("nan"), float("inf"), 1e308]),
            ("tags", [-5, 12]),
        ]
    )  # fmt: skip
    each = inputs_of(request)[name]
    each["data"][rng.randrange(len(each["data"]))] = rng.choice(values)
    return json_body(request)


def wrong_lengths(rng: random.Random, request: dict[str, Any]) -> Body:
    each = inputs_of(request)[rng.choice(["tags.lengths", "support.seen.lengths"])]
    each["data"][rng.randrange(len(each["data"]))] += rng.choice([1, -100, 2**40])
    return json_body(request)


def twice(rng: random.Random, request: dict[str, Any]) -> Body:
    request["inputs"].append(rng.choice(request["inputs"]))
    return json_body(request)


def wrong_part(rng: random.Random, request: dict[str, Any]) -> Body:
    part, values = rng.choice(
        [
            ("inputs", [3, "x", {}, [3], [[]], None]),
            ("parameters", [3, "x", []]),
            ("outputs", [3, "x", [3], [{}], [{"name": "no"}], [{"name": 3}]]),
            ("id", [3, [], {}, "x" * 257]),
        ]
    )
    request[part] = rng.choice(values)
    return json_body(request)


def wrong_key(rng: random.Random, request: dict[str, Any]) -> Body:
    request["parameters"]["task_key"] = rng.choice([3, "", "x" * 257, "a\nb", [], {}, True])
    return json_body(request)


def wrong_data(rng: random.Random, request: dict[str, Any]) -> Body:
    rng.choice(request["inputs"])["data"] = rng.choice(
        [3, "abc", {}, None, [[[1]]], [some_json(rng)] * 99]
    )
    return json_body(request)


def cut_short(rng: random.Random, request: dict[str, Any]) -> Body:
    body = json.dumps(request).encode()
    return body[: rng.randrange(len(body))], {}


def noise(rng: random.Random, request: dict[str, Any]) -> Body:
    return b"\x00" + rng.randbytes(rng.randrange(2_000)), {}


def deep(rng: random.Random, request: dict[str, Any]) -> Body:
    return rng.choice([b"[", b'{"a":', b'{"inputs":[']) * rng.randrange(1_000, 50_000), {}


def wrong_header(rng: random.Random, request: dict[str, Any]) -> Body:
    length = rng.choice(["-1", "x", "999999999", "9" * 5_000, "1.5", "0x10", "", "7"])
    return json.dumps(request).encode(), {"Inference-Header-Content-Length": length}


def wrong_binary(rng: random.Random, request: dict[str, Any]) -> Body:
    each = inputs_of(request)[rng.choice(SINGLE)]
    del each["data"]
    if rng.random() < 0.5:
        each["datatype"] = "BYTES"
    size = rng.choice([0, 1, 47, 2**40, -1, "48", None, True])
    each["parameters"] = {"binary_data_size": size}
    text = json.dumps(request).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    return text + rng.randbytes(size if type(size) is int and 0 <= size < 100 else 60), headers


def too_many_rows(rng: random.Random, request: dict[str, Any]) -> Body:
    for each in request["inputs"]:
        if not each["name"].startswith("support."):
            each["data"] *= 2_000
            each["shape"][0] *= 2_000
    return json_body(request)


def packed(rng: random.Random, request: dict[str, Any]) -> Body:
    return json.dumps(request).encode(), {"Content-Encoding": rng.choice(["gzip", "br", "x"])}


MUTATIONS: tuple[Callable[[random.Random, dict[str, Any]], Body], ...] = (
    no_input, another_name, another_datatype, another_shape, wrong_element, impossible_value,
    wrong_lengths, twice, wrong_part, wrong_key, wrong_data, cut_short, noise, deep, wrong_header,
    wrong_binary, too_many_rows, packed,
)  # fmt: skip


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[RunningServer]:
    with running_server(exported, "--no-access-log", "--timeout", "60") as found:
        yield found


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def assert_well(server: RunningServer, client: httpx.Client) -> None:
    """It runs, and answers a request that is right."""
    assert server.process.poll() is None, server.process.stderr
    assert client.post(INFER, json=VALID).status_code == 200


def test_wrong_requests_are_refused_in_a_line_and_leave_nothing(server: RunningServer) -> None:
    rng = random.Random(7)
    warm = NUM_REQUESTS // 4
    before = 0
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S) as client:
        for number in range(NUM_REQUESTS):
            mutation = MUTATIONS[number % len(MUTATIONS)]
            body, headers = mutation(rng, copy.deepcopy(VALID))
            answer = client.post(INFER, content=body, headers=headers)
            told = f"{mutation.__name__}: {body[:300]!r} {headers} -> {answer.text[:300]}"
            assert 400 <= answer.status_code < 500, told
            assert set(answer.json()) == {"error"}, told
            line = answer.json()["error"]
            assert line.isprintable(), told
            assert 10 < len(line) <= 1_000, told
            assert client.post(INFER, json=right_request(number)).status_code == 200, number
            if number == warm:
                before = resident_bytes(server.process.pid)
        assert resident_bytes(server.process.pid) - before < GROWTH_BYTES
        assert_well(server, client)
        page = client.get("/metrics").text
    assert 'status="500"' not in page
    assert "Traceback" not in server.process.stderr


def test_what_is_no_http_ends_its_own_connection_alone(server: RunningServer) -> None:
    rng = random.Random(3)
    heads = [
        b"\x16\x03\x01" + rng.randbytes(200), b"GET\r\n\r\n",
        b"POST /v2/models/model/infer HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, b"GET /" + b"a" * 200_000,
        *(rng.randbytes(rng.randrange(1, 400)) + b"\r\n\r\n" for _ in range(NUM_REQUESTS // 10)),
    ]  # fmt: skip
    for head in heads:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            try:
                connection.sendall(head)
                answer = connection.recv(1 << 16)
            except OSError:
                continue  # it hung up in the middle
            assert not answer or answer.startswith(b"HTTP/1.1 4"), (head[:100], answer)
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S) as client:
        assert_well(server, client)
