"""What a served model predicts of a prepared split, whatever increment of its stream it is of.

Table rows are matched by the values that they stand for; an unknown value is the model's row 0.

Shape suffixes: T tasks, N rows, F single-id or pooled features, M multi-id features, V values, K
dense columns, B tables, U unique ids, R rows of tables"""

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
from metaio.format.block import find_features_of_values
from metaio.format.dataset import Dataset, read_verified_file
from metaio.prepare.schema.schema_changes import may_become
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
    columns = find_columns(model, served.config, dataset)
    all_episodes = [EpisodeRange(split, 0, dataset.splits[split].num_episodes)]
    batches = read_ranges(dataset, all_episodes, tasks_per_batch=_TASKS_PER_BATCH)
    parts, judged = [], served.config.judged
    for batch in check_labels(batches, served.config.losses, dataset, split):
        found = served.predict_batch(columns.select(batch))
        after = served.learner.objectives.outer.predictions(found.after_N)
        judged_N = [each.reshape(len(after), -1)[:, judged] for each in (found.label_N, after)]
        is_known_N = ~judged_N[0].isnan()
        task_N = torch.repeat_interleave(batch.task_T, found.layout.lengths_T)
        # Of several labels each has the row's weight.
        weight_N = select_query_rows(batch)[2].reshape(len(task_N), -1)[:, judged]
        weight_N = weight_N if batch.weight_N.numel() else torch.ones(len(after))
        values = task_N, *judged_N, weight_N
        parts.append([values_N[is_known_N] for values_N in values])
    return GatePredictions(*(torch.cat(column).numpy() for column in zip(*parts, strict=True)))


def to_optional_values(terms: Mapping[str, Terms | Value]) -> dict[str, float | None]:
    """Return the value of each metric by its name; None where it is undefined."""
    return {
        name: float(one.value) if np.isfinite(one.value) else None for name, one in terms.items()
    }


@dataclass(frozen=True)
class ModelColumns:
    """Where the columns of a model stand in a dataset, which may have more, and its rows of their
    ids."""

    single: list[int]
    multi: list[int]
    dense: list[int]
    tables: list[int]
    row_maps: list[Tensor | None]  # for each table the row [R] of each of the dataset; None: same
    is_all: bool  # the dataset has no others

    def select(self, batch: TaskBatch) -> TaskBatch:
        """Return the batch as one of the model's own data."""
        if self.is_all and all(rows is None for rows in self.row_maps):
            return batch
        ids, lengths, before = [], [], 0
        parts = batch.unique_ids_U.split(batch.unique_lengths_B.tolist())
        place_U = torch.zeros(len(batch.unique_ids_U), dtype=batch.positions_NF.dtype)
        places = place_U.split(batch.unique_lengths_B.tolist())
        for rows_R, table in zip(self.row_maps, self.tables, strict=True):
            mapped = parts[table] if rows_R is None else rows_R[parts[table]]
            # Several rows of the dataset may become one of the model: that of unknown values.
            unique, inverse = torch.unique(mapped, return_inverse=True)
            ids.append(unique)
            # Positions number the rows of all tables one after the other.
            places[table].copy_(inverse + before)
            lengths.append(len(unique))
            before += len(unique)
        feature_V = find_features_of_values(batch.multi_lengths_NM.numpy())
        is_kept_V = torch.from_numpy(np.isin(feature_V, self.multi))
        return replace(
            batch,
            unique_ids_U=torch.cat(ids),
            unique_lengths_B=torch.tensor(lengths),
            positions_NF=place_U[batch.positions_NF[:, self.single]],
            multi_positions_V=place_U[batch.multi_positions_V[is_kept_V]],
            multi_lengths_NM=batch.multi_lengths_NM[:, self.multi],
            dense_NK=batch.dense_NK[:, self.dense],
            event_positions=place_U[batch.event_positions],
        )


def knows_inputs(config: ExportedConfig, dataset: Dataset) -> bool:
    """Return whether a dataset has all inputs of a model: one from before they joined has not."""
    ours, theirs = config.features, dataset.features
    return {*ours.sparse, *ours.dense} <= {*theirs.sparse, *theirs.dense}


def find_columns(folder: Path, config: ExportedConfig, dataset: Dataset) -> ModelColumns:
    """Return where a dataset has the columns of a model in `folder`. Raises UserError: they, or
    their ids, mean something else."""
    schema = dataset.manifest.recipe.get("schema")
    theirs = parse_schema(schema) if schema is not None else None
    moments = dataset.manifest.recipe.get("moments", {})
    ours, has = config.features, dataset.features
    places = [
        [index for index, one in enumerate(columns) if one in own]
        for own, columns in (
            (getattr(ours, kind), getattr(has, kind)) for kind in ("single", "multi", "dense")
        )
    ]
    single, multi, dense = places
    kept = replace(
        has,
        tables=(),
        single=tuple(has.single[one] for one in single),
        multi=tuple(has.multi[one] for one in multi),
        dense=tuple(has.dense[one] for one in dense),
    )
    sizes, tables = {one.name: one.num_rows for one in ours.tables}, [t.name for t in has.tables]
    fits = (
        # Inputs may have joined since the model was trained.
        may_become(config.columns.schema, theirs)
        and all(tuple(moments.get(name, ())) == own for name, own in config.columns.moments.items())
        and replace(ours, tables=()) == kept
        and sizes.keys() <= {*tables}
        and (theirs is not None or [*sizes] == tables)
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
    row_maps = [
        None if is_own else _map_table_rows(folder, config, dataset, name, num_rows)
        for name, num_rows in sizes.items()
    ]
    is_all = len(kept.sparse) + len(kept.dense) == len(has.sparse) + len(has.dense)
    own_tables = [tables.index(name) for name in sizes]
    return ModelColumns(single, multi, dense, own_tables, row_maps, is_all)


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
