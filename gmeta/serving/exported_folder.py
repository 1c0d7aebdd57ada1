"""The exported folder, version 1 (docs/serving.md): config.json, safetensors and vocabularies."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.evaluation import EvaluationConfig
from gmeta.config.inputs import (
    ItemFeaturesConfig,
    LabelPrior,
    NeighboursConfig,
    SupportFeaturesConfig,
)
from gmeta.config.labels import LabelsConfig
from gmeta.config.losses import LOSSES, Loss
from gmeta.config.table_widths import widths_of_tables
from gmeta.config.train_config import config_from_dict
from gmeta.errors import ConfigError, GMetaError, UserError
from gmeta.metrics.catalogue import Scoring
from gmeta.platform.files.checked_json import read_json
from gmeta.platform.files.checksums import FileChecksum, find_differences, parse_entries
from gmeta.serving.table_format import TABLE_FORMATS, TableFormat
from gmeta_models.model_config import ModelConfig
from metaio.errors import MetaIOError
from metaio.format.atomic_folder import flush_to_disk, open_exclusive_folder, replace_folder
from metaio.format.features import Features
from metaio.format.manifest import add_checksum, compute_checksum, xxh3_hex
from metaio.format.names import is_name
from metaio.format.typed_json import parse_typed
from metaio.prepare.schema.schema import Schema
from metaio.prepare.schema.schema_file import parse_schema
from metaio.prepare.schema.values import Kind

FORMAT_NAME = "gmeta-model"
FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
DELTA_FILE = "delta.json"  # in place of config.json: what changed since another export
LAYERS_FILE = "layers.safetensors"
NEIGHBOURS_FILE = "neighbours.safetensors"  # of a model that has them
NEIGHBOURS = "neighbours."  # how their names begin among a learner's tensors
REMEDY = "Copy the folder again, or export the run again"


@dataclass(frozen=True)
class ExportedColumns:
    """What rows look like: raw columns as `schema` says, or table ids where it is None."""

    task: str
    label: str
    schema: Schema | None
    # Mean and deviation of the dense columns that the schema standardises.
    moments: dict[str, tuple[float, float]]
    # Whether the raw values of a sparse column are integer or text.
    kinds: dict[str, Kind] = field(default_factory=dict)

    @property
    def vocabularies(self) -> set[str]:
        """Return the tables whose ids are raw values."""
        sparse = self.schema.sparse if self.schema else ()
        return {column.table_name for column in sparse if column.vocabulary is not None}


@dataclass(frozen=True)
class ExportedConfig:
    """Everything in config.json but its own checksum; `source` says where the model comes from."""

    model: ModelConfig
    algorithm: AlgorithmConfig
    loss: str
    features: Features
    columns: ExportedColumns
    table_format: TableFormat
    source: dict[str, Any]
    files: dict[str, FileChecksum]
    # A model of an earlier release has none of the keys from here on.
    huber_delta: float = 1.0
    support_features: SupportFeaturesConfig = field(default_factory=SupportFeaturesConfig)
    item_features: ItemFeaturesConfig = field(default_factory=ItemFeaturesConfig)
    neighbours: NeighboursConfig = field(default_factory=NeighboursConfig)
    labels: LabelsConfig = field(default_factory=LabelsConfig)
    positive_rating: float = 0.0  # evaluation.positive_rating of the run
    label_range: tuple[float, ...] = ()  # least and most of each label in training; (): not known
    # Of each label the loss of ours that its own is like: what a model predicts is told without
    # the code of a package. (): all are ours.
    label_kinds: tuple[str, ...] = ()

    @property
    def losses(self) -> tuple[str, ...]:
        """Return the loss of each label; of a package's own that of ours which it is like."""
        return self.label_kinds or self.labels.losses_of(self.loss, self.features.labels)

    @property
    def loss_names(self) -> list[str]:
        """Return all losses that the model adapts by."""
        return self.labels.list_losses(self.loss)

    @property
    def judged(self) -> int:
        """Return the place of the label that headline metrics are of."""
        return self.labels.judged_index(self.features.labels)

    @property
    def judged_loss(self) -> Loss:
        """Return the loss of the judged label."""
        return cast(Loss, self.losses[self.judged])

    @property
    def judged_scoring(self) -> Scoring:
        """Return how predictions of the judged label are measured."""
        return Scoring(self.judged_loss, EvaluationConfig(positive_rating=self.positive_rating))


def table_file(index: int) -> str:
    """Return the name of the file of the table at this place of `features.tables`."""
    # By place, as a table's name need not be one that a file may have.
    return f"table-{index:05d}.safetensors"


def row_files(config: ExportedConfig) -> dict[str, tuple[str, int]]:
    """Return file and number of rows, by a name, of all that has a row for each id: of the tables
    by theirs, and of neighbours."""
    tables = config.features.tables
    found = {one.name: (table_file(at), one.num_rows) for at, one in enumerate(tables)}
    if column := config.neighbours.column:
        (table,) = (one.table for one in config.features.single if one.name == column)
        found[NEIGHBOURS_FILE] = NEIGHBOURS_FILE, found[table][1]
    return found


def vocabulary_file(table: str) -> str:
    """Return the path of a table's vocabulary, as in the dataset that it was copied from."""
    # The name comes from config.json, which anybody may have written: "../x" would lead elsewhere.
    if not is_name(table):
        raise GMetaError(
            f"table {table!r:.80} cannot have a vocabulary: it would lie elsewhere. {REMEDY}"
        )
    return f"vocabulary/{table}.parquet"


def read_vocabulary(file: Path) -> pa.Array:
    """Return the values of a vocabulary by row; null where a row was freed."""
    try:
        # One column: other threads could not help, and requests need the cores.
        with pq.ParquetFile(file) as vocabulary:
            return vocabulary.read(use_threads=False)["value"].combine_chunks()
    except (pa.ArrowException, KeyError, OSError) as error:
        raise GMetaError(
            f"{file} cannot be read: {str(error).splitlines()[0].rstrip('.')}. Export the run again"
        ) from error


def write_config(folder: Path, config: ExportedConfig) -> None:
    """Write config.json, checksum included."""
    body: dict[str, Any] = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **vars(config)}
    schema = config.columns.schema
    body["features"] = config.features.to_json()
    body["columns"] = {**vars(config.columns), "schema": schema.to_json() if schema else None}
    (folder / CONFIG_FILE).write_text(json.dumps(add_checksum(body), indent=1))


def checksum_in(folder: Path) -> str:
    """Return 16 hexadecimal digits that name the content of an exported folder."""
    try:
        # config.json holds the checksum of every other file, so its own hash covers them all.
        return xxh3_hex((folder / CONFIG_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise _no_model_error(folder, CONFIG_FILE) from None


def _no_model_error(folder: Path, name: str) -> UserError:
    return UserError(
        f"{folder} is no exported model: it has no {name}. Give a folder that `gmeta export` wrote"
    )


def read_config(folder: Path, name: str = CONFIG_FILE) -> ExportedConfig:
    """Return the config of an exported folder; a delta has that of its model as file `name`."""
    path = folder / name
    try:
        body = read_json(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        # `from None`: a notebook shows the whole chain.
        raise _no_model_error(folder, name) from None
    except ValueError as error:
        raise GMetaError(f"{path} is not JSON: it was cut short or edited. {REMEDY}") from error
    # Any folder of a run has a config.json too.
    if body.get("format") != FORMAT_NAME:
        raise UserError(
            f"{path} is not of format {FORMAT_NAME}: {folder} is no exported model. "
            "Give a folder that `gmeta export` wrote"
        )
    # Before the checksum: another version may compute it over other things.
    version = body.get("version")
    if version != FORMAT_VERSION:
        raise GMetaError(
            f"{path} has format version {version}: this release reads version {FORMAT_VERSION}. "
            "Export the run again with this release, or load it with the one that wrote it"
        )
    if body.get("checksum") != compute_checksum(body):
        raise GMetaError(f"{path} does not match its own checksum: it was edited. {REMEDY}")
    return _parse_config(path, body)


def _parse_config(path: Path, body: dict[str, Any]) -> ExportedConfig:
    # The checksum held, but whoever can write the folder can make it hold.
    try:
        outer = {"loss": body["loss"], "huber_delta": body.get("huber_delta", 1.0)}
        sections = {key: body[key] for key in ("model", "algorithm")}
        named = ("support_features", "item_features", "neighbours", "labels")
        inputs = {key: body.get(key, {}) for key in named}
        evaluation = {"positive_rating": body.get("positive_rating", 0.0)}
        parts = config_from_dict(
            {**sections, **inputs, "outer": outer, "evaluation": evaluation}, is_saved=True
        )
        support = parts.support_features
        if LabelPrior.from_config(support) is None and parts.has_support_inputs:
            raise ValueError("its support_features have no label_prior")
        if body["table_format"] not in TABLE_FORMATS:
            raise ConfigError(f"table_format {body['table_format']!r} is unknown")
        features = parse_typed(Features, body["features"], "features")
        features.check()
        widths_of_tables(features, parts.model)  # raises what is wrong with them
        parts.labels.check(features.labels)
        label_range = tuple(map(float, body.get("label_range", ())))
        if len(label_range) not in (0, 2 * features.num_labels):
            raise ValueError("its label_range is no least and most of each label")
        names = parts.labels.losses_of(parts.outer.loss, features.labels)
        label_kinds = tuple(body.get("label_kinds") or names)
        allowed = [(name,) if name in LOSSES else LOSSES for name in names]
        pairs = zip(label_kinds, allowed, strict=True)
        if not all(kind in kinds for kind, kinds in pairs):
            raise ValueError("its label_kinds are not those of its losses")
        columns, files = _parse_columns(body["columns"]), parse_entries(body["files"])
        needed = {LAYERS_FILE, *map(table_file, range(len(features.tables)))}
        # What is not listed is read without a comparison.
        needed |= {vocabulary_file(table) for table in columns.vocabularies}
        if column := parts.neighbours.column:
            if column not in (one.name for one in features.single):
                raise ValueError(f"its neighbours are of no column {column!r}")
            needed.add(NEIGHBOURS_FILE)
        for name in needed - files.keys():
            raise ValueError(f"it lists no file {name}")
        if not isinstance(body["source"], dict):
            raise ValueError("its source is no object")
    except (ConfigError, MetaIOError) as error:
        raise GMetaError(
            f"{path} asks for what this release does not have ({error}). "
            "Load it with the release that wrote it"
        ) from error
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise GMetaError(
            f"{path} is not what an export writes ({error!r:.200}). {REMEDY}"
        ) from error
    return ExportedConfig(
        model=parts.model,
        algorithm=parts.algorithm,
        loss=parts.outer.loss,
        features=features,
        columns=columns,
        table_format=body["table_format"],
        source=body["source"],
        files=files,
        huber_delta=parts.outer.huber_delta,
        support_features=parts.support_features,
        item_features=parts.item_features,
        neighbours=parts.neighbours,
        labels=parts.labels,
        positive_rating=parts.evaluation.positive_rating,
        label_range=label_range,
        label_kinds=label_kinds,
    )


def _parse_columns(section: dict[str, Any]) -> ExportedColumns:
    """Return the section of the columns; ValueError or its like where it makes no sense."""
    task, label, kinds = section["task"], section["label"], section.get("kinds", {})
    moments = {name: (float(mean), float(std)) for name, (mean, std) in section["moments"].items()}
    if not (isinstance(task, str) and isinstance(label, str)):
        raise ValueError("its task or label column is no text")
    if not all(kind in get_args(Kind) for kind in kinds.values()):
        raise ValueError("a column is neither integer nor text")
    if section["schema"] is None:
        return ExportedColumns(task, label, None, moments, kinds)
    # The schema repeats task, label and moments: encoding trusts that they agree.
    schema = parse_schema(section["schema"])
    if (task, label) != (schema.task.column, schema.label_text):
        raise ValueError("its schema has another task or label column")
    if not {column.column for column in schema.dense if column.standardise} <= moments.keys():
        raise ValueError("a dense column has no mean and deviation")
    return ExportedColumns(task, label, schema, moments, kinds)


def check_files(folder: Path, config: ExportedConfig, checksums: bool) -> None:
    """Raise GMetaError for a file of another size or, with `checksums`, of another content."""
    for difference in find_differences(folder, config.files, CONFIG_FILE, contents=checksums):
        raise GMetaError(f"{difference}. {REMEDY}")


def is_export(folder: Path) -> bool:
    """Return whether an export wrote this, be it damaged or of another version."""
    if (folder / DELTA_FILE).is_file():
        return True
    try:
        read_config(folder)
    except GMetaError as error:
        # UserError: there is no model; any other: there is one that this release cannot read.
        return not isinstance(error, UserError)
    return True


class FolderKind(NamedTuple):
    """What an export writes: a word for it, and how to recognise a folder of its kind."""

    noun: str  # behind "an"
    holds: Callable[[Path], bool]


MODEL_FOLDER = FolderKind("exported model", is_export)


@contextmanager
def new_folder(out: Path, overwrite: bool, kind: FolderKind = MODEL_FOLDER) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out` when the block ends without an error."""
    out = Path(os.path.abspath(out))  # so that "." has a name and a parent
    check_free(out, overwrite, kind)
    out.parent.mkdir(parents=True, exist_ok=True)
    # What a killed export left at this place is removed by the next one.
    with open_exclusive_folder(out.parent / f".{out.name}.partial", str(out)) as partial:
        yield partial
        for path in (paths := (*partial.rglob("*"), partial)):
            # safetensors writes for the owner alone; a model is passed around.
            path.chmod(0o755 if path.is_dir() else 0o644)
        flush_to_disk(paths)
        # Processes that have mapped the old files keep them until they close them.
        replace_folder(partial, out)


def check_free(out: Path, overwrite: bool, kind: FolderKind = MODEL_FOLDER) -> None:
    """Raise UserError for a place that holds something else, or what may not be replaced."""
    if not out.exists():
        return
    if kind.holds(out):
        if not overwrite:
            raise UserError(
                f"{out} holds an {kind.noun} already. "
                "Choose another folder, or pass --overwrite to replace it"
            )
    elif not out.is_dir() or any(out.iterdir()):
        raise UserError(
            f"{out} exists and is no {kind.noun}: a new folder is needed. Choose another place"
        )
