"""inputs.json beside a program: how raw columns become its inputs, for readers in any language."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gmeta.metrics.catalogue import predicted_by
from gmeta.platform.files.checked_json import read_json
from gmeta.serving.exported_folder import ExportedConfig, vocabulary_file
from gmeta.serving.formats.program_events import TIMES
from gmeta.serving.formats.program_modules import OUTPUT
from gmeta.serving.formats.program_rows import DENSE, IDS, LENGTHS, LISTS
from metaio.format.features import FeatureSpec

FORMAT_NAME = "gmeta-program"
FORMAT_VERSION = 1
INPUTS_FILE = "inputs.json"
# Every table keeps it for values that no row stands for.
_UNKNOWN_ROW = 0


def write_inputs(folder: Path, config: ExportedConfig, programs: dict[str, Any]) -> None:
    """Write inputs.json: the `programs` and the columns of each input in order."""
    body = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "programs": programs,
        "output": {"name": OUTPUT, "datatype": "FP32", **_describe_predictions(config)},
        "inputs": _describe_columns(config),
        "task": config.columns.task,
        **_describe_labels(config),
        "source": config.source,
    }
    # Python's NaN is no JSON, and other languages' parsers refuse it.
    text = json.dumps(body, indent=1, allow_nan=False)
    (folder / INPUTS_FILE).write_text(text + "\n", encoding="utf-8")


def is_program(folder: Path) -> bool:
    """Return whether `gmeta export` wrote a program to this folder."""
    try:
        return read_json(folder / INPUTS_FILE).get("format") == FORMAT_NAME
    except (OSError, ValueError):
        return False


def _describe_columns(config: ExportedConfig) -> dict[str, Any]:
    features = config.features
    document: dict[str, Any] = {}
    if features.single:
        columns = [_describe_sparse(config, column) for column in features.single]
        document[IDS] = {"datatype": "INT64", "columns": columns}
    if features.dense:
        document[DENSE] = {"datatype": "FP32", "columns": _describe_dense(config)}
    if features.multi:
        columns = [_describe_sparse(config, column) for column in features.multi]
        document[LISTS] = {"datatype": "INT64", "columns": columns}
        document[LENGTHS] = {"datatype": "INT64", "columns": [each["name"] for each in columns]}
    if config.model.events != "none":
        document[TIMES] = {"datatype": "FP64", "columns": _describe_events(config)}
    return document


def _describe_events(config: ExportedConfig) -> list[dict[str, Any]]:
    """Return the seconds of a support row, and what makes it an event: 1, else 0. An item drawn as
    a negative is none."""
    schema = config.columns.schema
    if schema is None or schema.time is None or schema.events is None:
        return [{"name": "seconds"}, {"name": "is_event"}]
    is_event = {"name": "is_event", "where": schema.events.where}
    drawn = {"if_label_is_0": 0} if schema.negatives is not None else {}
    return [{"name": schema.time.column}, {**is_event, **drawn}]


def _describe_sparse(config: ExportedConfig, column: FeatureSpec) -> dict[str, Any]:
    num_rows = {table.name: table.num_rows for table in config.features.tables}[column.table]
    entry = {"name": column.name, "table": column.table, "num_rows": num_rows}
    entry |= {"unknown_row": _UNKNOWN_ROW}
    schema = config.columns.schema
    if schema is None:
        return entry | {"ids": "as they are"}
    (rule,) = (each for each in schema.sparse if each.column == column.name)
    entry |= {"values": config.columns.kinds.get(column.name, "text"), "null": rule.null}
    if rule.separator is not None:
        entry |= {"separator": rule.separator}
    if rule.hash is not None:
        return entry | {"ids": "hash", "hash": rule.hash}
    return entry | {"ids": "vocabulary", "vocabulary": vocabulary_file(column.table)}


def _describe_dense(config: ExportedConfig) -> list[dict[str, Any]]:
    schema, moments = config.columns.schema, config.columns.moments
    if schema is None:
        return [{"name": name} for name in config.features.dense]
    entries = []
    for rule in schema.dense:
        entry = {"name": rule.column, **asdict(rule)}
        # `name` and the moments below say the same.
        del entry["column"], entry["standardise"]
        if rule.standardise:
            entry |= dict(zip(("mean", "deviation"), moments[rule.column], strict=True))
        entries.append(entry)
    # The numbers of a vector stand side by side.
    return entries + [{"name": v.column, "width": v.width, "fill": v.fill} for v in schema.vector]


def _describe_labels(config: ExportedConfig) -> dict[str, Any]:
    """Return `label`, or each of `labels` if there are several, and `weight` if there is one."""
    weight = {"weight": {"name": config.features.weight}} if config.features.weight else {}
    schema = config.columns.schema
    if schema is None:
        return {"label": {"name": config.columns.label, "threshold": None}}
    entries = [{"name": label.column, "threshold": label.threshold} for label in schema.labels]
    if not config.features.labels:
        return {"label": entries[0], **weight}
    for name, label, entry in zip(config.features.labels, schema.labels, entries, strict=True):
        entry |= {"label": name, "mask": label.mask, "null": label.null}
    return {"labels": entries, **weight}


def _describe_predictions(config: ExportedConfig) -> dict[str, Any]:
    """Return what a prediction is; for several labels, in the order of `labels`."""
    kinds = [predicted_by(loss) for loss in config.losses]
    return {"kind": kinds[0]} if len(kinds) == 1 else {"kinds": kinds}
