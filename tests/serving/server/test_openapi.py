"""The OpenAPI document: what it lists is what the server answers, and as it says."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gmeta.access.auth import Tokens
from gmeta.serving.server.access import ServerAccess
from gmeta.serving.server.http_app import http_app
from gmeta.serving.server.inference_service import InferenceService
from gmeta.serving.server.request_errors import GRPC_CODES
from tests.serving.server.serving import get, post, request_of, service_of
from tests.serving.server.test_http import make_tokens
from tests.support.exported import FEATURES, random_rows, write_random_model

VALID = request_of(random_rows(6, seed=2), random_rows(9, seed=1), key="k", outputs=["prediction"])


def document_of(service: InferenceService) -> dict[str, Any]:
    answer = get(service, "/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def validator(document: dict[str, Any], schema: Any) -> jsonschema.Draft202012Validator:
    """A validator of a schema whose references lead into the document; OpenAPI 3.1 has JSON
    Schema's dialect of 2020-12."""
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


def operations_of(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations in document["paths"].items():
        for method in operations.keys() - {"parameters"}:
            yield path, method, operations[method]


def test_every_route_is_listed_and_every_reference_leads_somewhere(
    service: InferenceService,
) -> None:
    document = document_of(service)
    assert document["openapi"] == "3.1.0"
    assert document["info"]["title"] == "model"
    routes = {route.path.replace("{name}", "model") for route in http_app(service).routes}  # type: ignore[attr-defined]
    # A person's way to the page, and another spelling.
    assert document["paths"].keys() == routes - {"/", "/v2/"}
    schemas = document["components"]["schemas"]
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document))) == schemas.keys()
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_what_is_read_is_answered_as_the_document_says(service: InferenceService) -> None:
    document = document_of(service)
    version = service.loaded.version
    for path, method, operation in operations_of(document):
        if method == "get":
            answer = get(service, path.replace("{version}", version))
            content = operation["responses"][str(answer.status_code)]["content"]
            assert answer.headers["content-type"].partition(";")[0] in content, path
            schema = content.get("application/json", {}).get("schema", {})
            if schema:
                validator(document, schema).validate(answer.json())
    service.ready = False
    for path in ("/v2/health/ready", "/v2/models/model/ready"):
        answer = get(service, path)
        content = document["paths"][path]["get"]["responses"][str(answer.status_code)]["content"]
        assert answer.status_code == 503
        validator(document, content["application/json"]["schema"]).validate(answer.json())


def test_the_example_of_the_document_is_valid_and_predicted(service: InferenceService) -> None:
    document = document_of(service)
    operation = document["paths"]["/v2/models/model/infer"]["post"]
    body = operation["requestBody"]["content"]["application/json"]
    request = body["examples"]["rows"]["value"]
    check = validator(document, body["schema"])
    for one in (request, VALID):
        check.validate(one)
        answer = post(service, one)
        assert answer.status_code == 200, answer.text
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        validator(document, schema).validate(answer.json())
    data = {one["name"]: one["data"] for one in request["inputs"]}
    assert (data["item"], data["support.item"], data["support.click"]) == (
        [1, 6], [11, 17], [0.0, 1.0],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("item", "name", "itme"), ("item", "datatype", "FP32"), ("item", "shape", []),
        ("item", "data", ["a"]), ("price", "datatype", "BYTES"), ("support.click", "data", [[[1]]]),
        ("tags.lengths", "data", [-1]), ("item", "data", None), ("item", "shape", [1, 2, 3]),
    ],
)  # fmt: skip
def test_what_the_document_forbids_is_refused(
    service: InferenceService, name: str, key: str, value: Any
) -> None:
    document = document_of(service)
    request = json.loads(json.dumps(VALID))
    next(one for one in request["inputs"] if one["name"] == name)[key] = value
    check = validator(document, {"$ref": "#/components/schemas/Request"})
    assert not check.is_valid(request)
    answer = post(service, request)
    assert answer.status_code == 400
    validator(document, {"$ref": "#/components/schemas/Error"}).validate(answer.json())


def test_the_statuses_of_an_inference_are_those_that_the_server_has(
    service: InferenceService, exported: Path, tmp_path: Path
) -> None:
    of_infer = document_of(service)["paths"]["/v2/models/model/infer"]["post"]["responses"]
    assert {*map(int, of_infer)} == {200} | GRPC_CODES.keys() - {401, 403, 405}
    make_tokens(tmp_path / "tokens")
    access = ServerAccess(Tokens(tmp_path / "tokens"), False)
    with service_of(exported, access, tokens=tmp_path / "tokens") as secured:
        assert get(secured, "/openapi.json").status_code == 401
        headers = {"Authorization": "Bearer worker-token-0123456789"}
        document = get(secured, "/openapi.json", headers=headers).json()
    assert document["components"]["securitySchemes"] == {
        "token": {"type": "http", "scheme": "bearer"}
    }
    for path, _, operation in operations_of(document):
        is_probe = path.endswith(("/ready", "/live"))
        assert operation["security"] == [{} if is_probe else {"token": []}]
        assert is_probe != {"401", "403"}.issubset(operation["responses"])


def test_a_browser_is_led_to_the_page_and_a_program_is_told(service: InferenceService) -> None:
    answer = get(service, "/", headers={"Accept": "text/html,*/*;q=0.8"})
    assert (answer.status_code, answer.headers["location"]) == (307, "docs")
    answer = get(service, "/", headers={"Accept": "application/json"})
    assert (answer.status_code, answer.json()) == (
        404, {"error": "GET '/' is not answered: Not Found. See /docs for what is"},
    )  # fmt: skip


def test_a_model_of_lists_alone_has_candidates_and_an_example(tmp_path: Path) -> None:
    features = replace(FEATURES, single=())
    write_random_model(tmp_path / "model", features=features)
    with service_of(tmp_path / "model") as service:
        assert service.loaded.columns.item == "tags"
        body = document_of(service)["paths"]["/v2/models/model/infer"]["post"]["requestBody"]
        example = body["content"]["application/json"]["examples"]["rows"]["value"]
        assert post(service, example).status_code == 200
