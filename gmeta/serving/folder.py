"""The exported folder, version 1: config.json, safetensors files and vocabularies.

config.json names every other file with its size and checksum; docs/serving.md describes it.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from gmeta.adaptation.config import AlgorithmConfig
from gmeta.config import config_from_dict
from gmeta.errors import ConfigError, GMetaError, UserError
from gmeta.files.checksums import FileEntry, differences
from metaio.destination import flush_to_disk, folder_of_one_writer, replace_folder
from metaio.errors import MetaIOError
from metaio.features import Features
from metaio.manifest import canonical_json, xxh3_hex
from metaio.schema import Schema, parse_schema
from metaio.values import Kind
from models.config import ModelConfig

FORMAT_NAME = "gmeta-model"
FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
LAYERS_FILE = "layers.safetensors"
TableFormat = Literal["float32", "float16", "int8"]
TABLE_FORMATS: tuple[TableFormat, ...] = get_args(TableFormat)
_REMEDY = "Copy the folder again, or export the run again"


@dataclass(frozen=True)
class Columns:
    """What rows look like: raw columns as `schema` describes them, or table ids where it is None.

    `moments` are mean and deviation of the dense columns that the schema standardises, `kinds` says
    of each sparse column whether its raw values are integer or text.
    """

    task: str
    label: str
    schema: Schema | None
    moments: dict[str, tuple[float, float]]
    kinds: dict[str, Kind] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportedConfig:
    """Everything in config.json but its own checksum; `source` says where the model comes from."""

    model: ModelConfig
    algorithm: AlgorithmConfig
    loss: str
    features: Features
    columns: Columns
    table_format: TableFormat
    source: dict[str, Any]
    files: dict[str, FileEntry]


def table_file(index: int) -> str:
    """Name of the file of the table at this place of `features.tables`."""
    return f"table-{index:05d}.safetensors"


def vocabulary_file(table: str) -> str:
    """Path of the vocabulary of a table, as in the dataset that it was copied from."""
    return f"vocabulary/{table}.parquet"


def write_config(folder: Path, config: ExportedConfig) -> None:
    """Write config.json, checksum included."""
    body: dict[str, Any] = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **vars(config)}
    schema = config.columns.schema
    body["features"] = config.features.to_json()
    body["columns"] = {**vars(config.columns), "schema": schema.to_json() if schema else None}
    body = json.loads(json.dumps(body, default=asdict))
    body["checksum"] = xxh3_hex(canonical_json(body))
    (folder / CONFIG_FILE).write_text(json.dumps(body, indent=1))


def read_config(folder: Path) -> ExportedConfig:
    """The config of an exported folder.

    Raises:
        UserError: there is no exported model here.
        GMetaError: config.json was altered, or another release of gmeta wrote it.
    """
    path = folder / CONFIG_FILE
    try:
        body = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{folder} is no exported model: it has no {CONFIG_FILE}. "
            "Give a folder that `gmeta export` wrote"
        ) from error
    except ValueError as error:
        raise GMetaError(f"{path} is not JSON: it was cut short or edited. {_REMEDY}") from error
    # Any folder of a run has a config.json too.
    if not isinstance(body, dict) or body.pop("format", None) != FORMAT_NAME:
        raise UserError(
            f"{path} is not of format {FORMAT_NAME}: {folder} is no exported model. "
            "Give a folder that `gmeta export` wrote"
        )
    # Before the checksum: another version may take it of other things.
    version = body.pop("version", None)
    if version != FORMAT_VERSION:
        raise GMetaError(
            f"{path} has format version {version}: this release reads version {FORMAT_VERSION}. "
            "Export the run again with this release, or load it with the one that wrote it"
        )
    checksum = body.pop("checksum", None)
    signed = {"format": FORMAT_NAME, "version": version, **body}
    if checksum != xxh3_hex(canonical_json(signed)):
        raise GMetaError(f"{path} does not match its own checksum: it was edited. {_REMEDY}")
    return _from_json(path, body)


def _from_json(path: Path, body: dict[str, Any]) -> ExportedConfig:
    try:
        parts = config_from_dict({key: body[key] for key in ("model", "algorithm")})
        columns = body["columns"]
        schema = None if columns["schema"] is None else parse_schema(columns["schema"])
        if body["table_format"] not in TABLE_FORMATS:
            raise ConfigError(f"table_format {body['table_format']!r} is unknown")
    except (ConfigError, MetaIOError) as error:
        # The checksum held, so this was written so: by a release that knows more than this one.
        raise GMetaError(
            f"{path} asks for what this release does not have ({error}). "
            "Load it with the release that wrote it"
        ) from error
    moments = {name: (mean, deviation) for name, (mean, deviation) in columns["moments"].items()}
    return ExportedConfig(
        model=parts.model,
        algorithm=parts.algorithm,
        loss=body["loss"],
        features=Features.from_json(body["features"]),
        columns=Columns(
            columns["task"], columns["label"], schema, moments, columns.get("kinds", {})
        ),
        table_format=body["table_format"],
        source=body["source"],
        files={name: FileEntry(**entry) for name, entry in body["files"].items()},
    )


def check_files(folder: Path, config: ExportedConfig, checksums: bool) -> None:
    """Hold the files against config.json: sizes always, contents if asked.

    Raises:
        GMetaError: a file is missing, cut short or altered.
    """
    for difference in differences(folder, config.files, CONFIG_FILE, contents=checksums):
        raise GMetaError(f"{difference}. {_REMEDY}")


@contextmanager
def new_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends without an error; else it goes, at
    the next export if the process was killed.

    Raises:
        UserError: `out` is taken by a model that may not be replaced, or by something else.
        DataError: another process exports to `out`, or the disk is full.
    """
    out = Path(os.path.abspath(out))  # so that "." has a name and a parent
    _check_free(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    with folder_of_one_writer(out.parent / f".{out.name}.partial", str(out)) as partial:
        yield partial
        paths = (*partial.rglob("*"), partial)
        for path in paths:
            # safetensors writes for the owner alone; a model is passed around.
            path.chmod(0o755 if path.is_dir() else 0o644)
        flush_to_disk(paths)
        # Processes that have mapped the old files keep them until they close them.
        replace_folder(partial, out)


def _check_free(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if _is_export(out):
        if not overwrite:
            raise UserError(
                f"{out} holds an exported model already. "
                "Choose another folder, or pass --overwrite to replace it"
            )
    elif not out.is_dir() or any(out.iterdir()):
        raise UserError(
            f"{out} exists and is no exported model: a new folder is needed. Choose another place"
        )


def _is_export(folder: Path) -> bool:
    """Whether an export wrote this, be it damaged or of another version."""
    try:
        read_config(folder)
    except UserError:
        return False
    except GMetaError:
        return True
    return True
