"""The given side of a row (support or query), by a column or by the name of its file."""

from fnmatch import fnmatch

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import DataError
from metaio.prepare.schema.rules import MembershipRule

# UNDECIDED leaves a row to [episodes]; EVENT_ONLY rows are in no episode, but later rows know them.
SUPPORT, QUERY, UNDECIDED, EVENT_ONLY = 0, 1, 2, 3
_SIDE_WORDS = ("support", "query", "0", "1", "false", "true")  # in turn
# The column of a batch that holds the side of its file.
SIDE_OF_FILE = "side of the file"


def find_file_side(rule: MembershipRule | None, name: str) -> str | None:
    """Return the side of a file's rows; None where names do not decide."""
    if rule is None or not rule.by_files:
        return None
    patterns = {"support": rule.support or "", "query": rule.query or ""}
    sides = [side for side, one in patterns.items() if fnmatch(name.rsplit("/", 1)[-1], one)]
    if len(sides) != 1:
        raise DataError(
            f"input {name} matches {'both' if sides else 'neither'} of the patterns "
            f"{patterns['support']!r} (support) and {patterns['query']!r} (query); one of them is "
            "needed. Correct [membership], or leave the file out"
        )
    return sides[0]


def with_side(batch: pa.RecordBatch, side: str | None) -> pa.RecordBatch:
    """Return the rows with the side of their file as a column, if it has one."""
    if side is None:
        return batch
    return batch.append_column(SIDE_OF_FILE, pa.repeat(side, batch.num_rows))


def read_sides(name: str, column: pa.Array) -> npt.NDArray[np.int8]:
    """Return the side of each row [N] from a column of "support" and "query", or 0 and 1, and
    nulls."""
    # A file whose column is null in all rows has the type null.
    if pa.types.is_null(column.type):
        return np.full(len(column), UNDECIDED, np.int8)
    words = column.cast(pa.string()) if not pa.types.is_string(column.type) else column
    known = pc.index_in(words, value_set=pa.array(_SIDE_WORDS))
    wrong = pc.and_(pc.is_null(known), pc.is_valid(words))
    if pc.any(wrong).as_py():
        raise DataError(
            f"membership column {name} holds {words.filter(wrong)[0].as_py()!r}; support and "
            "query, or 0 and 1, and null are allowed. Correct those rows"
        )
    place_N = np.asarray(pc.fill_null(known, -1)).astype(np.int8)
    return np.where(place_N < 0, np.int8(UNDECIDED), place_N % 2)
