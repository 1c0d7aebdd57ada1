"""Export: a run's checkpoint as a folder that serves without ranks, TorchRec or the dataset."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.sharding import BEYOND_DEVICE, placements_of_tables
from gmeta.config.table_names import weight_name
from gmeta.config.table_widths import widths_of_tables
from gmeta.config.train_config import TrainConfig
from gmeta.distributed.tables.table_storage import MappedRows
from gmeta.errors import GMetaError, UserError
from gmeta.platform.files.checksums import describe_file
from gmeta.platform.files.tensor_files import translate_write_errors
from gmeta.runs.build import build, check_registered, find_plugins
from gmeta.runs.checkpoints.index import IndexedReader
from gmeta.runs.checkpoints.integrity import check_files, translate_damage
from gmeta.runs.checkpoints.selected_checkpoint import check_config, checkpoint_to_use
from gmeta.runs.chosen_adaptation import read_chosen_adaptation
from gmeta.runs.environment import package_versions
from gmeta.runs.run_folder import RunFolder, list_checkpoints, parse_checkpoint_step
from gmeta.serving.exported_folder import (
    LAYERS_FILE,
    NEIGHBOURS,
    NEIGHBOURS_FILE,
    ExportedColumns,
    ExportedConfig,
    check_free,
    new_folder,
    table_file,
    vocabulary_file,
    write_config,
)
from gmeta.serving.finite_values import check_layers
from gmeta.serving.item_vectors import write_item_vectors
from gmeta.serving.stored_tables import write_table
from gmeta.serving.table_format import TableFormat
from metaio.errors import NoDatasetError
from metaio.format.dataset import Dataset, read_verified_file
from metaio.prepare.schema.schema_file import parse_schema

# How ShardedLearner names its parts in the state dict of a checkpoint.
_LAYER_KEY = "model.learner.{}"
_TABLE_KEY = "model.{}"
_REMEDY = "Export an earlier one with --step, or remove it and train on from the one before"


@dataclass(frozen=True)
class ExportResult:
    """What an export wrote; `adaptation` is None where it is that of the run's config."""

    step: int
    num_bytes: int
    table_bytes: int
    # What the tables took in training: the base of the saving that is reported.
    float32_table_bytes: int
    adaptation: AlgorithmConfig | None = None


class CheckpointReader:
    """Reads full tensors of a checkpoint, however many ranks they were sharded over."""

    def __init__(self, path: Path) -> None:
        # First: a file that is damaged is named before torch fails on what is inside.
        check_files(path, remedy=_REMEDY)
        self._path = path
        with translate_damage(path, _REMEDY):
            self._reader = IndexedReader(path)

    def read(self, names: list[str], scratch: Path | None = None) -> dict[str, Tensor]:
        """Return these tensors by name, in the type that they were trained in; with `scratch` in
        files there that are mapped."""
        with translate_damage(self._path, _REMEDY):
            found = {name: self._empty(name, scratch) for name in names}
        with translate_damage(self._path, _REMEDY), warnings.catch_warnings():
            # An export is one process by design, which torch warns of.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_shards(found, storage_reader=self._reader, no_dist=True)
        return found

    def _empty(self, name: str, scratch: Path | None) -> Tensor:
        entry = self._reader.index.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise GMetaError(
                f"checkpoint {self._path} has no tensor {name}: it is of another model than "
                "the run's config. Export a step of the same run"
            )
        # Of the full size: the reader fills in what each rank wrote.
        if scratch is not None:
            return MappedRows(str(scratch), entry.size, entry.properties.dtype).values_RD
        return torch.empty(entry.size, dtype=entry.properties.dtype)


def export_run(
    root: Path,
    out: Path,
    table_format: TableFormat = "float32",
    step: int | None = None,
    overwrite: bool = False,
    load: Callable[[Path, bool], object] | None = None,
) -> ExportResult:
    """Write the model of a run's checkpoint (`step`, or the one in use) to the folder `out`. Raises
    GMetaError: `load` refuses it."""
    run = RunFolder(root)
    config = run.read_config()
    checkpoint = _choose_checkpoint(run, step)
    check_free(out, overwrite)  # before the checkpoint is read, which may take minutes
    check_config(checkpoint, config)
    made_on = run.read_environment()
    check_registered(root, config.model, config.algorithm, config.loss_names, made_on)
    try:
        dataset, learner = build(config)
    except NoDatasetError as error:
        raise GMetaError(f"run {root} cannot be exported without its data: {error}") from error
    # Vocabularies are copied from the dataset: of another one they would name other rows.
    run.check_dataset(dataset.url, dataset.fingerprint)
    found_step = parse_checkpoint_step(checkpoint)
    # Rate and steps that an evaluation chose hold for the weights of one step alone.
    chosen = read_chosen_adaptation(run, config.algorithm, found_step)
    if chosen is not None:
        config = replace(config, algorithm=chosen)
    description = _make_description(config, dataset, table_format, root, found_step)
    if learner.statistics.width:
        # The prior comes from the dataset's labels, which the exported model does not have.
        inputs = replace(config.support_features, label_prior=learner.statistics.prior)
        description = replace(description, support_features=inputs)
    reader = CheckpointReader(checkpoint)
    untrained = learner.state_dict()
    names = {key: _LAYER_KEY.format(key) for key in untrained}
    read = reader.read(list(names.values()))
    layers = {key: read[name] for key, name in names.items()}
    remedy = "Export an earlier checkpoint with --step, or train with lower rates"
    check_layers(layers, untrained, remedy)
    # Read one by one: the largest table, not the model, must fit into memory, unless it did not
    # in training either.
    widths = widths_of_tables(dataset.features, config.model)
    placements = placements_of_tables(config.sharding, list(widths))

    def table(name: str) -> Tensor:
        key = _TABLE_KEY.format(weight_name(widths, name))
        scratch = out.parent if placements[name] in BEYOND_DEVICE else None
        return reader.read([key], scratch)[key]

    with new_folder(out, overwrite) as partial:
        _copy_vocabularies(dataset, partial)
        learner.load_state_dict(layers, strict=False)
        write_item_vectors(partial, dataset, learner, table)
        write_model(partial, description, layers, table)
        try:
            if load is not None:
                load(partial, False)
        except GMetaError as error:
            problem = str(error).replace(str(partial), str(out))
            raise GMetaError(
                f"run {root} is not exported, as it could not be loaded: {problem}"
            ) from error
        sizes = {path: path.stat().st_size for path in partial.rglob("*") if path.is_file()}
    table_bytes = sum(size for path, size in sizes.items() if path.name.startswith("table-"))
    num_values = sum(table.num_rows * widths[table.name] for table in dataset.features.tables)
    trained_bytes = num_values * torch.float32.itemsize
    return ExportResult(found_step, sum(sizes.values()), table_bytes, trained_bytes, chosen)


def write_model(
    folder: Path,
    description: ExportedConfig,
    layers: Mapping[str, Tensor],
    table: Callable[[str], Tensor],
) -> None:
    """Write layers, tables (got one by one, by name) and config.json into `folder`."""
    # safetensors refuses strided views.
    kept = {key: value.contiguous() for key, value in layers.items()}
    near = {key: kept.pop(key) for key in layers if key.startswith(NEIGHBOURS)}
    _save_tensors(kept, folder / LAYERS_FILE)
    if near:
        # As a table: it is mapped, and a delta holds the rows that changed.
        _save_tensors(near, folder / NEIGHBOURS_FILE, {"table": NEIGHBOURS_FILE})
    for index, spec in enumerate(description.features.tables):
        own_file = folder / table_file(index)
        write_table(own_file, spec.name, table(spec.name), description.table_format)
    # Last, so that it lists every file: vocabularies, which the caller has copied, are files of the
    # model too.
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): describe_file(path) for path in paths}
    write_config(folder, replace(description, files=files))


def _save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    with translate_write_errors(path):
        save_file(tensors, path, metadata)


def _choose_checkpoint(run: RunFolder, step: int | None) -> Path:
    checkpoints = list_checkpoints(run.checkpoints)
    if not checkpoints:
        raise UserError(
            f"run {run.root} has 0 checkpoints: there is nothing to export yet. "
            "Let it reach its first one"
        )
    if step is None:
        return checkpoint_to_use(run.checkpoints, run.read_config().run) or checkpoints[-1]
    steps = {parse_checkpoint_step(path): path for path in checkpoints}
    if step not in steps:
        raise UserError(
            f"run {run.root} has no checkpoint of step {step}: it has "
            f"{', '.join(map(str, steps))}. Choose one of them, or leave out --step"
        )
    return steps[step]


def _make_description(
    config: TrainConfig, dataset: Dataset, table_format: TableFormat, root: Path, step: int
) -> ExportedConfig:
    recipe, place = dataset.manifest.recipe, dataset.manifest.stream
    schema = parse_schema(recipe["schema"]) if "schema" in recipe else None
    moments = {name: (mean, std) for name, (mean, std) in recipe.get("moments", {}).items()}
    kinds = recipe.get("kinds", {})
    columns = ExportedColumns(dataset.task, dataset.label, schema, moments, kinds)
    return ExportedConfig(
        model=config.model,
        algorithm=config.algorithm,
        loss=config.outer.loss,
        huber_delta=config.outer.huber_delta,
        features=dataset.features,
        columns=columns,
        table_format=table_format,
        item_features=config.item_features,
        neighbours=config.neighbours,
        labels=config.labels,
        positive_rating=config.evaluation.positive_rating,
        label_range=_find_label_range(config.data.train_split, dataset),
        label_kinds=config.labels.loss_kinds(config.outer.loss, dataset.features.labels),
        source={
            "run": str(root),
            "step": step,
            # The path of a stream leads to many datasets; the URL names the increment.
            "dataset": dataset.url if place else config.data.path,
            "dataset_fingerprint": dataset.fingerprint,
            **({"stream": place.stream, "increment": place.increment} if place else {}),
            "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "gmeta": package_versions()["gmeta"],
            "torch": torch.__version__,
            "plugins": find_plugins(config.model, config.algorithm, config.loss_names),
        },
        files={},
    )


def _find_label_range(split: str, dataset: Dataset) -> tuple[float, ...]:
    """Return least and most of each label in a split's first block; () if one is not known."""
    label_N = dataset.read_block(split, 0).label_N
    label_NL = label_N.reshape(len(label_N), -1)
    ends_2L = np.stack([each.reduce(label_NL, axis=0) for each in (np.fmin, np.fmax)])
    return tuple(ends_2L.T.ravel().tolist()) if np.isfinite(ends_2L).all() else ()


def _copy_vocabularies(dataset: Dataset, folder: Path) -> None:
    for table, entry in dataset.manifest.vocabularies.items():
        name = vocabulary_file(table)
        (folder / name).parent.mkdir(exist_ok=True)
        # Verified: config.json will vouch for the copy with a checksum of its own.
        (folder / name).write_bytes(read_verified_file(dataset, name, entry))
