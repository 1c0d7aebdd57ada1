"""Reads an exported folder into a ServedModel; each kind of damage ends in one line."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy  # noqa: F401  # torch would import it in C, and swallow a Ctrl-C meanwhile
import torch

from gmeta.config.table_widths import widths_of_tables
from gmeta.errors import GMetaError
from gmeta.learner import MetaLearner
from gmeta.platform.files.tensor_files import MappedFiles, read_tensors
from gmeta.runs.build import build_learner, build_statistics, check_registered, find_plugins
from gmeta.serving.device import on_the_cpu, parse_device
from gmeta.serving.exported_folder import (
    LAYERS_FILE,
    NEIGHBOURS,
    NEIGHBOURS_FILE,
    ExportedConfig,
    check_files,
    checksum_in,
    read_config,
    read_vocabulary,
    row_files,
    table_file,
    vocabulary_file,
)
from gmeta.serving.finite_values import check_layers
from gmeta.serving.row_encoders import ColumnEncoder, IdColumnEncoder, RawColumnEncoder
from gmeta.serving.served_model import ServedModel
from gmeta.serving.stored_tables import check_table
from metaio.prepare.schema.schema import make_features


@torch.inference_mode(False)  # leaves the caller's, in which no layer could adapt
@on_the_cpu
def load(path: str | Path, verify: bool = True, device: str = "cpu") -> ServedModel:
    """Return the model in a folder that `gmeta export` wrote; its layers compute on `device` (cpu,
    cuda or cuda:N), its tables stay on the host, mapped: only `verify` (checksums) reads them."""
    folder, computes_on = Path(path), parse_device(device)
    config, checksum = read_config(folder), checksum_in(folder)
    # Before anything is mapped: a file cut short under a map kills the process.
    check_files(folder, config, checksums=False)
    mapped = MappedFiles([folder / file for file, _ in row_files(config).values()])
    if verify:
        check_files(folder, config, checksums=True)
    tables, widths = [], widths_of_tables(config.features, config.model)
    for index, table in enumerate(config.features.tables):
        file, shape = folder / table_file(index), (table.num_rows, widths[table.name])
        tables.append(check_table(str(file), read_tensors(file), shape, config.table_format))
    reload = partial(_load_again, folder.absolute(), config, device)
    learner, encoder = _load_learner(folder, config), _load_encoder(folder, config)
    return ServedModel(config, checksum, learner, tables, mapped, encoder, reload, computes_on)


def _load_again(folder: Path, config: ExportedConfig, device: str) -> ServedModel:
    # Checksums were compared when the model was first loaded.
    model = load(folder, verify=False, device=device)
    if model.config != config:
        raise GMetaError(
            f"{folder} holds another model than the one that was pickled: it was replaced since. "
            "Load it again with gmeta.load, or keep each export in a folder of its own"
        )
    return model


def _load_learner(folder: Path, config: ExportedConfig) -> MetaLearner:
    check_registered(folder, config.model, config.algorithm, config.loss_names, config.source)
    tensors = read_tensors(folder / LAYERS_FILE)
    near = read_tensors(folder / NEIGHBOURS_FILE) if config.neighbours.column else {}

    def build() -> MetaLearner:
        try:
            return build_learner(
                config.features,
                config.model,
                config.algorithm,
                config.loss,
                config.huber_delta,
                build_statistics(
                    config.support_features,
                    config.features,
                    config.item_features,
                    config.neighbours,
                ),
                config.item_features,
                config.labels,
                config.neighbours,
            )
        except (ValueError, RuntimeError) as error:
            raise GMetaError(
                f"{folder} cannot be built ({error}). Load it with the release that wrote it"
            ) from error

    # Without values it takes no memory, whatever widths the config asks for; but what another
    # package makes is tried on rows, as in training, and may need values.
    is_own = bool(find_plugins(config.model, config.algorithm, config.loss_names))
    with nullcontext() if is_own else torch.device("meta"):
        wanted = build().state_dict()
    # Compared here, since torch reports a misfit in as many lines as there are layers.
    shapes = {name: tensor.shape for name, tensor in (tensors | near).items()}
    lacking = [name for name, value in wanted.items() if shapes.get(name) != value.shape]
    if lacking or len(shapes) > len(wanted):
        # With nothing lacking, any further tensor is one that the model does not have.
        what = f"it lacks {lacking[0]} and {len(lacking) - 1} more" if lacking else "it holds more"
        raise GMetaError(
            f"{folder / LAYERS_FILE} does not fit config.json: {what}. "
            "The files come from different exports: export the run again"
        )
    learner = build()
    if learner.objectives.kinds != config.losses:
        raise GMetaError(
            f"{folder} predicts {', '.join(config.losses)}, but its losses as they are here "
            f"{', '.join(learner.objectives.kinds)}. Install the release of their package that "
            "made it, or export the run again"
        )
    check_layers(tensors, learner.state_dict(), f"Export an earlier checkpoint to {folder}")
    learner.load_state_dict(tensors, strict=False)
    if learner.neighbours is not None:
        # Not copied: of the mapped file only the rows that requests ask for are read.
        own = {name.removeprefix(NEIGHBOURS): values for name, values in near.items()}
        learner.neighbours.load_state_dict(own, assign=True)
    return learner


def _load_encoder(folder: Path, config: ExportedConfig) -> ColumnEncoder:
    schema = config.columns.schema
    if schema is None:
        return IdColumnEncoder(config.columns, config.features)
    vocabularies = {
        table: read_vocabulary(folder / vocabulary_file(table))
        for table in config.columns.vocabularies
    }
    sizes = {table: len(values) for table, values in vocabularies.items()}
    if schema.stream is not None:
        # Tables have room for what later increments bring.
        rows = {table.name: table.num_rows for table in config.features.tables}
        sizes = {table: max(size, rows.get(table, 0) - 1) for table, size in sizes.items()}
    if make_features(schema, sizes) != config.features:
        raise GMetaError(
            f"{folder} has tables of other sizes or columns than its schema and vocabularies. "
            "The files come from different exports: export the run again"
        )
    # Sizes agree from here on, so no id that the encoder makes is outside its table.
    return RawColumnEncoder(config.columns, schema, vocabularies)
