"""A first schema from a log's first rows: what its columns look like, as TOML to read and correct.

Nothing is prepared by a guess: the file says of every column why it is there, and a person decides.
"""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import DataError
from metaio.prepare.inputs import Inputs, expand
from metaio.prepare.text_faults import shortened

SAMPLED_ROWS = 50_000
# A vocabulary is kept in memory and copied into every export; beyond it ids are hashed.
MOST_DISTINCT_SHARE = 0.5
HASHED_ROWS = 1_000_000
FEWEST_IDS_APART = 0.3  # of the rows of a text column hold a separator: a list
# What splits a list, and how many parts there may be for each text: words of titles are not one.
SEPARATORS = {"|": 1.0, ";": 1.0, ",": 0.5, " ": 0.5}
LABELS = (
    r"click(ed|s)?|label|rating|stars|score|target|y|convert(ed)?|conversion|is_click|purchased?"
    r"|bought"
)
TASKS = r"user(_?id)?|uid|customer(_?id)?|member(_?id)?|visitor(_?id)?|advertiser(_?id)?|account"
TIMES = r"time(_?stamp)?|ts|date(_?time)?|event_time|unix_?time|created_?at|when"

Role = Literal["task", "label", "time", "single", "multi", "dense", "vector", "left out"]


@dataclass(frozen=True)
class Column:
    """What the first rows of a column look like."""

    name: str
    type: pa.DataType
    num_null: int
    num_distinct: int
    least: Any
    most: Any
    separator: str  # "" where its values are no lists in a text
    width: int = 0  # of lists that are all as long; 0 where they are not

    @property
    def is_list(self) -> bool:
        """Tell whether a value holds several."""
        return bool(self.separator) or _is_list(self.type)

    @property
    def is_number(self) -> bool:
        """Tell whether values are numbers or truth values."""
        types = pa.types
        kinds = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
        return any(bool(is_kind(self.type)) for is_kind in kinds)

    @property
    def is_time(self) -> bool:
        """Tell whether values are dates or times."""
        return bool(pa.types.is_temporal(self.type))


@dataclass(frozen=True)
class Guess:
    """What each column is for; `num_rows` were looked at."""

    columns: tuple[Column, ...]
    roles: dict[str, Role]
    num_rows: int
    mean_label: float

    def of(self, role: Role) -> list[Column]:
        """Return the columns of a role, in their order."""
        return [column for column in self.columns if self.roles[column.name] == role]

    @property
    def is_rating(self) -> bool:
        """Tell whether the label has more than two values."""
        (label,) = self.of("label")
        return label.num_distinct > 2 or not {label.least, label.most} <= {0, 1}


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind))


def first_rows(urls: list[str]) -> pa.Table:
    """Return the first rows of a log: files, globs or folders of CSV, JSON lines or Parquet.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="metaio-") as folder:
        files = expand(urls, Path(folder))
        with duckdb.connect() as connection:
            for fs in files.file_systems:
                connection.register_filesystem(fs)
            connection.execute("SET TimeZone = 'UTC'")
            try:
                found = connection.sql(f"FROM {_scan(files)} LIMIT {SAMPLED_ROWS}").to_arrow_table()
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                raise DataError(
                    f"input {files.names[0]} cannot be read: {shortened(str(error))}. "
                    "Write a schema by hand (docs/format.md)"
                ) from error
    if not found.num_rows:
        raise DataError(f"input {files.names[0]} has 0 rows. Give a log with some")
    return found


def _scan(files: Inputs) -> str:
    first = "'" + files.names[0].replace("'", "''") + "'"
    if files.kind == "Parquet":
        return f"read_parquet({first})"
    if files.kind == "JSON":
        return f"read_json({first}, format = 'newline_delimited')"
    return f"read_csv({first})"


def guess(rows: pa.Table, given: dict[Role, str]) -> Guess:
    """Return what each column is for; `given` names the task, label or time where it is known.

    Raises:
        DataError: no column looks like the task or the label, or a given one is not there.
    """
    columns = tuple(_described(name, rows[name]) for name in rows.column_names)
    names = [column.name for column in columns]
    for role, name in given.items():
        if name not in names:
            raise DataError(
                f"there is no column {name!r} for the {role}: the log has {', '.join(names)}. "
                "Name one of them"
            )
    roles: dict[str, Role] = {name: role for role, name in given.items()}
    for column in columns:
        if roles.get(column.name) == "label" and not column.is_number:
            raise DataError(
                f"column {column.name!r} is {column.type}: a label is a number or a truth value. "
                "Name another column, or write numbers"
            )
    wanted: tuple[tuple[Role, str], ...] = (("label", LABELS), ("task", TASKS), ("time", TIMES))
    for role, pattern in wanted:
        if role in given:
            continue
        fits = [c for c in columns if c.name not in roles and _fits(c, role, pattern)]
        if fits:
            roles[fits[0].name] = role
        elif role != "time":
            raise DataError(
                f"no column of {', '.join(names)} looks like the {role}. Name it with --{role}"
            )
    for column in columns:
        roles.setdefault(column.name, _feature_role(column, rows.num_rows))
    (label,) = (name for name, role in roles.items() if role == "label")
    mean = pc.mean(pc.cast(rows[label], pa.float64())).as_py()
    found = Guess(columns, roles, rows.num_rows, round(mean or 0.0, 2))
    if not (found.of("single") or found.of("multi")):
        raise DataError(
            "no column is left that holds ids: a model needs at least one. Write a schema by hand "
            "(docs/format.md)"
        )
    return found


def _described(name: str, values: pa.ChunkedArray) -> Column:
    kind = values.type
    separator = _separator(values) if pa.types.is_string(kind) else ""
    split = pc.split_pattern(values, separator) if separator else values
    flat = pc.list_flatten(split) if _is_list(split.type) else split
    lengths = pc.unique(pc.list_value_length(values).drop_null()) if _is_list(kind) else []
    comparable = not pa.types.is_nested(flat.type)
    span = pc.min_max(flat).as_py() if comparable else {"min": None, "max": None}
    return Column(
        name,
        kind,
        values.null_count,
        pc.count_distinct(flat).as_py() if comparable else 0,
        span["min"],
        span["max"],
        separator,
        lengths[0].as_py() if len(lengths) == 1 else 0,
    )


def _separator(values: pa.ChunkedArray) -> str:
    """Return what splits a text column's values, as far as they are lists: the same short parts
    come again in other company."""
    for mark, most_parts in SEPARATORS.items():
        holding = pc.sum(pc.match_substring(values, mark)).as_py() or 0
        if holding < FEWEST_IDS_APART * len(values):
            continue
        parts = pc.list_flatten(pc.split_pattern(values.drop_null(), mark))
        if pc.count_distinct(parts).as_py() < most_parts * pc.count_distinct(values).as_py():
            return mark
    return ""


def _fits(column: Column, role: Role, pattern: str) -> bool:
    # "Customer ID" is named as "customer_id" is, and "Clicked?" as "clicked".
    name = re.sub(r"\W+", "_", column.name.strip()).strip("_")
    if not re.fullmatch(pattern, name, re.IGNORECASE):
        return role == "time" and column.is_time
    if role == "label":
        return column.is_number
    return not column.is_list and (role == "task" or column.is_number or column.is_time)


def _feature_role(column: Column, num_rows: int) -> Role:
    if column.num_distinct < 2 or column.is_time or pa.types.is_struct(column.type):
        return "left out"
    if _is_list(column.type) and pa.types.is_floating(column.type.value_type):
        return "vector" if column.width else "left out"  # numbers are no ids
    if column.is_list:
        return "multi"
    if pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
        return "dense"
    if pa.types.is_string(column.type) and column.num_distinct == num_rows - column.num_null:
        return "left out"  # a text of its own in every row says nothing of another row
    return "single"


def schema_toml(found: Guess, urls: Sequence[str]) -> str:
    """Return the schema as commented TOML."""
    lines = [
        f"# From the first {found.num_rows:,} rows of {' '.join(urls)}: a guess at what each",
        "# column is for. Read it, correct it, then prepare. docs/format.md has every key.",
    ]
    (task,), (label,) = found.of("task"), found.of("label")
    lines += ["", f"[task]  # what the model adapts to; {_told(task)}", _column(task)]
    lines += ["", f"[label]  # {_told(label)}", _column(label)]
    if found.is_rating:
        lines.append("# threshold = 4  # to learn whether a rating is at least that")
    for time in found.of("time"):
        lines += ["", f"[time]  # orders a task's rows; {_told(time)}", _column(time)]
    for column in (*found.of("single"), *found.of("multi")):
        lines += ["", f"[[{found.roles[column.name]}]]  # {_told(column)}", _column(column)]
        if column.num_distinct > MOST_DISTINCT_SHARE * found.num_rows:
            lines.append(f"hash = {HASHED_ROWS}  # most rows have an id of their own")
        else:
            lines.append("vocabulary = 2  # ids seen less often share row 0")
        if column.separator:
            lines.append(f"separator = {_quoted(column.separator)}")
        if column.num_null:
            lines.append('null = "unknown"')
    for column in found.of("dense"):
        lines += ["", f"[[dense]]  # {_told(column)}", _column(column)]
        if column.num_null:
            lines.append("fill = 0.0  # for nulls")
        if column.least >= 0 and column.most > 1000:
            lines.append("log1p = true")
        lines.append("standardise = true")
    for column in found.of("vector"):
        lines += ["", f"[[vector]]  # {_told(column)}", _column(column), f"width = {column.width}"]
        if column.num_null:
            lines.append("fill = 0.0  # for nulls")
    left_out = found.of("left out")
    if left_out:
        lines += ["", "# Left out:"]
        lines += [f"#   {column.name}: {_told(column)}" for column in left_out]
    lines += [
        "",
        "[episodes]  # the newest rows of a task are the query, those before them the support",
        "query_rows = 10",
        "min_rows = 13  # smaller tasks are dropped, and counted",
        "max_rows = 200",
        "",
        "[splits]  # of tasks, by their hash: those of user-cold are never trained",
        "shares = { train = 0.8, valid = 0.1, user-cold = 0.1 }",
    ]
    return "\n".join(lines) + "\n"


def _told(column: Column) -> str:
    kind = f"text split at {column.separator!r}" if column.separator else str(column.type)
    nulls = f", {column.num_null:,} null" if column.num_null else ""
    plain = isinstance(column.least, int | float) and not isinstance(column.least, bool)
    span = f", {column.least:,} to {column.most:,}" if plain and not column.is_list else ""
    return f"{kind}, {column.num_distinct:,} distinct{span}{nulls}"


def _column(column: Column) -> str:
    return f"column = {_quoted(column.name)}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
