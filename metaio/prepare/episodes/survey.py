"""Surveys raw rows: how many each split has, and what vocabularies and means are fitted to."""

# Surveys of parts add up to the survey of all rows, so any engine may split the work.
import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import DataError
from metaio.prepare.episodes.encode import FittedEncoding, hash_tasks
from metaio.prepare.episodes.ordered_map import should_merge
from metaio.prepare.episodes.splits import Splits, assign_splits, count_split_rows
from metaio.prepare.schema.raw_columns import read_dense, read_lists
from metaio.prepare.schema.schema import IdColumn, Schema
from metaio.prepare.schema.values import Kind, infer_kind, to_int64
from metaio.ragged import Int64

# Rounding alone gives a constant column a deviation of up to this share of its mean.
_NOISE = 1e-10

# Of a dense column: count, mean, and sum of squared deviations from it.
Moments = tuple[int, float, float]


@dataclass
class Survey:
    """Counts of the rows seen so far."""

    num_rows: int = 0
    # Rows of each split's buckets; a row may be in several.
    rows_of_split: Counter[str] = field(default_factory=Counter)
    events_of_split: Counter[str] = field(default_factory=Counter)  # of [events] files
    counts: dict[str, list[pa.Table]] = field(default_factory=dict)  # table -> (value, count)
    moments: dict[str, Moments] = field(default_factory=dict)
    # Raw ids that the dataset knows by a number alone: "task" or "item" -> (value, count).
    raw_ids: dict[str, list[pa.Table]] = field(default_factory=dict)

    def add(self, other: "Survey") -> None:
        """Add the counts of other rows."""
        self.num_rows += other.num_rows
        self.rows_of_split.update(other.rows_of_split)
        self.events_of_split.update(other.events_of_split)
        for ours, theirs in ((self.counts, other.counts), (self.raw_ids, other.raw_ids)):
            for name, parts in theirs.items():
                own = ours.setdefault(name, [])
                own.extend(parts)
                if should_merge([len(part) for part in own]):
                    ours[name] = [merge_counts(own)]
        add_moments(self.moments, other.moments)


def list_survey_columns(schema: Schema) -> list[str]:
    """Return the raw columns that a survey reads."""
    # Every column costs time, as a survey reads all rows.
    names = [schema.task.column]
    names += [schema.splits.column] if schema.splits.column else []
    names += [schema.time.column] if schema.time and schema.splits.by_time else []
    names += [schema.item.column] if schema.item and schema.splits.validation_items else []
    names += [column.column for column in schema.sparse if column.vocabulary is not None]
    names += [column.column for column in schema.dense if column.standardise]
    names += find_raw_id_columns(schema).values()
    return list(dict.fromkeys(names))


def survey_batch(schema: Schema, batch: pa.RecordBatch, splits: Splits) -> Survey:
    """Return the survey of one batch; its task and split columns must have no nulls."""
    task_hash, _ = hash_tasks(schema, batch)
    split_N = assign_splits(schema, splits, batch, task_hash)
    found = Survey(batch.num_rows, count_split_rows(splits, split_N))
    # Fitted to training rows alone, or evaluation would leak.
    train = batch.filter(pa.array(split_N == splits.names.index(schema.splits.train)))
    for column in schema.sparse:
        if column.vocabulary is None:
            continue
        values, _ = list_values(schema, column, train)
        found.counts.setdefault(column.table_name, []).append(_count_values(values))
    for role, name in find_raw_id_columns(schema).items():
        kind = infer_kind(name, batch[name].type, role)
        if kind == "text" or role != "task":  # an integer task is stored as it is
            values = batch[name].drop_null()
            found.raw_ids[role] = [_count_values(_unify_type(values, kind))]
    found.moments = measure_moments(schema, train)
    return found


def list_values(schema: Schema, column: IdColumn, train: pa.RecordBatch) -> tuple[pa.Array, Int64]:
    """Return a column's values, or those in its lists, without nulls, and the row of each."""
    values, rows_V = train[column.column], np.arange(train.num_rows)
    if column in schema.multi:
        lists = read_lists(column, values)
        rows_V = np.repeat(rows_V, pc.fill_null(pc.list_value_length(lists), 0).to_numpy())
        values = lists.flatten()
    if values.null_count:
        rows_V = rows_V[values.is_valid().to_numpy(zero_copy_only=False)]
        values = values.drop_null()
    return _unify_type(values, infer_kind(column.column, values.type, "sparse")), rows_V


def _unify_type(values: pa.Array, kind: Kind) -> pa.Array:
    """Return values as int64 or string."""
    # Counts of int32 and int64 batches must merge.
    return values.cast(pa.string()) if kind == "text" else pa.array(to_int64(values))


def _count_values(values: pa.Array) -> pa.Table:
    """Return the distinct values and their counts."""
    counted = pc.value_counts(values)
    return pa.table({"value": counted.field(0), "count": counted.field(1)})


def measure_moments(schema: Schema, train: pa.RecordBatch) -> dict[str, Moments]:
    """Return the moments of each column that is standardised."""
    found = {}
    for dense in schema.dense:
        if dense.standardise:
            # Of known values: what fills a null is no measurement.
            numbers = read_dense(dense, train[dense.column].drop_null())
            mean = float(numbers.mean()) if len(numbers) else 0.0
            squares = float(np.square(numbers - mean).sum())
            found[dense.column] = (len(numbers), mean, squares)
    return found


def find_raw_id_columns(schema: Schema) -> dict[str, str]:
    """Return the columns whose raw values are kept: the task's, and a hashed item's."""
    found, rule = {"task": schema.task.column}, schema.item_rule
    hashed = [column.column for column in schema.single if column.hash is not None]
    if rule is not None and rule.column in hashed:
        found["item"] = rule.column
    return found


def add_moments(ours: dict[str, Moments], theirs: dict[str, Moments]) -> None:
    """Add the moments of other rows to ours (Chan, Golub, LeVeque, 1979, equation 2.1)."""
    # Not sums of squares: far from 0, as time stamps are, these leave no digit for a deviation.
    for column, (num_rows, mean, squares) in theirs.items():
        n, own_mean, own_squares = ours.get(column, (0, 0.0, 0.0))
        count, mean_gap = n + num_rows, mean - own_mean
        share = num_rows / max(count, 1)
        squares = own_squares + squares + mean_gap * mean_gap * n * share
        ours[column] = count, own_mean + mean_gap * share, squares


def merge_counts(parts: list[pa.Table]) -> pa.Table:
    """Return the counts of each value of all parts; raise DataError if Arrow cannot hold them."""
    types = {part.schema.field("value").type for part in parts}
    if len(types) > 1:
        # Columns of integers and of text may share a table: text can hold both.
        parts = [part.set_column(0, "value", part["value"].cast(pa.string())) for part in parts]
    try:
        found = pa.concat_tables(parts).group_by("value").aggregate([("count", "sum")])
        counted = pa.table({"value": found["value"], "count": found["count_sum"]})
        counted.validate(full=True)  # Arrow counts their bytes by 32 bits, beyond which it is wrong
    except (pa.ArrowInvalid, pa.ArrowCapacityError) as error:
        raise DataError(
            "the distinct texts of a column of ids, or of the task, take more than 2 GiB. Write "
            "them as integers, such as a hash of 63 bits"
        ) from error
    return counted


def fit_encoding(schema: Schema, survey: Survey, splits: Splits) -> FittedEncoding:
    """Return vocabularies in the order of their values, and the moments of dense columns."""
    if not survey.rows_of_split[schema.splits.train]:
        raise DataError(
            f"the train split {schema.splits.train} has no rows; the splits found are "
            f"{', '.join(splits.names)}. Set splits.train to one of them"
        )
    least = {c.table_name: c.vocabulary for c in schema.sparse if c.vocabulary is not None}
    vocabularies = {}
    for table, count in least.items():
        counted = merge_counts(survey.counts[table])
        # Sorted by value: an id's row must not depend on the order of batches.
        kept = counted.filter(pc.greater_equal(counted["count"], count))["value"].combine_chunks()
        vocabularies[table] = kept.take(pc.sort_indices(kept))
    # Columns of one table were counted together, so it learns from all of them.
    moments = {name: compute_mean_and_deviation(*known) for name, known in survey.moments.items()}
    return FittedEncoding(vocabularies, moments, splits)


def compute_mean_and_deviation(count: int, mean: float, squares: float) -> tuple[float, float]:
    """Return mean and deviation, rounded; a deviation of 1 for a constant."""
    deviation = math.sqrt(squares / max(count, 1))
    if deviation <= _NOISE * abs(mean):
        return mean, 1.0  # a constant
    # The last bits depend on the order of adding, six digits do not, so engines agree. The mean has
    # more digits if it is larger: the deviation distinguishes values.
    larger = math.log10(abs(mean) / deviation) if mean else 0.0
    digits = 6 + max(0, math.ceil(larger))
    return float(f"{mean:.{digits}g}"), float(f"{deviation:.6g}")
