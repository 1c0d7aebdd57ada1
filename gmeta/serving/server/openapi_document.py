"""An OpenAPI 3.1 document of a server, made of its model's columns and of the answers it gives."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

from gmeta.serving.server.inference_protocol import MAX_ID_CHARS, MAX_KEY_CHARS, TASK_KEY
from gmeta.serving.server.input_columns import InputColumn, ModelColumns
from gmeta.serving.server.request_errors import GRPC_CODES
from gmeta.serving.server.serve_config import ServeConfig
from gmeta.serving.server.tensors import DATATYPES, EVENTS, LENGTHS, MAX_DIMENSION, SUPPORT

Json = dict[str, Any]

_JSON, _BYTES = "application/json", "application/octet-stream"
_METRICS = ("text/plain", "application/openmetrics-text")
_COUNT = {"type": "integer", "minimum": 0, "maximum": MAX_DIMENSION}
_SHAPE = {"type": "array", "items": _COUNT, "minItems": 1, "maxItems": 2}
# What a column of a datatype takes, and what that is in JSON.
_TAKEN = {
    "BYTES": (["BYTES"], "string"),
    "INT64": ([name for name in DATATYPES if "INT" in name], "integer"),
    "FP32": ([name for name in DATATYPES if name not in ("BOOL", "BYTES")], "number"),
}


@dataclass(frozen=True)
class _Proofs:
    """What callers show, by OpenAPI's names; a page takes one of two, a probe none."""

    schemes: Json
    none: ClassVar[list[Json]] = [{}]

    @property
    def every(self) -> list[Json]:
        return [{name: [] for name in self.schemes}]

    @property
    def any_one(self) -> list[Json]:
        return [{name: []} for name in self.schemes] or self.none

    @property
    def refusals(self) -> set[int]:
        """Return the statuses of whoever is refused; 503: there is no place for more callers."""
        return {401, 403, 503} if self.schemes else {503}


def make_openapi_document(config: ServeConfig, version: str, columns: ModelColumns) -> Json:
    """Return the document of a server whose model has this version now."""
    schemes: Json = {"token": {"type": "http", "scheme": "bearer"}} if config.tokens else {}
    schemes |= {"certificate": {"type": "mutualTLS"}} if config.tls_client_ca else {}
    proofs, model = _Proofs(schemes), f"/v2/models/{config.name}"
    at_version = {"name": "version", "in": "path", "required": True, "schema": {"type": "string"}}
    versioned = _model_paths(f"{model}/versions/{{version}}", columns, proofs, {404})
    for operations in versioned.values():
        operations["parameters"] = [at_version | {"example": version}]
    return {
        "openapi": "3.1.0",
        "info": {"title": config.name, "version": version, "summary": "A server of gmeta"},
        "paths": {
            **_model_paths(model, columns, proofs, set()),
            **versioned,
            **_server_paths(proofs),
        },
        "components": {"securitySchemes": schemes, "schemas": _make_schemas(columns)},
    }


def _model_paths(model: str, columns: ModelColumns, proofs: _Proofs, unknown: set[int]) -> Json:
    """Return what is asked of the model at a path; `unknown` is answered of another version."""
    statuses = GRPC_CODES.keys() - {405} - ({401, 403} - proofs.refusals)
    answers = {_JSON: "Answer", _BYTES: ""}
    infer = _operation("Predicts rows, adapted by support rows", answers, statuses, proofs.every)
    examples = {"rows": {"value": make_example_request(columns)}}
    body = {"schema": _refer("Request"), "examples": examples}
    infer["requestBody"] = {"required": True, "content": {_JSON: body}}
    read, ready = "Lists the model's inputs and outputs", "Says whether the model is ready"
    metadata = _operation(read, {_JSON: "Model"}, proofs.refusals | unknown, proofs.every)
    return {
        f"{model}/infer": {"post": infer},
        model: {"get": metadata},
        f"{model}/ready": {"get": _probe(ready, unknown)},
    }


def _server_paths(proofs: _Proofs) -> Json:
    pages = {
        "/v2": ("Names the server and its release", [_JSON], proofs.every),
        "/status": ("Says what serves, what was refused, what waits", [_JSON], proofs.any_one),
        "/metrics": ("Has the metrics of all workers", _METRICS, proofs.any_one),
        "/docs": ("Is the page for people", ["text/html"], proofs.any_one),
        "/openapi.json": ("Lists all this for programs", [_JSON], proofs.every),
    }
    return {
        **{
            path: {"get": _operation(text, dict.fromkeys(media, ""), proofs.refusals, security)}
            for path, (text, media, security) in pages.items()
        },
        "/v2/health/ready": {"get": _probe("Says whether the server is ready", set())},
        "/v2/health/live": {"get": _operation("Says that it lives", {_JSON: ""}, (), _Proofs.none)},
    }


def list_endpoints(document: Json) -> list[tuple[str, str, str]]:
    """Return method, path and summary of each operation."""
    return [
        (method.upper(), path, operation["summary"])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if method != "parameters"
    ]


def make_example_request(columns: ModelColumns) -> Json:
    """Return a request for two items, adapted by two others, of the columns' examples."""
    query = [_make_input(columns, column, column.name, (0, 1)) for column in columns.read]
    support_columns = dict.fromkeys((*columns.read, *columns.labels))
    support = [_make_input(columns, one, SUPPORT + one.name, (2, 3)) for one in support_columns]
    return {"inputs": [*query, *support]}


def _make_input(
    columns: ModelColumns, column: InputColumn, name: str, places: Iterable[int]
) -> Json:
    # Rows differ in the item alone, and in what was thought of it.
    varies = column.name == columns.item or column in columns.labels
    count = len(column.examples)
    rows = [column.examples[at % count if varies else count // 2] for at in places]
    data = [value for value in rows for _ in range(column.width)]
    shape = [len(rows), column.width] if column.is_list else [len(rows)]
    return {"name": name, "datatype": column.datatype, "shape": shape, "data": data}


def _refer(schema: str) -> Json:
    return {"$ref": f"#/components/schemas/{schema}"} if schema else {}


def _operation(
    summary: str, schemas: Mapping[str, str], refusals: Iterable[int], security: list[Json]
) -> Json:
    """Return an operation that answers by a schema of each media type, or refuses in a line."""
    content = {media: {"schema": _refer(name)} for media, name in schemas.items()}
    responses: Json = {"200": {"description": "The answer", "content": content}}
    line = {_JSON: {"schema": _refer("Error")}}
    for status in sorted(refusals):
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": line}
    return {"summary": summary, "responses": responses, "security": security}


def _probe(summary: str, unknown: set[int]) -> Json:
    operation = _operation(summary, {_JSON: "Ready"}, unknown, _Proofs.none)
    content = operation["responses"]["200"]["content"]
    operation["responses"]["503"] = {"description": "Not ready", "content": content}
    return operation


def _make_object(required: str = "", /, **properties: Json) -> Json:
    named = {"type": "object", "properties": properties}
    return named | ({"required": required.split()} if required else {})


def _make_schemas(columns: ModelColumns) -> Json:
    text, flag = {"type": "string"}, {"type": "boolean"}
    outputs = {"enum": [output.name for output in columns.outputs]}
    kinds = {"enum": ["hit", "stored", "restored", "appended", "too_large"]}
    tensor: Json = {"name": text, "datatype": {"enum": list(DATATYPES)}, "shape": {"type": "array"}}
    values = {"type": "array", "items": {"type": "number"}}
    output = _make_object("name datatype shape", **tensor | {"name": outputs}, data=values)
    key = {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_KEY_CHARS}
    tensors = {"type": "array", "items": _make_object("name datatype shape", **tensor)}
    inputs = [each for one in columns.by_name.values() for each in _describe_input(one)]
    inputs += [each for one in columns.events.values() for each in _describe_input(one, [EVENTS])]
    if columns.ignored:  # whatever they hold
        name = {"enum": sorted(each + of for of in columns.ignored for each in ("", SUPPORT))}
        inputs.append(_make_object("name datatype shape data", **tensor | {"name": name}))
    return {
        "Request": _make_object(
            "inputs",
            id={"type": ["string", "null"], "maxLength": MAX_ID_CHARS},
            parameters=_make_object(**{TASK_KEY: key}) | {"type": ["object", "null"]},
            inputs={"type": "array", "items": {"anyOf": inputs}, "minItems": 1},
            outputs={"type": ["array", "null"], "items": _make_object("name", name=outputs)},
        ),
        "Answer": _make_object(
            "model_name model_version parameters outputs",
            model_name=text,
            model_version=text,
            id=text,
            parameters=_make_object("support_rows", support_rows=_COUNT, task_cache=kinds),
            outputs={"type": "array", "items": output},
        ),
        "Model": _make_object(
            "name versions platform inputs outputs",
            name=text,
            versions={"type": "array", "items": text},
            platform=text,
            inputs=tensors,
            outputs=tensors,
        ),
        "Ready": _make_object("ready", name=text, ready=flag),
        "Error": _make_object("error", error=text),
    }


def _describe_input(column: InputColumn, fronts: Sequence[str] = ("", SUPPORT)) -> list[Json]:
    """Return the schema of a column's inputs; of a list, the schema of its lengths too."""
    datatypes, kind = _TAKEN[column.datatype]
    value: Json = {"type": [kind, "null"] if "null allowed" in column.values else kind}
    taken = [(column.name, datatypes, value, f"{column.role}: {column.values}")]
    if column.is_list:
        integers = _TAKEN["INT64"][0]
        taken.append((column.name + LENGTHS, integers, _COUNT, "how many values each row has"))
    return [
        _make_object(
            "name datatype shape data",
            name={"enum": [front + name for front in fronts], "description": text},
            datatype={"enum": datatypes},
            shape=_SHAPE,
            # In one list, or in one for each row.
            data={"type": "array", "items": {"anyOf": [one, {"type": "array", "items": one}]}},
        )
        for name, datatypes, one, text in taken
    ]
