"""A model repository of Triton's Python backend: config.pbtxt, and version 1 with its model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from gmeta.serving.exported_folder import CONFIG_FILE as MODEL_CONFIG
from gmeta.serving.exported_folder import ExportedConfig
from gmeta.serving.server.input_columns import InputColumn, describe_columns
from gmeta.serving.server.tensors import LENGTHS, SUPPORT

CONFIG_FILE = "config.pbtxt"
BACKEND_FILE = Path("1") / "model.py"
MODEL_FOLDER = Path("1") / "model"
_DATATYPES = {
    "BYTES": "TYPE_STRING",
    "INT64": "TYPE_INT64",
    "FP32": "TYPE_FP32",
    "FP64": "TYPE_FP64",
}


def write_repository(folder: Path, name: str, config: ExportedConfig) -> None:
    """Write config.pbtxt and the backend's file; the exported model is in its place already."""
    (folder / CONFIG_FILE).write_text(config_text(name, config), encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("triton_model.py"), folder / BACKEND_FILE)


def is_repository(folder: Path) -> bool:
    """Return whether `gmeta export` wrote a repository's model to this folder."""
    return (folder / CONFIG_FILE).is_file() and (folder / MODEL_FOLDER / MODEL_CONFIG).is_file()


def config_text(name: str, config: ExportedConfig) -> str:
    """Return config.pbtxt."""
    columns = describe_columns(config)
    inputs = [each for column in columns.read for each in _input_entries("", column)]
    support = {column.name: column for column in (*columns.read, *columns.labels)}
    inputs += [each for column in support.values() for each in _input_entries(SUPPORT, column)]
    outputs, separator = [_tensor_entry(each.name, "FP32") for each in columns.outputs], ",\n"
    return (
        # 0: Triton must not take the first dimension, which differs between sides, for one batch.
        f'name: {_quote(name)}\nbackend: "python"\nmax_batch_size: 0\n'
        f"input [\n{separator.join(inputs)}\n]\noutput [\n{separator.join(outputs)}\n]\n"
        "instance_group [\n  { count: 1 kind: KIND_CPU }\n]\n"
    )


def _input_entries(prefix: str, column: InputColumn) -> Iterator[str]:
    """Yield an input, and of a list its lengths: rows may differ in them."""
    optional = " optional: true" if prefix else ""
    yield _tensor_entry(prefix + column.name, column.datatype, optional)
    if column.is_list:
        yield _tensor_entry(prefix + column.name + LENGTHS, "INT64", optional)


def _tensor_entry(name: str, datatype: str, more: str = "") -> str:
    return f"  {{ name: {_quote(name)} data_type: {_DATATYPES[datatype]} dims: [ -1 ]{more} }}"


def _quote(text: str) -> str:
    # JSON's escapes of quotes, backslashes and line ends are those of protobuf's text format.
    return json.dumps(text, ensure_ascii=False)
