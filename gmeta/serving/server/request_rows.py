"""The rows of a request made of its tensors: inputs named like the model's columns are query rows;
with `support.` in front, support rows; with `events.`, events of one task. A column of one row is
the same in all rows of its side. The input `task.lengths` says how many rows each of several tasks
has; a column may then have a row for each task.

Shape suffixes: T tasks, N rows"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gmeta.serving.server.request_errors import bad_request
from gmeta.serving.server.server_limits import RequestLimits
from gmeta.serving.server.tensors import EVENTS, LENGTHS, MASK, SUPPORT, TASK_LENGTHS, Tensor
from metaio.ragged import Int64, offsets, owners

if TYPE_CHECKING:
    from gmeta.serving.server.input_columns import InputColumn, ModelColumns

_COMPANIONS = LENGTHS, MASK


@dataclass(frozen=True)
class RequestRows:
    """The rows of one side of a request, task by task."""

    table: pa.Table
    lengths_T: tuple[int, ...]  # rows of each task
    # List columns that are the same in all rows of a task: its first row has the list, the others
    # have empty ones.
    shared_lists: frozenset[str] = frozenset()

    @classmethod
    def of(cls, table: pa.Table) -> RequestRows:
        """Return the rows of one task, each with all of its values."""
        return cls(table, (table.num_rows,))


class RequestSides(NamedTuple):
    """The rows of a request; None: there are none."""

    support: RequestRows | None
    query: RequestRows | None
    events: RequestRows | None


def to_rows(
    columns: ModelColumns, tensors: Sequence[Tensor], limits: RequestLimits, shares_lists: bool
) -> RequestSides:
    """Return the rows of a request; with `shares_lists` query rows have a list that is the same in
    all of them once. Raise RequestError."""
    sides: dict[str, dict[str, Tensor]] = {SUPPORT: {}, "": {}, EVENTS: {}}
    fronts = (SUPPORT, EVENTS) if columns.events else (SUPPORT,)
    for tensor in tensors:
        front = next((one for one in fronts if tensor.name.startswith(one)), "")
        name = tensor.name.removeprefix(front)
        if name in sides[front]:
            raise bad_request(f"input {tensor.name} is there twice; once is allowed. Leave one out")
        sides[front][name] = tensor
    has_tasks = [TASK_LENGTHS in sides[front] for front in (SUPPORT, "") if sides[front]]
    if any(has_tasks) and not all(has_tasks):
        raise bad_request(
            f"one of {TASK_LENGTHS} and {SUPPORT}{TASK_LENGTHS} is missing: of several tasks each "
            "side needs the number of rows of each. Send both, or neither"
        )
    if sides[EVENTS] and (any(has_tasks) or TASK_LENGTHS in sides[EVENTS]):
        raise bad_request(
            f"inputs {EVENTS}NAME are of one task, and {TASK_LENGTHS} of several. Send a request "
            "for each task"
        )
    lists = columns.lists if shares_lists else frozenset[str]()
    found = RequestSides(
        # The inner loop reads the lists of support rows row by row.
        _to_rows(columns, columns.by_name, sides[SUPPORT], limits, frozenset()),
        _to_rows(columns, columns.by_name, sides[""], limits, lists),
        _to_rows(columns, columns.events, sides[EVENTS], limits, frozenset()),
    )
    counts = [len(side.lengths_T) for side in found[:2] if side is not None]
    if len(set(counts)) > 1:
        raise bad_request(
            f"{SUPPORT}{TASK_LENGTHS} and {TASK_LENGTHS} are of {' and '.join(map(str, counts))} "
            "tasks; both need the same. Use the length 0 for a task without support rows"
        )
    return found


def _to_rows(
    columns: ModelColumns,
    known: Mapping[str, InputColumn],
    side: Mapping[str, Tensor],
    limits: RequestLimits,
    shared: frozenset[str],
) -> RequestRows | None:
    arrays = dict[str, pa.Array]()
    for name, tensor in side.items():
        if name in known:
            lengths = side.get(name + LENGTHS) if known[name].is_list else None
            arrays[name] = _to_array(known[name], tensor, lengths)
            if name + MASK in side and name + MASK not in known:
                arrays[name] = _with_nulls(name, arrays[name], side[name + MASK])
        elif not (name == TASK_LENGTHS or _is_companion(name, known, side)):
            _check_unread(columns.ignored, known, tensor.name, name, limits)
    if not arrays:
        return None
    sizes = {name: len(array) for name, array in arrays.items()}
    lengths_T = _read_task_lengths(side, limits)
    if lengths_T is None:
        num_rows = next((size for size in sizes.values() if size != 1), 1)
        lengths_T = np.array([num_rows], np.int64)
    _check_sizes(sizes, lengths_T, TASK_LENGTHS in side)
    limits.check_rows(int(lengths_T.sum()))
    spread = _Spread(lengths_T, shared, limits)
    table = pa.table({name: spread.to_rows(known[name], array) for name, array in arrays.items()})
    return RequestRows(table, tuple(lengths_T.tolist()), frozenset(spread.shared_lists))


def _check_unread(
    ignored: frozenset[str],
    known: Mapping[str, InputColumn],
    sent_name: str,
    name: str,
    limits: RequestLimits,
) -> None:
    """Raise RequestError for an input that is no column, unless such inputs are ignored."""
    if name in ignored or limits.ignores_extra:
        return
    near = difflib.get_close_matches(name, known, n=1)
    raise bad_request(
        f"input {sent_name[:80]!r} is no column of this model; "
        f"{f'did you mean {near[0]}?' if near else 'it has ' + ', '.join(known) + '.'} "
        "Correct the name, or leave the input out"
    )


def _is_companion(name: str, known: Mapping[str, InputColumn], side: Mapping[str, Tensor]) -> bool:
    for suffix in _COMPANIONS:
        column = name.removesuffix(suffix)
        if column != name and column in side and column in known:
            return suffix == MASK or known[column].is_list
    return False


def _read_task_lengths(side: Mapping[str, Tensor], limits: RequestLimits) -> Int64 | None:
    """Return how many rows each task has, or None where the request is of one task."""
    tensor = side.get(TASK_LENGTHS)
    if tensor is None:
        return None
    values = tensor.values
    is_right = len(tensor.shape) == 1 and pa.types.is_integer(values.type)
    if not is_right or values.null_count or not len(values):
        raise bad_request(
            f"input {tensor.name} has shape {list(tensor.shape)} of {values.type}; the number of "
            "rows of each task is needed, as integers [T] of 1 task or more. Correct it"
        )
    # Each task costs something, without a row too.
    limits.check_rows(len(values))
    # As floats: the sum of integers that a stranger chose could wrap around.
    counts_T = values.to_numpy().astype(np.float64)
    if (counts_T < 0).any():
        raise bad_request(f"input {tensor.name} holds {counts_T.min():.0f}; from 0 on is allowed")
    limits.check_rows(int(counts_T.sum()))
    lengths_T: Int64 = counts_T.astype(np.int64)
    return lengths_T


def _check_sizes(sizes: Mapping[str, int], lengths_T: Int64, has_tasks: bool) -> None:
    """Raise RequestError for a column that has neither one row, nor all, nor one of each task."""
    num_rows, num_tasks = int(lengths_T.sum()), len(lengths_T)
    allowed = {1, num_rows, num_tasks}
    wrong = {name: size for name, size in sizes.items() if size not in allowed}
    if wrong:
        # The message stays one line, however many columns there are.
        sizes_text = ", ".join(f"{name} {size}" for name, size in list(sizes.items())[:6])
        of_tasks = f", or {num_tasks}, one for each task" if has_tasks else ""
        raise bad_request(
            f"inputs of one side differ in rows ({sizes_text}); each needs all {num_rows} rows, or "
            f"1 that is the same in all of them{of_tasks}. Correct {next(iter(wrong))}"
        )
    if has_tasks and num_rows == num_tasks > 1 and (lengths_T != 1).any():
        raise bad_request(
            f"{TASK_LENGTHS} has {num_tasks} tasks of {num_rows} rows, some of them without a row: "
            "a column could have one for each task or for each row. Leave out tasks without rows"
        )


class _Spread:
    """Columns of one row, or of one for each task, as columns of all rows of a side."""

    def __init__(self, lengths_T: Int64, shared: frozenset[str], limits: RequestLimits) -> None:
        self._task_N = owners(lengths_T)
        self._num_tasks = len(lengths_T)
        self._is_first_N = np.diff(self._task_N, prepend=-1) > 0
        self._shared, self._limits = shared, limits
        self._indices: dict[bool, pa.Array] = {}  # of the values of one row, or of one a task
        self._num_values = 0  # of lists and texts that were written out so far
        self.shared_lists: list[str] = []

    def to_rows(self, column: InputColumn, values: pa.Array) -> pa.Array:
        """Return the column with a value for each row. Raise RequestError: too much of it."""
        if len(values) == len(self._task_N):
            return values
        is_one = len(values) == 1  # else one for each task
        source_N = np.zeros_like(self._task_N) if is_one else self._task_N
        if column.name in self._shared:
            self.shared_lists.append(column.name)
            if is_one and self._num_tasks == 1 and column.is_list and not values.null_count:
                # The quick form of what follows: the first row's list ends where all others do.
                ends = np.full(len(source_N) + 1, len(values.flatten()))
                ends[0] = 0
                return pa.LargeListArray.from_arrays(ends, values.flatten())
            nothing = pa.array([[] if column.is_list else ""], values.type)
            values = pa.concat_arrays([values, nothing])
            source_N = np.where(self._is_first_N, source_N, len(values) - 1)
        if column.is_list or column.role == "multi":
            return self._write_out(values, source_N)
        if is_one not in self._indices:  # the same for all columns of one form
            self._indices[is_one] = pa.array(source_N.astype(np.int32))
        index = self._indices[is_one]
        if not pa.types.is_string(values.type):
            return values.take(index)
        # A text stands once, however many rows have it.
        if values.null_count:
            is_null_N = values.is_null().take(index).to_numpy(zero_copy_only=False)
            index, values = (
                pa.array(source_N.astype(np.int32), mask=is_null_N),
                values.fill_null(""),
            )
        return pa.DictionaryArray.from_arrays(index, values)

    def _write_out(self, values: pa.Array, source_N: Int64) -> pa.Array:
        is_text = pa.types.is_string(values.type)
        sizes = pc.binary_length(values) if is_text else pc.list_value_length(values)
        sizes = pc.fill_null(sizes, 0).to_numpy().astype(np.int64)
        self._num_values += int(sizes[source_N].sum())
        # The largest body could hold about as many.
        if self._num_values > self._limits.body_bytes:
            raise bad_request(
                f"columns of one row, written out for all rows, have {self._num_values} values; at "
                f"most {self._limits.body_bytes} are allowed, as --max-body. Send shorter lists, "
                "or split the request"
            )
        return values.take(pa.array(source_N))


def _with_nulls(name: str, values: pa.Array, mask: Tensor) -> pa.Array:
    """Return the values with null where the mask is false."""
    is_right = pa.types.is_boolean(mask.values.type) and not mask.values.null_count
    if not is_right or len(mask.values) != len(values):
        raise bad_request(
            f"input {mask.name} has {len(mask.values)} elements of {mask.values.type}; {name} "
            f"needs {len(values)} of BOOL, false where it is null. Correct it"
        )
    places: npt.NDArray[np.int64] = np.arange(len(values))
    return values.take(pa.array(places, mask=~mask.values.to_numpy(zero_copy_only=False)))


def _to_array(column: InputColumn, tensor: Tensor, lengths: Tensor | None) -> pa.Array:
    if not column.is_list:
        if len(tensor.shape) == 2 and tensor.shape[1] != 1:
            raise bad_request(
                f"input {tensor.name} has shape {list(tensor.shape)}; [N] and [N, 1] are allowed, "
                "since each row has one value. Correct it"
            )
        return tensor.values
    if lengths is None:
        if len(tensor.shape) == 1:
            raise bad_request(
                f"input {tensor.name} has shape {list(tensor.shape)}, but each row has a list: "
                f"send [N, M] for lists of one length, or all values in [V] and the {tensor.name}"
                f"{LENGTHS} of the lists in [N]"
            )
        # [N, M]: every list has M values.
        ends = np.arange(tensor.shape[0] + 1, dtype=np.int64) * tensor.shape[1]
        return pa.LargeListArray.from_arrays(ends, tensor.values)
    sizes = lengths.values
    if len(tensor.shape) != 1 or len(lengths.shape) != 1 or not pa.types.is_integer(sizes.type):
        raise bad_request(
            f"input {tensor.name} with {lengths.name} needs both in one dimension and the lengths "
            f"as integers; they have {list(tensor.shape)}, {list(lengths.shape)} and {sizes.type}. "
            "Correct them"
        )
    if sizes.null_count:
        raise bad_request(f"input {lengths.name} holds null; the length of each list is needed")
    # As floats: the sum of integers that a stranger chose could wrap around.
    counts = sizes.to_numpy().astype(np.float64)
    if (counts < 0).any() or counts.sum() != len(tensor.values):
        raise bad_request(
            f"input {lengths.name} adds up to {counts.sum():.0f}; {tensor.name} has "
            f"{len(tensor.values)} values, and no length may be below 0. Correct them"
        )
    return pa.LargeListArray.from_arrays(offsets(sizes.to_numpy()), tensor.values)
