"""The Open Inference Protocol, version 2, over HTTP, to InferenceRequest and from InferenceAnswer;
grpc_service.py does so for gRPC."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json, to_json

from gmeta.serving.outputs import PREDICTION, Output
from gmeta.serving.server.input_columns import ModelColumns
from gmeta.serving.server.request_errors import RequestError, abbreviate, bad_request
from gmeta.serving.server.request_rows import RequestRows, to_rows
from gmeta.serving.server.server_limits import RequestLimits
from gmeta.serving.server.tensors import (
    EVENTS,
    TASK_LENGTHS,
    Tensor,
    check_head,
    raw_bytes,
    tensor_from_json,
    tensor_from_raw,
)

TASK_KEY = "task_key"
TASK_STATE = "task_state"  # in base64, in a request and in its answer
RETURN_STATE = "return_state"
MAX_KEY_CHARS = 256
MAX_ID_CHARS = 256
_MOST_DIGITS = 12
EXTENSIONS = ["binary_tensor_data"]
BINARY_HEADER = "inference-header-content-length"
# A name for other platforms than those of the protocol's list is <project>_<format>.
PLATFORM = "gmeta_export"


@dataclass(frozen=True)
class InferenceRequest:
    """What a request asks for: rows to adapt by, a task key, query rows, events; any may be
    missing."""

    support: RequestRows | None
    query: RequestRows | None
    task_key: str | None = None
    state: bytes | None = None  # of the task, that the caller kept
    returns_state: bool = False
    most_state_rows: int = 10_000  # support rows that the state may carry
    # What is computed, each for all labels; the answer has only `wanted_outputs` of them.
    outputs: tuple[str, ...] = (PREDICTION,)
    wanted_outputs: tuple[Output, ...] = ()
    request_id: str = ""
    # The outputs that travel as bytes behind the JSON.
    binary: frozenset[str] = frozenset()
    events: RequestRows | None = None  # of the task, beside those that it has

    @property
    def num_rows(self) -> int:
        """Count the rows of all sides."""
        sides = (self.support, self.query, self.events)
        return sum(side.table.num_rows for side in sides if side is not None)

    @property
    def num_tasks(self) -> int:
        """Count the tasks."""
        sides = (self.support, self.query, self.events)
        return next(len(side.lengths_T) for side in sides if side is not None)


class Stage(NamedTuple):
    """A part of a request's way, in seconds of time.perf_counter."""

    name: str
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class InferenceAnswer:
    """What was computed for a request, by kind of output, each [N], or [N, labels] of several."""

    version: str
    outputs: Mapping[str, npt.NDArray[np.float32]]
    support_rows: int
    # hit, stored, restored, appended or too_large where a task key was given; kept, appended or
    # renewed with a state.
    cache: str = ""
    state: bytes = b""  # for the caller to keep
    stages: list[Stage] = field(default_factory=list)  # of its batch

    @property
    def parameters(self) -> dict[str, str | int]:
        """Return the response's parameters, which go beside its outputs."""
        cache: dict[str, str | int] = {"task_cache": self.cache} if self.cache else {}
        state = {TASK_STATE: base64.b64encode(self.state).decode()} if self.state else {}
        return {"support_rows": self.support_rows, **cache, **state}

    def iterate_outputs(
        self, request: InferenceRequest
    ) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Yield the name and the values [N] of each output of the request."""
        for output in request.wanted_outputs:
            yield output.name, output.values_N(self.outputs[output.kind])


Outcome = InferenceAnswer | RequestError


def make_inference(
    columns: ModelColumns,
    tensors: Sequence[Tensor],
    parameters: Mapping[str, object],
    outputs: Sequence[str],
    limits: RequestLimits,
    request_id: str = "",
    binary: frozenset[str] = frozenset(),
) -> InferenceRequest:
    """Return the request that its parts describe. Raise RequestError."""
    outputs_by_name = {output.name: output for output in columns.outputs}
    for name in outputs:
        if name not in outputs_by_name:
            raise bad_request(
                f"output {name[:80]!r} is unknown; there are {', '.join(outputs_by_name)}. "
                "Correct it"
            )
    key = parameters.get(TASK_KEY)
    if key is not None and not (
        isinstance(key, str) and 0 < len(key) <= MAX_KEY_CHARS and key.isprintable()
    ):
        raise bad_request(
            f"parameter {TASK_KEY} is {abbreviate(key)}; allowed are texts of 1 to {MAX_KEY_CHARS} "
            "printable characters. Correct it"
        )
    # Bounded, as both are kept or sent back.
    if len(request_id) > MAX_ID_CHARS:
        raise bad_request(
            f"id has {len(request_id)} characters; at most {MAX_ID_CHARS} are allowed"
        )
    # Checked before rows are made: rows of empty lists cost a caller nothing, but memory here.
    limits.check_rows(max((one.shape[0] for one in tensors if len(one.shape) == 2), default=0))
    support, query, events = to_rows(columns, tensors, limits, shares_lists=True)
    state, returns_state = _parse_state(parameters), parameters.get(RETURN_STATE, False)
    if state is not None and (support is not None or key is not None):
        raise bad_request(
            f"parameter {TASK_STATE} stands beside support rows or {TASK_KEY}: a task is known by "
            "one of them. Leave out the others"
        )
    has_task = any(one is not None for one in (support, state, events))
    if not isinstance(returns_state, bool) or (returns_state and not has_task):
        raise bad_request(
            f"parameter {RETURN_STATE} is {abbreviate(returns_state)}; allowed are true, with "
            f"support rows or {TASK_STATE}, and false. Correct it"
        )
    is_kept = bool(key or returns_state or (state is not None and events is not None))
    if query is None and ((support is None and events is None) or not is_kept):
        raise bad_request(
            "the request has no rows to predict: send the model's columns as inputs; or support "
            f"rows alone with the parameter {TASK_KEY}, to keep the adapted task, or {RETURN_STATE}"
        )
    named = tuple(outputs_by_name[name] for name in dict.fromkeys(outputs))
    wanted = named or columns.default_outputs
    computed = tuple(dict.fromkeys(output.kind for output in wanted))
    inference = InferenceRequest(
        support,
        query,
        key,
        state,
        bool(returns_state),
        limits.rows,
        computed,
        wanted,
        request_id,
        binary,
        events,
    )
    limits.check_rows(inference.num_rows)
    of_one = {TASK_KEY: key is not None, TASK_STATE: state is not None, RETURN_STATE: returns_state}
    name = next((name for name, is_there in of_one.items() if is_there), "")
    if name and inference.num_tasks != 1:
        raise bad_request(
            f"{TASK_LENGTHS} is of {inference.num_tasks} tasks, and parameter {name} of one. "
            "Leave it out, or send a request for each task"
        )
    return inference


def _parse_state(parameters: Mapping[str, object]) -> bytes | None:
    text = parameters.get(TASK_STATE)
    if text is None:
        return None
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except ValueError:  # refused as whatever is no text
        pass
    raise bad_request(
        f"parameter {TASK_STATE} is {abbreviate(text)}; a task's state in base64 is needed. Send "
        "what an answer's parameters had"
    )


def parse_http(
    columns: ModelColumns, body: bytes, header_length: str | None, limits: RequestLimits
) -> InferenceRequest:
    """Return what an HTTP request asks for. Raise RequestError."""
    size = len(body)
    if header_length is not None:
        # Its length first: Python refuses to convert thousands of digits.
        is_number = header_length.isascii() and header_length.isdecimal()
        if not is_number or len(header_length) > _MOST_DIGITS or int(header_length) > size:
            raise bad_request(
                f"header Inference-Header-Content-Length is {header_length!r:.40}; allowed is 0 to "
                f"the {size} bytes of the body. Correct it"
            )
        size = int(header_length)
    _check_structure(columns, body[:size], limits)
    request = _parse_object(body[:size])
    parameters = _parse_parameters(request)
    # Binary parts stand behind the JSON, which ends at `size`.
    tensors = _parse_tensors(_parse_items(request, "inputs"), memoryview(body)[size:])
    names, binary = _parse_outputs(columns, request, parameters)
    request_id = request.get("id")
    if not isinstance(request_id, str | None):
        raise bad_request(f"id is {abbreviate(request_id)}; a text is needed. Correct it")
    return make_inference(columns, tensors, parameters, names, limits, request_id or "", binary)


def _check_structure(columns: ModelColumns, text: bytes, limits: RequestLimits) -> None:
    """Raise RequestError for more lists and objects than rows could need, before any is made."""
    # A list for each value of a row, and what describes the inputs.
    most = (limits.rows + 100) * (len(columns.by_name) + len(columns.ignored)) + 1_000
    if sum(map(text.count, (b"[", b"{", b":"))) <= most:
        return
    # Those in texts count for nothing; without escapes, quotes begin and end the texts in turn.
    codes = np.frombuffer(text.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    is_outside = ~np.logical_xor.accumulate(codes == ord('"'))
    count = sum(int(np.count_nonzero((codes == one) & is_outside)) for one in b"[{:")
    if count > most:
        raise bad_request(
            f"the body is of {count} lists, objects and keys; at most {most} are allowed, for "
            f"{limits.rows} rows. Send the values of an input in one list, or split the request"
        )


def _parse_object(text: bytes) -> dict[str, Any]:
    try:
        # FastAPI's own parser: a third of the time of the standard library's.
        request = from_json(text, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise bad_request(
            f"the body is not JSON: {error!s:.200}. Send an inference request"
        ) from error
    if not isinstance(request, dict):
        raise bad_request(f"the body is {abbreviate(request)}; an object with inputs is needed")
    return request


def _parse_parameters(holder: Mapping[str, Any]) -> Mapping[str, Any]:
    values = holder.get("parameters")
    if values is None:  # or null: some clients send every field
        return {}
    if not isinstance(values, dict):
        raise bad_request(f"parameters is {abbreviate(values)}; an object is needed. Correct it")
    return values


def _parse_items(request: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    items = request.get(name)
    if items is None:
        return []
    if not isinstance(items, list) or any(not isinstance(item, dict) for item in items):
        raise bad_request(f"{name} is {abbreviate(items)}; a list of objects is needed. Correct it")
    return items


def _parse_tensors(inputs: Sequence[Mapping[str, Any]], rest: memoryview) -> list[Tensor]:
    tensors = []
    for each in inputs:
        head = check_head(each.get("name"), each.get("datatype"), each.get("shape"))
        size = _parse_parameters(each).get("binary_data_size")
        if size is None:
            tensors.append(tensor_from_json(*head, each.get("data")))
            continue
        # Not isinstance: JSON's true would be an int.
        if type(size) is not int or not 0 <= size <= len(rest) or each.get("data") is not None:
            raise bad_request(
                f"input {head[0][:80]!r} has binary_data_size {abbreviate(size)}, and {len(rest)} "
                "bytes are left behind the JSON; its data belongs there alone. Correct the size"
            )
        tensors.append(tensor_from_raw(*head, bytes(rest[:size])))
        rest = rest[size:]
    if len(rest):
        raise bad_request(
            f"{len(rest)} bytes stand behind the last input; none are allowed. Correct "
            "binary_data_size"
        )
    return tensors


def _parse_outputs(
    columns: ModelColumns, request: Mapping[str, Any], parameters: Mapping[str, Any]
) -> tuple[list[str], frozenset[str]]:
    """Return the names of the outputs in a request, and those that are to travel as bytes."""
    names, binary = [], set()
    everywhere = parameters.get("binary_data_output") is True
    for each in _parse_items(request, "outputs"):
        name = each.get("name")
        if not isinstance(name, str):
            known = ", ".join(output.name for output in columns.outputs)
            raise bad_request(f"an output's name is {abbreviate(name)}; there are {known}")
        names.append(name)
        if _parse_parameters(each).get("binary_data", everywhere) is True:
            binary.add(name)
    if not names and everywhere:
        # Without names the answer has the default outputs.
        binary.update(output.name for output in columns.default_outputs)
    return names, frozenset(binary)


def render_http(
    model: str, request: InferenceRequest, answer: InferenceAnswer
) -> tuple[bytes, dict[str, str]]:
    """Return the body of a response and its headers."""
    outputs, behind = [], []
    for name, values in answer.iterate_outputs(request):
        entry: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": list(values.shape)}
        if name in request.binary:
            # In the order of the outputs: only their sizes say where each begins.
            behind.append(raw_bytes(values))
            entry["parameters"] = {"binary_data_size": len(behind[-1])}
        else:
            entry["data"] = values.ravel().tolist()
        outputs.append(entry)
    response = {
        "model_name": model,
        "model_version": answer.version,
        **({"id": request.request_id} if request.request_id else {}),
        "parameters": answer.parameters,
        "outputs": outputs,
    }
    text = to_json(response)
    if not behind:
        return text, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", BINARY_HEADER: str(len(text))}
    return b"".join([text, *behind]), headers


def model_metadata(name: str, version: str, columns: ModelColumns) -> dict[str, Any]:
    """Return a model's metadata as the protocol's JSON has it: query inputs, then support's."""
    query = [_column_metadata(column.name, column) for column in columns.read]
    support_columns = {column.name: column for column in (*columns.read, *columns.labels)}
    support = [_column_metadata(f"support.{name}", each) for name, each in support_columns.items()]
    events = [_column_metadata(f"{EVENTS}{name}", each) for name, each in columns.events.items()]
    outputs = []
    for output in columns.outputs:
        label_parameter = {"label": output.label} if output.label else {}
        parameters = {**label_parameter, "loss": output.loss}
        entry = {"name": output.name, "datatype": "FP32", "shape": [-1], "parameters": parameters}
        outputs.append(entry)
    return {
        "name": name,
        "versions": [version],
        "platform": PLATFORM,
        "inputs": [*query, *support, *events],
        "outputs": outputs,
    }


def _column_metadata(name: str, column: Any) -> dict[str, Any]:
    shape = [-1, -1] if column.is_list else [-1]
    return {"name": name, "datatype": column.datatype, "shape": shape}
