"""Dense, vector and multi-hot columns as numbers and lists, before anything is learnt from them."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import DataError
from metaio.prepare.schema.schema import DenseColumn, IdColumn, VectorColumn
from metaio.prepare.schema.values import infer_kind, to_float32, to_float64
from metaio.quantities import format_count


def read_dense(rule: DenseColumn, column: pa.Array) -> npt.NDArray[np.float64]:
    """Return the numbers before standardising; raise DataError for infinite or NaN ones."""
    numbers = to_float64(rule.column, column, "dense")
    if rule.log1p:
        if (numbers <= -1).any():
            raise DataError(
                f"dense column {rule.column} holds {numbers.min():g}; log1p needs values above -1. "
                "Clip the column, or leave out log1p"
            )
        numbers = np.log1p(numbers)
    if not np.isfinite(numbers).all():
        raise DataError(
            f"dense column {rule.column} holds {numbers[~np.isfinite(numbers)][0]}; finite "
            "numbers are needed. Replace those values, or make them null and give fill"
        )
    return numbers


def read_vectors(rule: VectorColumn, column: pa.Array) -> npt.NDArray[np.float32]:
    """Return the vectors of all rows, [N, width]; null rows are filled with `fill`."""
    name, width = rule.column, rule.width
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        column = column.cast(pa.list_(kind.value_type))
    elif not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        raise DataError(
            f"vector column {name} has type {kind}; lists of {width} numbers are needed. Cast it, "
            "or choose another column"
        )
    known = column.drop_null()
    lengths_N = pc.list_value_length(known).to_numpy()
    if (wrong_N := lengths_N != width).any():
        raise DataError(
            f"vector column {name} holds {format_count(int(lengths_N[wrong_N][0]), 'number')} in a "
            f"row, and its width is {width}. Replace those values, or correct width in the schema"
        )
    numbers = known.flatten()
    if numbers.null_count:
        raise DataError(
            f"vector column {name} holds a null among the numbers of a row; {width} numbers are "
            "needed. Replace those values, or make the whole row's vector null and give fill"
        )
    # A column of nulls alone has lists of nulls, which are no numbers.
    if not len(known):
        numbers = numbers.cast(pa.float32())
    found_V = to_float32(name, to_float64(name, numbers, "vector"), "vector")
    if not column.null_count:
        return found_V.reshape(-1, width)
    vectors = np.full((len(column), width), rule.fill, np.float32)
    vectors[column.is_valid().to_numpy(zero_copy_only=False)] = found_V.reshape(-1, width)
    return vectors


def read_lists(rule: IdColumn, column: pa.Array) -> pa.Array:
    """Return a multi-hot column as a list array: its lists, or its text split at the separator."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return column
    if rule.separator is None:
        raise DataError(
            f"multi column {rule.column} has type {column.type}; a list is needed, or text with a "
            "separator. Give separator in the schema"
        )
    if infer_kind(rule.column, column.type, "multi") != "text":
        raise DataError(
            f"multi column {rule.column} has type {column.type}; a list is needed, or text to be "
            f"split at {rule.separator!r}. Cast it to text"
        )
    text = pc.fill_null(column.cast(pa.string()), "")
    # Splitting "" gives [""], a list of one empty id, where none is meant.
    text = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
    return pc.split_pattern(text, pattern=rule.separator)
