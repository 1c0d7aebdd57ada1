"""What a served model predicts of a prepared split, whatever increment of its stream it is of.

Table rows are matched by the values that they stand for; an unknown value is the model's row 0.

Shape suffixes: T tasks, N rows, F single-id or pooled features, V values, B tables, U unique ids, R
rows of tables"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from gmeta.data.features.regression import select_query_rows
from gmeta.data.label_checks import check_labels
from gmeta.errors import UserError
from gmeta.metrics.terms import Array, Terms, Value
from gmeta.serving.exported_folder import ExportedConfig, read_vocabulary, vocabulary_file
from gmeta.serving.served_model import ServedModel
from metaio.format.dataset import Dataset, read_verified_file
from metaio.prepare.schema.schema_file import parse_schema
from metaio.read.batch import TaskBatch
from metaio.read.reader import EpisodeRange, read_ranges

_TASKS_PER_BATCH = 256


@dataclass(frozen=True)
class GatePredictions:
    """One entry for each query row of a split whose (judged) label is known."""

    task_N: Array
    label_N: Array
    prediction_N: Array  # after adaptation: probabilities (bce) or ratings
    weight_N: Array  # in its row's loss; 1 where the data has none


def predict_gate(served: ServedModel, model: Path, dataset: Dataset, split: str) -> GatePredictions:
    """Return what a loaded model, from the folder `model`, predicts of a split's query rows."""
    if split not in dataset.splits or not dataset.splits[split].num_episodes:
        raise UserError(
            f"{dataset.url} has no tasks in split {split!r}: it has "
            f"{', '.join(dataset.splits)}. Name one that is not trained on with --split"
        )
    served.choose_threads()
    row_maps = _map_rows(model, served.config, dataset)
    all_episodes = [EpisodeRange(split, 0, dataset.splits[split].num_episodes)]
    batches = read_ranges(dataset, all_episodes, tasks_per_batch=_TASKS_PER_BATCH)
    parts, judged = [], served.config.judged
    for batch in check_labels(batches, served.config.losses, dataset, split):
        found = served.predict_batch(_with_model_rows(batch, row_maps))
        after = served.learner.objectives.outer.predictions(found.after_N)
        judged_N = [each.reshape(len(after), -1)[:, judged] for each in (found.label_N, after)]
        is_known_N = ~judged_N[0].isnan()
        task_N = torch.repeat_interleave(batch.task_T, found.layout.lengths_T)
        # Of several labels each has the row's weight.
        weight_N = select_query_rows(batch)[2].reshape(len(task_N), -1)[:, judged]
        columns = task_N, *judged_N, weight_N if batch.weight_N.numel() else torch.ones(len(after))
        parts.append([values_N[is_known_N] for values_N in columns])
    return GatePredictions(*(torch.cat(column).numpy() for column in zip(*parts, strict=True)))


def to_optional_values(terms: Mapping[str, Terms | Value]) -> dict[str, float | None]:
    """Return the value of each metric by its name; None where it is undefined."""
    return {
        name: float(one.value) if np.isfinite(one.value) else None for name, one in terms.items()
    }


def _map_rows(folder: Path, config: ExportedConfig, dataset: Dataset) -> list[Tensor | None]:
    """Return for each table the model's row [R] of each row of the dataset; None: the same one."""
    schema = dataset.manifest.recipe.get("schema")
    theirs = parse_schema(schema) if schema is not None else None
    moments = dataset.manifest.recipe.get("moments", {})
    moments = {name: tuple(moment) for name, moment in moments.items()}
    ours = {table.name: table.num_rows for table in config.features.tables}
    fits = (
        config.columns.schema == theirs
        and dict(config.columns.moments) == moments
        and replace(config.features, tables=()) == replace(dataset.features, tables=())
        and list(ours) == [table.name for table in dataset.features.tables]
    )
    # Without a schema ids mean the same only within one stream, which keeps them.
    is_own = config.source.get("dataset_fingerprint") == dataset.fingerprint
    place = dataset.manifest.stream
    is_of_stream = place is not None and config.source.get("stream") == place.stream
    if not is_own and not (fits and (theirs is not None or is_of_stream)):
        raise UserError(
            f"{dataset.url} was not prepared as the data of the model in {folder} was: its columns "
            "or ids mean something else. Judge on data of the same stream or schema"
        )
    return [
        None if is_own else _map_table_rows(folder, config, dataset, table.name, ours[table.name])
        for table in dataset.features.tables
    ]


def _map_table_rows(
    folder: Path, config: ExportedConfig, dataset: Dataset, name: str, num_rows: int
) -> Tensor | None:
    entry = dataset.manifest.vocabularies.get(name)
    size = next(table.num_rows for table in dataset.features.tables if table.name == name)
    row_R, file = np.arange(size), vocabulary_file(name)
    if entry is None or file not in config.files:
        # A hashed table keeps its size in a stream; plain ids are known up to the model's size.
        row_R[num_rows:] = 0
        return None if size <= num_rows else torch.from_numpy(row_R)
    table = pq.read_table(BytesIO(read_verified_file(dataset, file, entry)))
    values = table["value"].combine_chunks()
    known = read_vocabulary(folder / file)
    if known.equals(values):
        return None
    # A vocabulary's values begin at row 1; row 0 stands for unknown ones.
    row_R[:] = 0
    present = values.is_valid().to_numpy(zero_copy_only=False)
    if known.type == values.type:
        found = pc.index_in(values, value_set=known.drop_null() if known.null_count else known)
        # Freed rows are null and left out above: `places` leads back from a position to its row.
        places = np.flatnonzero(known.is_valid().to_numpy(zero_copy_only=False))
        place = pc.fill_null(found, -1).to_numpy(zero_copy_only=False)
        hit = present & (place >= 0)
        row_R[1:][: len(values)][hit] = places[place[hit]] + 1
    return torch.from_numpy(row_R)


def _with_model_rows(batch: TaskBatch, row_maps: list[Tensor | None]) -> TaskBatch:
    if all(rows is None for rows in row_maps):
        return batch
    ids, place, lengths, before = [], [], [], 0
    parts = batch.unique_ids_U.split(batch.unique_lengths_B.tolist())
    for rows_R, table_ids in zip(row_maps, parts, strict=True):
        mapped = table_ids if rows_R is None else rows_R[table_ids]
        # Several rows of the dataset may become one of the model: that of unknown values.
        unique, inverse = torch.unique(mapped, return_inverse=True)
        ids.append(unique)
        # Positions number the rows of all tables one after the other.
        place.append(inverse + before)
        lengths.append(len(unique))
        before += len(unique)
    place_U = torch.cat(place).to(batch.positions_NF.dtype)
    return replace(
        batch,
        unique_ids_U=torch.cat(ids),
        unique_lengths_B=torch.tensor(lengths),
        positions_NF=place_U[batch.positions_NF],
        multi_positions_V=place_U[batch.multi_positions_V],
        event_positions=place_U[batch.event_positions],
    )
