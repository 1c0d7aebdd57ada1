"""The protocol over HTTP: the model's predictions, and a line on what is wrong in a request."""

import asyncio
import json
import logging
import os
import re
import socket
import ssl
import struct
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from prometheus_client import values as values_of_metrics

from gmeta.access.auth import Tokens
from gmeta.access.credentials import ServerTls
from gmeta.access.log import LOGGER_NAME
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.errors import GMetaError
from gmeta.serving.served_model import ServedModel
from gmeta.serving.server import http_app, inference_protocol, request_rows
from gmeta.serving.server.access import ServerAccess
from gmeta.serving.server.http_connection import http_server
from gmeta.serving.server.inference_service import InferenceService
from gmeta.serving.server.server_limits import BatchLimits, RequestLimits
from gmeta.serving.server.server_metrics import MULTIPROCESS_DIR, ServerMetrics, share_metrics
from gmeta.serving.server.shared_support import SharedSupport
from tests.antdt.pki import Authority
from tests.serving.server.serving import (
    INFER,
    get,
    post,
    request_of,
    service_of,
    tensor,
    values,
    with_client,
)
from tests.support.exported import random_rows, write_random_model
from tests.support.full_disk import files_of_at_most

QUERY = random_rows(6, seed=2)
SUPPORT = random_rows(9, seed=1)


def assert_close(found: np.ndarray[Any, Any], expected: torch.Tensor) -> None:
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-6)


def test_query_rows_alone_do_not_adapt(service: InferenceService, model: ServedModel) -> None:
    answer = post(service, request_of(QUERY) | {"id": "seven"})
    assert_close(values(answer), model.predict(QUERY))
    told = answer.json()
    assert told["model_name"], told["id"] == ("model", "seven")
    assert told["model_version"] == service.loaded.version
    assert told["parameters"] == {"support_rows": 0}


def test_support_rows_adapt(service: InferenceService, model: ServedModel) -> None:
    outputs = ("prediction", "prediction_before")
    answer = post(service, request_of(QUERY, SUPPORT, outputs=outputs))
    assert_close(values(answer), model.adapt(SUPPORT).predict(QUERY))
    assert_close(values(answer, "prediction_before"), model.predict(QUERY))
    assert answer.json()["parameters"] == {"support_rows": 9}


def test_no_support_rows_are_a_task_of_which_nothing_is_known(
    service: InferenceService, model: ServedModel
) -> None:
    answer = post(service, request_of(QUERY, SUPPORT.slice(0, 0)))
    assert_close(values(answer), model.predict(QUERY))


def test_a_task_is_kept_by_its_key(service: InferenceService, model: ServedModel) -> None:
    missing = post(service, request_of(QUERY, key="user 7"))
    assert missing.status_code == 404
    assert missing.json()["error"].startswith("task 'user 7' is not in the cache: ")
    stored = post(service, request_of(QUERY, SUPPORT, key="user 7"))
    hit = post(service, request_of(QUERY, key="user 7"))
    assert stored.json()["parameters"] == {"support_rows": 9, "task_cache": "stored"}
    assert hit.json()["parameters"] == {"support_rows": 9, "task_cache": "hit"}
    for answer in (stored, hit):
        assert_close(values(answer), model.adapt(SUPPORT).predict(QUERY))
    alone = post(service, request_of(None, QUERY, key="user 8"))
    expected = [{"name": "prediction", "datatype": "FP32", "shape": [0], "data": []}]
    assert alone.json()["outputs"] == expected
    assert_close(
        values(post(service, request_of(QUERY, key="user 8"))), model.adapt(QUERY).predict(QUERY)
    )


def test_a_task_that_has_no_room_is_not_told_as_stored(exported: Path) -> None:
    with service_of(exported, cache_bytes=0) as service:
        answer = post(service, request_of(QUERY, SUPPORT, key="user 7"))
        assert answer.json()["parameters"] == {"support_rows": 9, "task_cache": "too_large"}
        assert post(service, request_of(QUERY, key="user 7")).status_code == 404


def test_requests_that_wait_are_answered_together_each_by_its_own_rows(
    service: InferenceService, model: ServedModel
) -> None:
    tasks = [(random_rows(3 + i, seed=i), random_rows(1 + i % 4, seed=50 + i)) for i in range(12)]
    requests = [request_of(query, support) for support, query in tasks]
    wrong = request_of(QUERY, SUPPORT)
    wrong["inputs"][0]["data"][2] = 50  # a row of a table of 50

    async def all_at_once(client: httpx.AsyncClient) -> list[httpx.Response]:
        calls = [client.post(INFER, content=json.dumps(each)) for each in [*requests, wrong]]
        return await asyncio.gather(*calls)

    *answers, refused = with_client(service, all_at_once)
    for answer, (support, query) in zip(answers, tasks, strict=True):
        assert_close(values(answer), model.adapt(support).predict(query))
    assert refused.status_code == 400
    assert refused.json() == {
        "error": "query rows: column item holds id 50; table item has ids 0 to 49. Use 0 for "
        "values that the table does not know"
    }
    batches = service.metrics.registry.get_sample_value("gmeta_serve_batch_tasks_count")
    assert batches is not None
    assert batches < 13


def test_binary_parts_stand_behind_the_json(service: InferenceService, model: ServedModel) -> None:
    columns = {name: QUERY[name].to_numpy() for name in ("item", "city", "price")}
    parts = [columns["item"], columns["city"], columns["price"]]
    inputs: list[dict[str, Any]] = [
        {
            "name": name, "datatype": "FP64" if name == "price" else "INT64", "shape": [6, 1],
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in columns.items()
    ]  # fmt: skip
    lists = [one for one in request_of(QUERY)["inputs"] if one["name"].startswith(("tags", "seen"))]
    head = {"inputs": [*inputs, *lists], "parameters": {"binary_data_output": True}}
    text = json.dumps(head).encode()
    body = text + b"".join(part.tobytes() for part in parts)
    headers = {"Inference-Header-Content-Length": str(len(text))}
    answer = post(service, body, headers=headers)
    assert answer.status_code == 200, answer.text
    length = int(answer.headers["Inference-Header-Content-Length"])
    (output,) = json.loads(answer.content[:length])["outputs"]
    assert output == {
        "name": "prediction", "datatype": "FP32", "shape": [6],
        "parameters": {"binary_data_size": 24},
    }  # fmt: skip
    found = np.frombuffer(answer.content[length:], "<f4")
    assert_close(found, model.predict(QUERY))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"inputs": 3}, "inputs is 3; a list of objects is needed. Correct it"),
        ({"inputs": []}, "the request has no rows to predict: send the model's columns as inputs"),
        ({"outputs": [{"name": "x"}]}, "output 'x' is unknown; there are prediction, "),
        ({"parameters": {"task_key": 3}}, "parameter task_key is 3; allowed are texts of 1 to 256"),
        ({"id": 3}, "id is 3; a text is needed. Correct it"),
    ],
)
def test_a_wrong_request_is_told_in_a_line(
    service: InferenceService, change: dict[str, Any], told: str
) -> None:
    answer = post(service, request_of(QUERY) | change)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(told)
    assert "\n" not in answer.json()["error"]


def test_a_null_is_a_field_that_is_left_out(service: InferenceService) -> None:
    """Clients that make requests of typed objects send every field."""
    request = request_of(QUERY)
    expected = values(post(service, request))
    request["inputs"] = [each | {"parameters": None} for each in request["inputs"]]
    request["outputs"] = [{"name": "prediction", "parameters": None}]
    for left_out in ({}, {"outputs": None}):
        answer = post(service, request | {"id": None, "parameters": None} | left_out)
        np.testing.assert_array_equal(values(answer), expected)


@pytest.mark.filterwarnings("error")  # one would stand between the lines of the log
def test_a_number_too_large_for_16_bits_is_told_alone(service: InferenceService) -> None:
    request = request_of(QUERY)
    (price,) = (each for each in request["inputs"] if each["name"] == "price")
    price |= {"datatype": "FP16", "data": [1e30] * 6}
    assert "column price holds" in post(service, request).json()["error"]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (
            tensor("itme", "INT64", [1]),
            "input 'itme' is no column of this model; did you mean item?",
        ),
        (tensor("item", "INT64", [1] * 6), "input item is there twice; once is allowed"),
        (tensor("support.item", "INT64", [1]), "support rows have no column city; they have item."),
        (tensor("seen.lengths", "INT64", [1] * 6), "input seen.lengths is there twice"),
    ],
)
def test_wrong_inputs_are_told(service: InferenceService, extra: dict[str, Any], told: str) -> None:
    request = request_of(QUERY)
    request["inputs"].append(extra)
    answer = post(service, request)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(told)


def test_rows_of_two_tasks_are_no_task(service: InferenceService) -> None:
    request = request_of(QUERY, SUPPORT)
    request["inputs"].append(tensor("support.user", "INT64", [1] * 8 + [2]))
    found = post(service, request).json()["error"]
    assert found == (
        "the support rows are of 2 tasks; a request is of one, or of several that task.lengths "
        "tells apart. Send a request for each, or these inputs"
    )


@pytest.mark.parametrize("lists", [[0, 2], [2]])
def test_lists_of_one_length_are_a_rectangle(service: InferenceService, lists: list[int]) -> None:
    flat = request_of(QUERY.slice(0, 1))
    kept = [each for each in flat["inputs"] if not each["name"].startswith(("tags", "seen"))]
    one = {"name": "tags", "datatype": "INT64", "shape": [1, len(lists)], "data": [lists]}
    same = [tensor("tags", "INT64", lists), tensor("tags.lengths", "INT64", [len(lists)])]
    seen = [tensor("seen", "INT64", []), tensor("seen.lengths", "INT64", [0])]
    as_rectangle = values(post(service, {"inputs": [*kept, one, *seen]}))
    as_lengths = values(post(service, {"inputs": [*kept, *same, *seen]}))
    assert as_rectangle.tolist() == as_lengths.tolist()


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ([2, 2], "input tags.lengths adds up to 4; tags has 3 values"),
        ([-1, 4], "input tags.lengths adds up to 3; tags has 3 values, and no length may be below"),
    ],
)
def test_lengths_of_lists_add_up(service: InferenceService, lengths: list[int], told: str) -> None:
    inputs = [tensor("tags", "INT64", [1, 2, 3]), tensor("tags.lengths", "INT64", lengths)]
    assert post(service, {"inputs": inputs}).json()["error"].startswith(told)


def test_what_is_no_json_is_told(service: InferenceService) -> None:
    for body in (b"", b"{", b"\xff", b"[" * 100_000, b'{"inputs": ' + b"9" * 5_000 + b"}"):
        answer = post(service, body)
        assert answer.status_code == 400, body[:20]
        assert re.match(r"the body is |inputs is ", answer.json()["error"])


def test_limits_of_a_request(exported: Path) -> None:
    with service_of(exported, limits=RequestLimits(body_bytes=3_000, rows=5)) as service:
        answer = post(service, request_of(QUERY))
        assert (answer.status_code, answer.json()["error"]) == (
            413,
            "the request has 6 rows of both sides; at most 5 are allowed. Split it, or start the "
            "server with a higher --max-rows",
        )

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(40):
                taken.append(b" " * 100)
                yield taken[-1]

        taken: list[bytes] = []
        for body in (b" " * 3_001, parts()):
            answer = post(service, body)
            assert answer.status_code == 413
            assert answer.json()["error"].startswith("the body has more than 3000 bytes, the most")
            assert answer.headers["connection"] == "close"
        assert len(taken) == 40  # else its caller would meet a closed connection, and no answer
        answer = post(service, b" " * 3_001, headers={"Expect": "100-continue"})
        assert answer.status_code == 413
        answer = post(service, b"x", headers={"Content-Encoding": "gzip"})
        assert answer.status_code == 415


def test_more_lists_than_rows_could_need_are_never_made(
    service: InferenceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = (10_000 + 100) * 7 + 1_000
    made = []
    parse = inference_protocol.from_json
    monkeypatch.setattr(
        inference_protocol, "from_json", lambda *args, **kw: made.append(1) or parse(*args, **kw)
    )
    for many in (b"[]", b"{}", b'{"a":0}', b'"[","\\"",[],":\\\\"'):
        body = b'{"inputs":[' + b",".join([many] * 80_000) + b"]}"
        answer = post(service, body)
        assert answer.status_code == 400
        assert f"lists, objects and keys; at most {most} are allowed" in answer.json()["error"]
    assert made == []
    # As many in a text, behind quotes that do not end it, are only characters.
    text = json.dumps('\\"[' * most + "\\")
    assert post(service, f'{{"id": {text}}}').json()["error"].startswith("id has ")
    assert post(service, request_of(QUERY) | {"x": '"[{:' * most}).status_code == 200


def test_a_long_name_is_compared_with_no_column(
    service: InferenceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_rows.difflib, "get_close_matches", lambda *_, **__: 1 / 0)
    for name in ("x" * 1025, "x" * (1 << 20), "support." + "x" * 2000):
        answer = post(service, {"inputs": [tensor(name, "INT64", [1])]})
        assert answer.status_code == 400
        assert f"has a name of {len(name)} characters; at most 1024" in answer.json()["error"]


def test_large_bodies_are_held_up_to_a_number_of_bytes(exported: Path) -> None:
    limits = RequestLimits(body_bytes=1 << 20)
    with service_of(exported, limits=limits) as service, service._held.share() as hold:
        hold(7 << 20)  # of others
        padded = request_of(QUERY) | {"x": "y" * (900 << 10)}
        for _ in range(3):  # each is let go of with its answer
            assert post(service, padded).status_code == 200
        hold((7 << 20) + (200 << 10))
        answer = post(service, padded)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"].startswith("large requests under way hold 7544832 by")
        assert post(service, request_of(QUERY)).status_code == 200
    assert service._held._held == 0


def test_rows_of_empty_lists_take_no_memory_uncounted(service: InferenceService) -> None:
    request = request_of(QUERY)
    lists = {"name": "tags", "datatype": "INT64", "shape": [20_000_000, 0], "data": []}
    request["inputs"] = [one for one in request["inputs"] if not one["name"].startswith("tags")]
    request["inputs"].append(lists)
    tracemalloc.start()
    try:
        answer = post(service, request)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (answer.status_code, answer.json()["error"]) == (
        413,
        "the request has 20000000 rows of both sides; at most 10000 are allowed. Split it, or "
        "start the server with a higher --max-rows",
    )
    assert peak_bytes < 20_000_000


def test_a_task_that_is_too_long_to_solve_holds_up_nobody_else(tmp_path: Path) -> None:
    write_random_model(tmp_path / "model", algorithm=AlgorithmConfig("ridge", inner_lr=0.3))
    requests = [request_of(QUERY, support) for support in (random_rows(2_049), SUPPORT)]

    async def both(client: httpx.AsyncClient) -> list[httpx.Response]:
        calls = [client.post(INFER, content=json.dumps(each)) for each in requests]
        return await asyncio.gather(*calls)

    with service_of(tmp_path / "model") as service:
        refused, answer = with_client(service, both)
        assert_close(values(answer), service.loaded.model.adapt(SUPPORT).predict(QUERY))
    assert (refused.status_code, refused.json()["error"]) == (
        413,
        "the request has 2,049 support rows; ridge, which solves for as many unknowns, takes at "
        "most 2,048. Keep the newest of them",
    )


def test_a_caller_who_leaves_amid_the_body_is_no_failure(service: InferenceService) -> None:
    async def left(client: httpx.AsyncClient) -> None:
        parts = iter(
            [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
        )

        async def receive() -> Any:
            return next(parts)

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": INFER, "headers": [], "app": None}
        scope |= {"query_string": b"", "http_version": "1.1", "client": ("127.0.0.1", 1)}
        await http_app.http_app(service)(scope, receive, send)

    with_client(service, left)
    page = get(service, "/metrics").text.splitlines()
    expected = ['gmeta_serve_requests_total{protocol="http",status="499"} 1.0']
    assert [line for line in page if line.startswith("gmeta_serve_requests_total")] == expected


def test_too_many_that_wait_are_told_when_to_come_back(exported: Path) -> None:
    with service_of(exported, batch=BatchLimits(waiting=2, inline_s=-1.0)) as service:
        # Nobody answers until this is released: the thread that does is held in a request's batch.
        held, run = asyncio.Event(), service._batcher._run
        loop_of: list[asyncio.AbstractEventLoop] = []

        def slow(requests: Any) -> Any:
            asyncio.run_coroutine_threadsafe(held.wait(), loop_of[0]).result()
            return run(requests)

        service._batcher._run = slow

        async def many(client: httpx.AsyncClient) -> list[httpx.Response]:
            loop_of.append(asyncio.get_running_loop())
            body = json.dumps(request_of(QUERY))
            first = asyncio.create_task(client.post(INFER, content=body))
            while service.metrics.registry.get_sample_value("gmeta_serve_batch_tasks_count") != 1:
                await asyncio.sleep(0.005)
            rest = [asyncio.create_task(client.post(INFER, content=body)) for _ in range(5)]
            await asyncio.wait(rest, return_when="FIRST_COMPLETED")
            while sum(task.done() for task in rest) < 3:
                await asyncio.sleep(0.005)
            held.set()
            return list(await asyncio.gather(first, *rest))

        answers = with_client(service, many)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 429, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"].startswith("2 requests wait; no more are taken. Retry after")


def test_a_request_that_takes_too_long_ends(exported: Path) -> None:
    with service_of(exported, batch=BatchLimits(timeout_s=0.05, inline_s=-1.0)) as service:
        run = service._batcher._run

        async def slow_call(client: httpx.AsyncClient) -> httpx.Response:
            released = asyncio.Event()
            loop = asyncio.get_running_loop()

            def slow(requests: Any) -> Any:
                asyncio.run_coroutine_threadsafe(released.wait(), loop).result()
                return run(requests)

            service._batcher._run = slow
            answer = await client.post(INFER, content=json.dumps(request_of(QUERY)))
            released.set()
            return answer

        answer = with_client(service, slow_call)
    assert answer.status_code == 504
    assert answer.json()["error"].startswith("the request was not answered within 0.05 s")


def test_metadata_as_the_protocol_has_it(service: InferenceService) -> None:
    version = service.loaded.version
    told = get(service, "/v2/models/model").json()
    assert told == get(service, f"/v2/models/model/versions/{version}").json()
    expected = ("model", [version], "gmeta_export")
    assert (told["name"], told["versions"], told["platform"]) == expected
    inputs = {each["name"]: (each["datatype"], each["shape"]) for each in told["inputs"]}
    assert inputs["item"] == ("INT64", [-1])
    assert inputs["tags"] == ("INT64", [-1, -1])
    assert inputs["price"] == ("FP32", [-1])
    assert inputs["support.click"] == ("FP32", [-1])
    assert "click" not in inputs
    assert [each["name"] for each in told["outputs"]] == ["prediction", "prediction_before"]
    assert get(service, "/v2").json()["extensions"] == ["binary_tensor_data"]
    assert get(service, "/v2/health/live").json() == {"live": True}
    assert get(service, "/v2/health/ready").json() == {"ready": True}
    assert get(service, "/v2/models/model/ready").json() == {"name": "model", "ready": True}
    service.ready = False
    assert get(service, "/v2/health/ready").status_code == 503
    assert get(service, "/v2/health/live").status_code == 200


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v2/models/other/infer", "model 'other' is not served here; model is. Correct it"),
        ("/v2/models/model/versions/0/infer", "version '0' of model is not served; "),
        ("/v2/nothing", "POST '/v2/nothing' is not answered: Not Found. See /docs for what is"),
    ],
)
def test_what_is_not_here_is_told(service: InferenceService, path: str, told: str) -> None:
    answer = post(service, request_of(QUERY), path)
    assert answer.status_code == 404
    assert answer.json()["error"].startswith(told)


def test_a_full_place_of_shared_tasks_fails_no_request(exported: Path, tmp_path: Path) -> None:
    shared = SharedSupport(tmp_path / "support.db", 1 << 20)
    with service_of(exported, shared=shared) as service:
        (pages,) = shared._db.execute("pragma page_count").fetchone()
        shared._db.execute(f"pragma max_page_count = {pages}")
        long = random_rows(900, seed=1)

        async def together(client: httpx.AsyncClient) -> list[httpx.Response]:
            requests = [request_of(QUERY, long, key="long"), request_of(QUERY, SUPPORT)]
            calls = [client.post(INFER, content=json.dumps(each)) for each in requests]
            return await asyncio.gather(*calls)

        answers = [*with_client(service, together), post(service, request_of(QUERY, key="long"))]
        expected = [service.loaded.model.adapt(rows).predict(QUERY) for rows in (long, SUPPORT)]
        for answer, prediction in zip(answers, [*expected, expected[0]], strict=True):
            assert_close(values(answer), prediction)
        assert answers[2].json()["parameters"]["task_cache"] == "hit"
        assert "gmeta_serve_cache_unshared 1.0" in get(service, "/metrics").text.splitlines()


def test_a_defect_of_the_server_is_told_in_its_log(
    service: InferenceService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError("no such thing")

    monkeypatch.setattr(http_app, "parse_http", broken)
    monkeypatch.setattr(logging.getLogger(LOGGER_NAME), "propagate", True)
    answer = post(service, request_of(QUERY))
    told = {"error": "the server failed on this request; its log says why"}
    assert (answer.status_code, answer.json()) == (500, told)
    assert "ZeroDivisionError: no such thing" in caplog.text


def test_so_many_connections_are_answered_as_the_option_says(service: InferenceService) -> None:
    async def work() -> list[int]:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            server = http_server(http_app.http_app(service), 1, 0.0, None)
            serving = asyncio.create_task(server.serve([listening]))
            place = f"http://127.0.0.1:{listening.getsockname()[1]}/v2"
            while not server.started:
                await asyncio.sleep(0.005)
            async with httpx.AsyncClient() as one, httpx.AsyncClient() as other:
                found = [(await client.get(place)).status_code for client in (one, other, one)]
                # A pod that is as busy as it may be must not be killed by its own probe.
                for client in (other, one, other):
                    assert (await client.get(f"{place}/health/live")).status_code == 200
                refused = await other.post(f"{place}/models/model/infer")
                found += [refused.status_code]
            server.should_exit = True
            await serving
        told = refused.json()["error"]
        assert told.startswith("this worker has more than 1024 connections. Call another server, ")
        assert refused.headers["connection"] == "close"
        return found

    assert asyncio.run(work()) == [200, 503, 200, 503]
    counted = 'gmeta_serve_requests_total{protocol="http",status="503"} 1.0'
    assert counted in get(service, "/metrics").text.splitlines()


@pytest.mark.parametrize("kind", ["silent", "probing", "half a hello"])
def test_strangers_take_no_place_of_callers_with_a_token(
    exported: Path, tmp_path: Path, kind: str
) -> None:
    tokens = make_tokens(tmp_path / "tokens")
    authority = Authority(tmp_path / "pki")
    tls = ServerTls.of(*authority.issue("server"), None)
    trust = ssl.create_default_context(cafile=str(authority.ca))

    async def work(service: InferenceService) -> list[int]:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            server = http_server(http_app.http_app(service), 4, 0.0, tls)
            serving = asyncio.create_task(server.serve([listening]))
            while not server.started:
                await asyncio.sleep(0.005)
            host, port = listening.getsockname()
            strangers, codes = [], []
            for _ in range(20):
                plain = None if kind == "half a hello" else trust
                reader, writer = await asyncio.open_connection(host, port, ssl=plain)
                strangers.append(writer)
                writer.write(b"\x16\x03\x01" if plain is None else b"")
                if kind == "probing":
                    writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert (await reader.readline()).endswith(b"200 OK\r\n")
            headers = {"Authorization": f"Bearer {tokens['worker']}"}
            async with httpx.AsyncClient(verify=trust, headers=headers) as caller:
                for _ in range(3):
                    url = f"https://{host}:{port}{INFER}"
                    codes.append((await caller.post(url, json=request_of(QUERY))).status_code)
            for writer in strangers:
                writer.transport.abort()
            server.should_exit = True
            await serving
        return codes

    with service_of(exported, ServerAccess(Tokens(tmp_path / "tokens"), False)) as service:
        assert asyncio.run(work(service)) == [200] * 3


def test_metrics_count_what_was_answered(service: InferenceService) -> None:
    post(service, request_of(QUERY, SUPPORT, key="a"))
    post(service, request_of(QUERY, key="a"))
    post(service, request_of(QUERY, key="b"))
    page = get(service, "/metrics").text
    for line in (
        'gmeta_serve_requests_total{protocol="http",status="200"} 2.0',
        'gmeta_serve_requests_total{protocol="http",status="404"} 1.0',
        'gmeta_serve_cache_total{result="stored"} 1.0',
        'gmeta_serve_cache_total{result="hit"} 1.0',
        'gmeta_serve_cache_total{result="miss"} 1.0',
        'gmeta_serve_request_seconds_count{protocol="http"} 3.0',
        'gmeta_serve_stage_seconds_count{stage="queue"} 3.0',
        'gmeta_serve_stage_seconds_count{stage="adapt"} 1.0',
        "gmeta_serve_cache_tasks 1.0",
        f'gmeta_serve_model_info{{model="model",version="{service.loaded.version}"}} 1.0',
    ):
        assert line in page.splitlines()


def test_metrics_on_a_full_place_end_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A write to a hole of a mapped file ends its process once the place is full."""
    for name in ("MmapedDict", "ValueClass"):  # put back at the end
        monkeypatch.setattr(values_of_metrics, name, getattr(values_of_metrics, name))
    monkeypatch.setattr(logging.getLogger(LOGGER_NAME), "propagate", True)
    monkeypatch.setenv(MULTIPROCESS_DIR, str(tmp_path))
    share_metrics()
    with files_of_at_most(1 << 12), pytest.raises(GMetaError, match="cannot keep metrics in "):
        ServerMetrics()
    assert list(tmp_path.iterdir()) == []
    share_metrics()
    metrics = ServerMetrics()
    kinds = ["counter", *(f"gauge_live{kind}" for kind in ("max", "min", "sum")), "histogram"]
    assert sorted(file.stem for file in tmp_path.iterdir()) == [f"{k}_{os.getpid()}" for k in kinds]
    with files_of_at_most(1 << 16):
        for number in range(400):
            metrics.set_version("model", f"of full place {number}", 1.0, 2.0)
    assert "version_not_measured" in caplog.text
    metrics.set_version("model", "newest", 3.0, 4.0)
    for file in tmp_path.iterdir():
        assert file.stat().st_blocks * 512 >= file.stat().st_size, file
    told = re.findall("^gmeta_serve_model_info.* 1.0", metrics.page("")[0].decode(), re.MULTILINE)
    assert told == ['gmeta_serve_model_info{model="model",version="newest"} 1.0']


def make_tokens(folder: Path) -> dict[str, str]:
    folder.mkdir()
    made = {role: f"{role}-token-0123456789" for role in ("worker", "operator", "viewer")}
    for role, token in made.items():
        (folder / role).write_text(token)
    return made


def test_a_token_has_a_role(exported: Path, tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path / "tokens")
    pages = {"/metrics": 0, "/docs": 0, "/status": 0, "/v2": 1, "/v2/models/model": 1}
    allowed = {"worker": (403, 200), "operator": (200, 200), "viewer": (200, 200)}
    with service_of(exported, ServerAccess(Tokens(tmp_path / "tokens"), False)) as service:
        for page in pages:
            assert get(service, page).status_code == 401
            assert get(service, page, headers={"Authorization": "Bearer x"}).status_code == 401
        for role, token in tokens.items():
            headers = {"Authorization": f"Bearer {token}"}
            for page, kind in pages.items():
                assert get(service, page, headers=headers).status_code == allowed[role][kind]
            answer = post(service, request_of(QUERY), headers=headers)
            assert answer.status_code == (403 if role == "viewer" else 200)
        assert (
            post(service, request_of(QUERY))
            .json()["error"]
            .startswith(
                "the request shows no valid token or client certificate; this server needs one"
            )
        )
        assert get(service, "/v2/health/ready").status_code == 200
        # Whoever turns a key sees who was left behind.
        page = get(service, "/metrics", headers={"Authorization": f"Bearer {tokens['viewer']}"})
        for status, count in ((200, 2), (401, 1), (403, 1)):
            line = f'gmeta_serve_requests_total{{protocol="http",status="{status}"}} {count}.0'
            assert line in page.text.splitlines()
        password = httpx.BasicAuth("anybody", tokens["viewer"])
        assert get(service, "/docs", auth=password).status_code == 200


def test_a_raw_text_is_read_once(service: InferenceService) -> None:
    """A text input where the model reads integers is told by the column's own words."""
    request = request_of(QUERY)
    content = b"".join(struct.pack("<I", 1) + b"7" for _ in range(6))
    request["inputs"][0] = {
        "name": "item", "datatype": "BYTES", "shape": [6],
        "parameters": {"binary_data_size": len(content)},
    }  # fmt: skip
    text = json.dumps(request).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    answer = post(service, text + content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(
        "query rows: sparse column item has type string; ids of table item"
    )
