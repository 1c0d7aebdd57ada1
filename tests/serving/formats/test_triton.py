"""The Triton repository: its config as Triton's message, its model on a stand-in backend."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gmeta
from gmeta.serving.exported_folder import read_config
from gmeta.serving.formats.export_runtime import export_for
from gmeta.serving.server.inference_protocol import model_metadata
from gmeta.serving.server.input_columns import describe_columns
from tests.metaio.prepare.test_local import changed, prepared, raw_table
from tests.serving.formats.models import model_of, write_schema_model
from tests.serving.test_events import trained
from tests.support.exported import random_rows
from tests.support.waiting import PATIENCE_S

# In a process of its own: the client's messages and ours have the same names.
PARSE = """
import sys
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2
config = text_format.Parse(sys.stdin.read(), model_config_pb2.ModelConfig())
told = json_format.MessageToJson(
    config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
)
print(told)
"""
TYPES = {"BYTES": "TYPE_STRING", "INT64": "TYPE_INT64", "FP32": "TYPE_FP32"}


class StandInTensor:
    """pb_utils.Tensor."""

    def __init__(self, name: str, values: np.ndarray[Any, Any]) -> None:
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._values


class StandInError:
    """pb_utils.TritonError."""

    def __init__(self, text: str) -> None:
        self._text = text

    def message(self) -> str:
        return self._text


@dataclass
class StandInResponse:
    """pb_utils.InferenceResponse."""

    output_tensors: list[StandInTensor]
    error: StandInError | None = None


@dataclass
class StandInRequest:
    """pb_utils.InferenceRequest."""

    tensors: list[StandInTensor]
    outputs: list[str] = field(default_factory=lambda: ["prediction", "prediction_before"])

    def inputs(self) -> list[StandInTensor]:
        return self.tensors

    def requested_output_names(self) -> list[str]:
        return self.outputs


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("triton_python_backend_utils")
    vars(module).update(
        Tensor=StandInTensor, TritonError=StandInError, InferenceResponse=StandInResponse
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton")
    model_of(folder / "exported", "melu")
    export_for(folder / "exported", folder / "models" / "clicks", "triton")
    return folder / "models" / "clicks"


def backend_of(repository: Path) -> Any:
    """The model that Triton would run."""
    spec = spec_from_file_location("triton_model", repository / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize({"model_name": repository.name})
    return model


def tensors(rows: pa.Table, prefix: str = "") -> list[StandInTensor]:
    """Rows as Triton gives them: texts as objects of bytes, lists with their lengths."""
    found = []
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        values = column.to_pylist()
        if pa.types.is_list(column.type):
            lengths = np.array([len(value) for value in values])
            found.append(StandInTensor(f"{prefix}{name}.lengths", lengths))
            values = [item for value in values for item in value]
        is_text = pa.types.is_string(column.type)
        array = np.array([v.encode() for v in values], object) if is_text else np.array(values)
        found.append(StandInTensor(prefix + name, array))
    return found


def test_triton_parses_the_config_with_the_inputs_of_the_server(repository: Path) -> None:
    parsed = subprocess.run(
        [sys.executable, "-c", PARSE], input=(repository / "config.pbtxt").read_text(),
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert parsed.returncode == 0, parsed.stderr
    config = json.loads(parsed.stdout)
    assert [config[key] for key in ("name", "backend", "max_batch_size")] == ["clicks", "python", 0]
    columns = describe_columns(read_config(repository / "1" / "model"))
    told = model_metadata("clicks", "1", columns)
    lists = [each["name"] for each in told["inputs"] if len(each["shape"]) == 2]
    expected = {each["name"]: TYPES[each["datatype"]] for each in told["inputs"]}
    expected |= {f"{name}.lengths": "TYPE_INT64" for name in lists}
    assert {each["name"]: each["data_type"] for each in config["input"]} == expected
    found = {each["name"] for each in config["input"] if each["optional"]}
    assert found == {name for name in expected if name.startswith("support.")}
    # JSON has int64 as text.
    assert {tuple(each["dims"]) for each in (*config["input"], *config["output"])} == {("-1",)}
    outputs = {each["name"]: each["data_type"] for each in config["output"]}
    assert outputs == {each["name"]: TYPES[each["datatype"]] for each in told["outputs"]}


def test_the_backend_answers_what_the_model_does(repository: Path) -> None:
    served, backend = gmeta.load(repository / "1" / "model"), backend_of(repository)
    support, query = random_rows(6, 1).drop_columns(["user"]), random_rows(9, 2)
    query = query.drop_columns(["user", "click"])
    requests = [
        StandInRequest(tensors(query) + tensors(support, "support.")),
        StandInRequest(tensors(query), ["prediction"]),
        StandInRequest(tensors(support, "support.")),
        StandInRequest(tensors(query.rename_columns(["itme", *query.column_names[1:]]))),
    ]
    adapted, plain, without, misspelt = backend.execute(requests)
    found = {each.name(): each.as_numpy() for each in adapted.output_tensors}
    np.testing.assert_array_equal(found["prediction"], served.adapt(support).predict(query))
    np.testing.assert_array_equal(found["prediction_before"], served.predict(query))
    assert not np.array_equal(found["prediction"], found["prediction_before"])
    (only,) = plain.output_tensors
    assert (only.name(), only.as_numpy().dtype) == ("prediction", np.float32)
    np.testing.assert_array_equal(only.as_numpy(), served.predict(query))
    told = without.error.message()
    assert told == "the request has no rows to predict. Send inputs named like the columns"
    assert misspelt.error.message().startswith("input 'itme' is no column of this model; did you")


def test_the_backend_takes_texts(tmp_path: Path) -> None:
    table = raw_table()
    write_schema_model(tmp_path / "exported", prepared(tmp_path, table, changed()))
    export_for(tmp_path / "exported", tmp_path / "models" / "clicks", "triton")
    backend = backend_of(tmp_path / "models" / "clicks")
    rows = table.filter(pa.compute.is_valid(table["tags"])).slice(0, 20)
    rows = rows.select(["item", "shop", "city", "tags", "price", "age"])
    rows = rows.set_column(5, "age", pa.compute.fill_null(rows["age"], 3).cast(pa.float32()))
    (answer,) = backend.execute([StandInRequest(tensors(rows))])
    assert answer.error is None, answer.error.message()
    expected = gmeta.load(tmp_path / "exported").predict(rows)
    np.testing.assert_array_equal(answer.output_tensors[0].as_numpy(), expected)
    wrong = [each for each in tensors(rows) if each.name() != "city"]
    wrong.append(StandInTensor("city", np.array([b"\xff"] * 20, object)))
    (answer,) = backend.execute([StandInRequest(wrong)])
    assert answer.error.message() == "input city has an element of BYTES that is no UTF-8"


def test_the_backend_takes_support_rows_as_events(tmp_path: Path) -> None:
    out, rows = trained(tmp_path, "din")
    export_for(out, tmp_path / "models" / "clicks", "triton")
    text = (tmp_path / "models" / "clicks" / "config.pbtxt").read_text()
    assert 'name: "support.time" data_type: TYPE_INT64' in text
    backend = backend_of(tmp_path / "models" / "clicks")
    read = ["item", "kind", "number"]
    support = rows.filter(pa.array(rows["user"].to_numpy() == 3)).select([*read, "click", "time"])
    query, served = rows.slice(0, 9).select(read), gmeta.load(out)
    request = StandInRequest(tensors(query) + tensors(support, "support."))
    (answer,) = backend.execute([request])
    assert answer.error is None, answer.error.message()
    found = {each.name(): each.as_numpy() for each in answer.output_tensors}
    np.testing.assert_array_equal(found["prediction"], served.adapt(support).predict(query))
    assert not np.array_equal(found["prediction"], found["prediction_before"])
