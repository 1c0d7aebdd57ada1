"""The Open Inference Protocol, version 2, over HTTP: a request's JSON and the binary parts behind
it become an Inference, an Answer becomes a response. gRPC's messages become the same in
grpc_service.py.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic_core import from_json

from gmeta.server.columns import ModelColumns, rows_of
from gmeta.server.errors import RequestError, bad
from gmeta.server.limits import RequestLimits
from gmeta.server.tensors import (
    Tensor,
    check_head,
    raw_bytes,
    tensor_from_json,
    tensor_from_raw,
)
from gmeta.serving.outputs import PREDICTION, Output

TASK_KEY = "task_key"
MAX_KEY_CHARS = 256
MAX_ID_CHARS = 256
_MOST_DIGITS = 12
EXTENSIONS = ["binary_tensor_data"]
BINARY_HEADER = "inference-header-content-length"
# A name for other platforms than those of the protocol's list is <project>_<format>.
PLATFORM = "gmeta_export"


@dataclass(frozen=True)
class Inference:
    """What a request asks for: rows to adapt by, the name of a task whose state is kept, rows to
    predict; each may be missing. `outputs` are computed, each for all labels; `named` are those of
    the answer."""

    support: pa.Table | None
    query: pa.Table | None
    task_key: str | None = None
    outputs: tuple[str, ...] = (PREDICTION,)
    named: tuple[Output, ...] = ()
    request_id: str = ""
    # The outputs that travel as bytes behind the JSON.
    binary: frozenset[str] = frozenset()

    @property
    def num_rows(self) -> int:
        """Count the rows of both sides."""
        return sum(side.num_rows for side in (self.support, self.query) if side is not None)


@dataclass(frozen=True)
class Answer:
    """What was computed for a request, by name, each [N], or [N, labels] of several labels;
    `version` is that of the model that computed all of it, `cache` says hit, stored, restored or
    too_large where a task key was given."""

    version: str
    outputs: Mapping[str, npt.NDArray[np.float32]]
    support_rows: int
    cache: str = ""

    @property
    def parameters(self) -> dict[str, str | int]:
        """Return the response's parameters, which go beside its outputs."""
        cache: dict[str, str | int] = {"task_cache": self.cache} if self.cache else {}
        return {"support_rows": self.support_rows, **cache}

    def named(self, request: Inference) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Yield the name and the values [N] of each output that was asked for."""
        for output in request.named:
            yield output.name, output.values_N(self.outputs[output.of])


Outcome = Answer | RequestError


def make_inference(
    columns: ModelColumns,
    tensors: Sequence[Tensor],
    parameters: Mapping[str, object],
    outputs: Sequence[str],
    limits: RequestLimits,
    request_id: str = "",
    binary: frozenset[str] = frozenset(),
) -> Inference:
    """Return the request that its parts describe. Raise RequestError."""
    known = {output.name: output for output in columns.outputs}
    for name in outputs:
        if name not in known:
            raise bad(f"output {name[:80]!r} is unknown; there are {', '.join(known)}. Correct it")
    key = parameters.get(TASK_KEY)
    if key is not None and not (
        isinstance(key, str) and 0 < len(key) <= MAX_KEY_CHARS and key.isprintable()
    ):
        raise bad(
            f"parameter {TASK_KEY} is {key!r:.80}; allowed are texts of 1 to {MAX_KEY_CHARS} "
            "printable characters. Correct it"
        )
    if len(request_id) > MAX_ID_CHARS:
        raise bad(f"id has {len(request_id)} characters; at most {MAX_ID_CHARS} are allowed")
    # Checked before rows are made: rows of empty lists cost a caller nothing, but memory here.
    _check_rows(max((one.shape[0] for one in tensors if len(one.shape) == 2), default=0), limits)
    support, query = rows_of(columns, tensors)
    if query is None and (support is None or key is None):
        raise bad(
            "the request has no rows to predict: send the model's columns as inputs; or support "
            f"rows alone with the parameter {TASK_KEY}, to keep the adapted task"
        )
    asked = tuple(known[name] for name in dict.fromkeys(outputs)) or columns.unasked
    computed = tuple(dict.fromkeys(output.of for output in asked))
    made = Inference(support, query, key, computed, asked, request_id, binary)
    _check_rows(made.num_rows, limits)
    return made


def _check_rows(num_rows: int, limits: RequestLimits) -> None:
    if num_rows > limits.rows:
        raise RequestError(
            413,
            f"the request has {num_rows} rows of both sides; at most {limits.rows} are "
            "allowed. Split it, or start the server with a higher --max-rows",
        )


def parse_http(
    columns: ModelColumns, body: bytes, header_length: str | None, limits: RequestLimits
) -> Inference:
    """Return what an HTTP request asks for; `header_length` is the length of the JSON where binary
    parts stand behind it. Raise RequestError."""
    size = len(body)
    if header_length is not None:
        # Its length first: Python refuses to convert thousands of digits.
        is_number = header_length.isascii() and header_length.isdecimal()
        if not is_number or len(header_length) > _MOST_DIGITS or int(header_length) > size:
            raise bad(
                f"header Inference-Header-Content-Length is {header_length!r:.40}; allowed is 0 to "
                f"the {size} bytes of the body. Correct it"
            )
        size = int(header_length)
    request = _object(body[:size])
    parameters = _parameters(request)
    tensors = _tensors(_items(request, "inputs"), memoryview(body)[size:])
    names, binary = _outputs(columns, request, parameters)
    request_id = request.get("id")
    if not isinstance(request_id, str | None):
        raise bad(f"id is {request_id!r:.80}; a text is needed. Correct it")
    return make_inference(columns, tensors, parameters, names, limits, request_id or "", binary)


def _object(text: bytes) -> dict[str, Any]:
    try:
        # FastAPI's own parser: a third of the time of the standard library's.
        request = from_json(text, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise bad(f"the body is not JSON: {error!s:.200}. Send an inference request") from error
    if not isinstance(request, dict):
        raise bad(f"the body is {request!r:.40}; an object with inputs is needed")
    return request


def _parameters(holder: Mapping[str, Any]) -> Mapping[str, Any]:
    found = holder.get("parameters")
    if found is None:  # or null: some clients send every field
        return {}
    if not isinstance(found, dict):
        raise bad(f"parameters is {found!r:.40}; an object is needed. Correct it")
    return found


def _items(request: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = request.get(name)
    if found is None:
        return []
    if not isinstance(found, list) or any(not isinstance(item, dict) for item in found):
        raise bad(f"{name} is {found!r:.40}; a list of objects is needed. Correct it")
    return found


def _tensors(inputs: Sequence[Mapping[str, Any]], rest: memoryview) -> list[Tensor]:
    tensors = []
    for each in inputs:
        head = check_head(each.get("name"), each.get("datatype"), each.get("shape"))
        size = _parameters(each).get("binary_data_size")
        if size is None:
            tensors.append(tensor_from_json(*head, each.get("data")))
            continue
        if type(size) is not int or not 0 <= size <= len(rest) or each.get("data") is not None:
            raise bad(
                f"input {head[0][:80]!r} has binary_data_size {size!r:.40}, and {len(rest)} bytes "
                "are left behind the JSON; its data belongs there alone. Correct the size"
            )
        tensors.append(tensor_from_raw(*head, bytes(rest[:size])))
        rest = rest[size:]
    if len(rest):
        raise bad(
            f"{len(rest)} bytes stand behind the last input; none are allowed. Correct "
            "binary_data_size"
        )
    return tensors


def _outputs(
    columns: ModelColumns, request: Mapping[str, Any], parameters: Mapping[str, Any]
) -> tuple[list[str], frozenset[str]]:
    """Return the names of the outputs asked for, and those that are to travel as bytes."""
    names, binary = [], set()
    everywhere = parameters.get("binary_data_output") is True
    for each in _items(request, "outputs"):
        name = each.get("name")
        if not isinstance(name, str):
            known = ", ".join(output.name for output in columns.outputs)
            raise bad(f"an output's name is {name!r:.40}; there are {known}")
        names.append(name)
        if _parameters(each).get("binary_data", everywhere) is True:
            binary.add(name)
    if not names and everywhere:
        binary.update(output.name for output in columns.unasked)
    return names, frozenset(binary)


def render_http(model: str, request: Inference, answer: Answer) -> tuple[bytes, dict[str, str]]:
    """Return the body of a response and its headers."""
    outputs, behind = [], []
    for name, values in answer.named(request):
        told: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": list(values.shape)}
        if name in request.binary:
            behind.append(raw_bytes(values))
            told["parameters"] = {"binary_data_size": len(behind[-1])}
        else:
            told["data"] = values.ravel().tolist()
        outputs.append(told)
    response = {
        "model_name": model,
        "model_version": answer.version,
        **({"id": request.request_id} if request.request_id else {}),
        "parameters": answer.parameters,
        "outputs": outputs,
    }
    text = json.dumps(response).encode()
    if not behind:
        return text, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", BINARY_HEADER: str(len(text))}
    return b"".join([text, *behind]), headers


def model_metadata(name: str, version: str, columns: ModelColumns) -> dict[str, Any]:
    """Return a model's metadata as the protocol's JSON has it: the inputs that query rows need,
    then the optional ones of support rows."""
    query = [_metadata(column.name, column) for column in columns.read]
    support_columns = {column.name: column for column in (*columns.read, *columns.labels)}
    support = [_metadata(f"support.{name}", each) for name, each in support_columns.items()]
    outputs = []
    for output in columns.outputs:
        named = {"label": output.label} if output.label else {}
        parameters = {**named, "loss": output.loss}
        told = {"name": output.name, "datatype": "FP32", "shape": [-1], "parameters": parameters}
        outputs.append(told)
    return {
        "name": name,
        "versions": [version],
        "platform": PLATFORM,
        "inputs": [*query, *support],
        "outputs": outputs,
    }


def _metadata(name: str, column: Any) -> dict[str, Any]:
    shape = [-1, -1] if column.is_list else [-1]
    return {"name": name, "datatype": column.datatype, "shape": shape}
