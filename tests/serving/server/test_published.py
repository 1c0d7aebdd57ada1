"""The server against the protocol as github.com/kserve/open-inference-protocol publishes it:
specification/protocol/, its .proto of commit 29ca333 and its OpenAPI schema of 18d5991. Names,
numbers and types are the protocol's, told here in our own form."""

from typing import Any

import jsonschema
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gmeta.serving.server.grpc_service import SERVICE_NAME
from gmeta.serving.server.inference_service import InferenceService
from gmeta_protos.inference.v2 import open_inference_pb2 as pb
from tests.serving.server.serving import get, post, request_of, tensor
from tests.support.exported import random_rows

# Field numbers count from 1. * is repeated, % a map from text.
TENSOR = "string name, string datatype, *int64 shape, %InferParameter parameters, "
MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready",
    "ModelReadyRequest": "string name, string version",
    "ModelReadyResponse": "bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name, string version, *string extensions",
    "ModelMetadataRequest": "string name, string version",
    "ModelMetadataResponse.TensorMetadata": "string name, string datatype, *int64 shape",
    "ModelMetadataResponse": "string name, *string versions, string platform, "
    "*TensorMetadata inputs, *TensorMetadata outputs",
    "ModelInferRequest.InferInputTensor": TENSOR + "InferTensorContents contents",
    "ModelInferRequest.InferRequestedOutputTensor": "string name, %InferParameter parameters",
    "ModelInferRequest": "string model_name, string model_version, string id, "
    "%InferParameter parameters, *InferInputTensor inputs, *InferRequestedOutputTensor outputs, "
    "*bytes raw_input_contents",
    "ModelInferResponse.InferOutputTensor": TENSOR + "InferTensorContents contents",
    "ModelInferResponse": "string model_name, string model_version, string id, "
    "%InferParameter parameters, *InferOutputTensor outputs, *bytes raw_output_contents",
    "InferParameter": "bool bool_param, int64 int64_param, string string_param, "
    "double double_param, uint64 uint64_param",
    "InferTensorContents": "*bool bool_contents, *int32 int_contents, *int64 int64_contents, "
    "*uint32 uint_contents, *uint64 uint64_contents, *float fp32_contents, *double fp64_contents, "
    "*bytes bytes_contents",
}
RPCS = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")

TEXT, TEXTS, OBJECT = {"type": "string"}, {"type": "array", "items": {"type": "string"}}, "object"
SHAPE = {"type": "array", "items": {"type": "integer"}}
DATA: dict[str, Any] = {
    "type": "array",
    "items": {"anyOf": [{"$ref": "#/$defs/data"}, {"type": ["number", "string", "boolean"]}]},
}


def an_object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": OBJECT, "required": required.split(), "properties": properties}


PARAMETERS = {"type": OBJECT}
METADATA = an_object("name datatype shape", name=TEXT, datatype=TEXT, shape=SHAPE)
WITH_DATA = an_object(
    "name datatype shape data",
    name=TEXT, datatype=TEXT, shape=SHAPE, parameters=PARAMETERS, data={"$ref": "#/$defs/data"},
)  # fmt: skip
REQUESTED = an_object("name", name=TEXT, parameters=PARAMETERS)
SCHEMAS = {
    "server": an_object("name version extensions", name=TEXT, version=TEXT, extensions=TEXTS),
    "model": an_object(
        "name platform",
        name=TEXT, versions=TEXTS, platform=TEXT,
        inputs={"type": "array", "items": METADATA}, outputs={"type": "array", "items": METADATA},
    ),
    "request": an_object(
        "inputs",
        id=TEXT, parameters=PARAMETERS, inputs={"type": "array", "items": WITH_DATA},
        outputs={"type": "array", "items": REQUESTED},
    ),
    "response": an_object(
        "model_name outputs",
        model_name=TEXT, model_version=TEXT, id=TEXT, parameters=PARAMETERS,
        outputs={"type": "array", "items": WITH_DATA},
    ),
    "error": an_object("error", error=TEXT),
}  # fmt: skip
QUERY, SUPPORT = random_rows(6, seed=2), random_rows(9, seed=1)


def check(body: Any, schema: str) -> None:
    jsonschema.validate(body, {**SCHEMAS[schema], "$defs": {"data": DATA}})


def described(message: Descriptor) -> str:
    """A message in the words of MESSAGES; '?' in front where a number is not the field's place."""
    told = []
    for place, field in enumerate(message.fields, start=1):
        kind, repeated = _kind(field), "*" if field.is_repeated else ""
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            kind, repeated = _kind(value), "%" if _kind(key) == "string" else "?"
        told.append(f"{'' if field.number == place else '?'}{repeated}{kind} {field.name}")
    return ", ".join(told)


def _kind(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        return str(field.message_type.name)
    names = {
        value: name.removeprefix("TYPE_").lower()
        for name, value in vars(FieldDescriptor).items()
        if name.startswith("TYPE_")
    }
    return names[field.type]


def test_messages_and_calls_are_the_published_ones() -> None:
    found = {}

    def gather(message: Descriptor, prefix: str = "") -> None:
        found[prefix + message.name] = described(message)
        for inner in message.nested_types:
            if not inner.GetOptions().map_entry:
                gather(inner, f"{prefix}{message.name}.")

    for message in pb.DESCRIPTOR.message_types_by_name.values():
        gather(message)
    assert found == MESSAGES
    assert SERVICE_NAME == "inference.GRPCInferenceService"
    calls = {
        method.name: (method.input_type.name, method.output_type.name)
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    }
    assert calls == {name: (f"{name}Request", f"{name}Response") for name in RPCS}
    (oneof,) = pb.InferParameter.DESCRIPTOR.oneofs
    assert (oneof.name, len(oneof.fields)) == ("parameter_choice", 5)


def test_every_path_of_the_published_schema_answers_as_it_says(service: InferenceService) -> None:
    model = f"/v2/models/model/versions/{service.loaded.version}"
    for path in ("/v2/health/live", "/v2/health/ready", f"{model}/ready"):
        assert get(service, path).status_code == 200
    for path in ("/v2/", "/v2"):
        answer = get(service, path)
        assert answer.status_code == 200
        check(answer.json(), "server")
    check(get(service, model).json(), "model")
    request = request_of(QUERY, SUPPORT, key="u", outputs=["prediction", "prediction_before"])
    request["id"] = "42"
    check(request, "request")
    answer = post(service, request, f"{model}/infer")
    assert answer.status_code == 200
    check(answer.json(), "response")
    assert answer.json()["id"] == "42"
    alone = post(service, request_of(support=SUPPORT, key="u"), f"{model}/infer")
    check(alone.json(), "response")  # nothing is predicted


@pytest.mark.parametrize("shape", ["[N]", "[N, 1]", "[[v]]"])
def test_data_may_be_flat_or_nested_by_the_schema(service: InferenceService, shape: str) -> None:
    request = request_of(QUERY)
    expected = post(service, request).json()["outputs"]
    item = next(each for each in request["inputs"] if each["name"] == "item")
    if shape != "[N]":
        item["shape"] = [6, 1]
    if shape == "[[v]]":
        item["data"] = [[value] for value in item["data"]]
    check(request, "request")
    assert post(service, request).json()["outputs"] == expected


def test_errors_are_the_published_object(service: InferenceService) -> None:
    wrong = request_of(QUERY)
    wrong["inputs"].append(tensor("itme", "INT64", [1]))
    answer = post(service, wrong)
    assert answer.status_code == 400
    check(answer.json(), "error")
    for path in ("/v2/models/other", "/v2/models/model/versions/9", "/v2/nothing"):
        answer = get(service, path)
        assert answer.status_code == 404
        check(answer.json(), "error")


def test_calls_of_triton_alone_are_refused_in_a_line(service: InferenceService) -> None:
    model = "/v2/models/model"
    for ask, path in (
        (get, f"{model}/config"),
        (get, f"{model}/versions/{service.loaded.version}/stats"),
        (lambda service, path: post(service, {}, path), "/v2/repository/index"),
        (lambda service, path: post(service, {}, path), f"/v2/repository{model[3:]}/load"),
    ):
        answer = ask(service, path)
        assert answer.status_code == 404
        told = answer.json()["error"]
        assert f"{path[:80]!r} is not answered: Not Found. See /docs for what is" in told
