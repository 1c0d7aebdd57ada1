"""inputs.json beside a program: how raw columns become its inputs, for readers in any language."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gmeta.files.checked_json import read_json
from gmeta.metrics.catalogue import predicted_by
from gmeta.runtimes.modules import DENSE, IDS, LENGTHS, LISTS, OUTPUT
from gmeta.serving.folder import ExportedConfig, vocabulary_file
from metaio.format.features import FeatureSpec

FORMAT_NAME = "gmeta-program"
FORMAT_VERSION = 1
INPUTS_FILE = "inputs.json"
# Every table keeps it for values that no row stands for.
_UNKNOWN_ROW = 0


def write_inputs(folder: Path, config: ExportedConfig, programs: dict[str, Any]) -> None:
    """Write inputs.json: the `programs` with the shapes of their inputs, and the columns of each
    input in order."""
    body = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "programs": programs,
        "output": {
            "name": OUTPUT,
            "datatype": "FP32",
            **_kinds(config),
        },
        "inputs": _described(config),
        "task": config.columns.task,
        **_labels(config),
        "source": config.source,
    }
    text = json.dumps(body, indent=1, allow_nan=False)
    (folder / INPUTS_FILE).write_text(text + "\n", encoding="utf-8")


def is_program(folder: Path) -> bool:
    """Return whether `gmeta export` wrote a program to this folder."""
    try:
        return read_json(folder / INPUTS_FILE).get("format") == FORMAT_NAME
    except (OSError, ValueError):
        return False


def _described(config: ExportedConfig) -> dict[str, Any]:
    features = config.features
    found: dict[str, Any] = {}
    if features.single:
        columns = [_sparse(config, column) for column in features.single]
        found[IDS] = {"datatype": "INT64", "columns": columns}
    if features.dense:
        found[DENSE] = {"datatype": "FP32", "columns": _dense(config)}
    if features.multi:
        columns = [_sparse(config, column) for column in features.multi]
        found[LISTS] = {"datatype": "INT64", "columns": columns}
        found[LENGTHS] = {"datatype": "INT64", "columns": [each["name"] for each in columns]}
    return found


def _sparse(config: ExportedConfig, column: FeatureSpec) -> dict[str, Any]:
    num_rows = {table.name: table.num_rows for table in config.features.tables}[column.table]
    found = {"name": column.name, "table": column.table, "num_rows": num_rows}
    found |= {"unknown_row": _UNKNOWN_ROW}
    schema = config.columns.schema
    if schema is None:
        return found | {"ids": "as they are"}
    (rule,) = (each for each in schema.sparse if each.column == column.name)
    found |= {"values": config.columns.kinds.get(column.name, "text"), "null": rule.null}
    if rule.separator is not None:
        found |= {"separator": rule.separator}
    if rule.hash is not None:
        return found | {"ids": "hash", "hash": rule.hash}
    return found | {"ids": "vocabulary", "vocabulary": vocabulary_file(column.table)}


def _dense(config: ExportedConfig) -> list[dict[str, Any]]:
    schema, moments = config.columns.schema, config.columns.moments
    if schema is None:
        return [{"name": name} for name in config.features.dense]
    found = []
    for rule in schema.dense:
        told = {"name": rule.column, **asdict(rule)}
        del told["column"], told["standardise"]
        if rule.standardise:
            told |= dict(zip(("mean", "deviation"), moments[rule.column], strict=True))
        found.append(told)
    # The numbers of a vector stand side by side.
    return found + [{"name": v.column, "width": v.width, "fill": v.fill} for v in schema.vector]


def _labels(config: ExportedConfig) -> dict[str, Any]:
    """Return what `label` is, or, if there are several or one that may not be known, each of
    `labels`; and the column of the rows' `weight`, if they have one."""
    weight = {"weight": {"name": config.features.weight}} if config.features.weight else {}
    schema = config.columns.schema
    if schema is None:
        return {"label": {"name": config.columns.label, "threshold": None}}
    told = [{"name": label.column, "threshold": label.threshold} for label in schema.labels]
    if not config.features.labels:
        return {"label": told[0], **weight}
    for name, label, entry in zip(config.features.labels, schema.labels, told, strict=True):
        entry |= {"label": name, "mask": label.mask, "null": label.null}
    return {"labels": told, **weight}


def _kinds(config: ExportedConfig) -> dict[str, Any]:
    """Return what a prediction is; for several labels, in the order of `labels`."""
    kinds = [predicted_by(loss) for loss in config.losses]
    return {"kind": kinds[0]} if len(kinds) == 1 else {"kinds": kinds}
