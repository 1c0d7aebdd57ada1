"""Labels and weights of raw rows, as their columns and masks give them.

Shape suffix: N rows"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from metaio.errors import DataError
from metaio.prepare.schema.schema import LabelColumn, Schema
from metaio.prepare.schema.values import to_float32, to_float64
from metaio.quantities import format_count


def read_labels(schema: Schema, batch: pa.RecordBatch) -> npt.NDArray[np.float32]:
    """Return the labels of raw rows, [N] of one, [N, labels] of several; NaN: not known."""
    columns = [_read_label(rule, batch) for rule in schema.labels]
    return columns[0] if len(columns) == 1 else np.stack(columns, axis=1)


def read_weights(schema: Schema, batch: pa.RecordBatch) -> npt.NDArray[np.float32]:
    """Return the weights of raw rows, [N, 1] or [N, 0]; raise DataError for one below 0."""
    if schema.weight is None:
        return np.zeros((batch.num_rows, 0), np.float32)
    name = schema.weight.column
    weight_N = to_float32(name, to_float64(name, batch[name], "weight"), "weight")
    if (weight_N < 0).any():
        raise DataError(
            f"weight column {name} holds {weight_N[weight_N < 0][0]:g}; numbers from 0 on are "
            "needed. Replace those values"
        )
    return weight_N[:, None]


def _read_label(rule: LabelColumn, batch: pa.RecordBatch) -> npt.NDArray[np.float32]:
    column = batch[rule.column]
    known_N = np.ones(len(column), np.bool_)
    if rule.mask is not None:
        mask_N = to_float64(rule.mask, batch[rule.mask], "mask")
        known_N = mask_N == 1
        wrong_N = mask_N[~known_N & (mask_N != 0)]
        if wrong_N.size:
            raise DataError(
                f"mask column {rule.mask} of label {rule.column} holds {wrong_N[0]:g}; 1 where the "
                "label is known and 0 where not are allowed. Replace those values"
            )
    if rule.null == "unknown":
        known_N &= column.is_valid().to_numpy(zero_copy_only=False)
    if not known_N.all():
        # Taken out first: where a label is not known its value may be anything, even null.
        column = column.filter(pa.array(known_N))
    if column.null_count:
        raise DataError(
            f"label column {rule.column} has {format_count(column.null_count, 'null')} in rows "
            f'whose mask {rule.mask} is 1. Correct the mask, or add null = "unknown"'
        )
    numbers = to_float64(rule.column, column, "label")
    # Checked before the threshold, which would turn NaN into a label of 0.
    found_N = to_float32(rule.column, numbers, "label")
    if rule.threshold is not None:
        found_N = (numbers >= rule.threshold).astype(np.float32)
    if known_N.all():
        return found_N
    label_N = np.full(len(known_N), np.nan, np.float32)
    label_N[known_N] = found_N
    return label_N
