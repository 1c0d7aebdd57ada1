"""The TOML description of a raw table: which column is what, and how its rows become episodes and
splits.

docs/format.md shows a whole schema. Unknown keys are refused with the nearest known one.
"""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from gmeta_keys import Wording, key, parse
from metaio.errors import SchemaError
from metaio.format.features import Features, FeatureSpec, TableSpec
from metaio.format.names import NAME_RULE, is_name


@dataclass(frozen=True)
class TaskColumn:
    """What the model adapts to: integers are kept, text is hashed to 64 bits."""

    column: str
    # Of a CSV column; absent: as its first rows look.
    type: Literal["integer", "text"] | None = None


@dataclass(frozen=True)
class LabelColumn:
    """A number or truth value. With a threshold the label is 1 where value >= threshold, else 0."""

    column: str
    threshold: float | None = None


@dataclass(frozen=True)
class TimeColumn:
    """Orders the rows of a task: integer, float, date or timestamp, or text of a `format`."""

    column: str
    # Of text, as strptime of C has it: "%d.%m.%Y %H:%M"; absent: as its first rows look.
    format: str | None = None


@dataclass(frozen=True)
class RowIdColumn:
    """Integers by which each raw row can be found again, each given once: stored beside the rows,
    never seen by a model.
    """

    column: str


@dataclass(frozen=True)
class SparseColumn:
    """Ids of one table: exactly one of `hash` (rows of the table) and `vocabulary` (least count) is
    given.

    Hashed values use rows 1 to hash - 1; a vocabulary's rows follow its sorted values. Row 0 is for
    values outside the vocabulary, and for nulls where `null` is "unknown". In [[multi]],
    `separator` splits text.
    """

    column: str
    table: str | None = None  # absent: a table of its own, named like the column
    hash: int | None = None
    vocabulary: int | None = None
    null: Literal["refuse", "unknown"] = "refuse"
    separator: str | None = None
    type: Literal["integer", "text"] | None = None

    @property
    def table_name(self) -> str:
        """Return the table that this column's ids index."""
        return self.table or self.column


@dataclass(frozen=True)
class DenseColumn:
    """A float32 input; nulls are refused unless `fill` is given. log1p, then (x - mean) / std of
    the train split.
    """

    column: str
    fill: float | None = None
    log1p: bool = False
    standardise: bool = False


@dataclass(frozen=True)
class TextRule:
    """How CSV and TSV files are written, where they are not as most are."""

    encoding: Literal["utf-8", "latin-1", "utf-16"] = "utf-8"
    null: tuple[str, ...] = ()  # words that mean a null, such as NA; an empty field always does
    comment: str = ""  # what begins a line that is left out; without it every line is a row
    max_line_bytes: int = key(2_000_000, "longer lines are refused", min=1, max=2**31 - 1)


@dataclass(frozen=True)
class EpisodeRule:
    """Which rows of a task are support and which are query.

    by "last": the last `query_rows` are the query. "ratio": the last `query_share`. Both go by
    [time], or by a seeded shuffle without it. "random": as "last" or "ratio", but shuffled even if
    there is a time. "time": rows from `at` on are the query.
    """

    by: Literal["last", "ratio", "random", "time"] = "last"
    query_rows: int | None = None
    query_share: float | None = None
    # In units of the time column, or an ISO date for dates and timestamps.
    at: float | str | None = None
    min_rows: int = 2  # smaller tasks are dropped and counted
    max_rows: int = 4_096  # of an episode
    longer: Literal["episodes", "truncate", "refuse"] = "episodes"  # truncate keeps the last rows


@dataclass(frozen=True)
class SplitRule:
    """Which split a row belongs to: a raw column says so, or the hash of its task falls into
    `shares`.

    Vocabularies, means and deviations are taken from the split `train` alone.
    """

    column: str | None = None
    shares: dict[str, float] | None = None
    train: str = "train"


@dataclass(frozen=True)
class Schema:
    """A whole description."""

    task: TaskColumn
    label: LabelColumn
    time: TimeColumn | None = None
    row_id: RowIdColumn | None = None
    single: tuple[SparseColumn, ...] = ()
    multi: tuple[SparseColumn, ...] = ()
    dense: tuple[DenseColumn, ...] = ()
    text: TextRule | None = None
    episodes: EpisodeRule = EpisodeRule()
    splits: SplitRule = SplitRule()
    seed: int = key(0, "decides shuffles and shares", max=2**64 - 1)

    @property
    def sparse(self) -> tuple[SparseColumn, ...]:
        """Return the single columns, then the multi ones."""
        return self.single + self.multi

    @property
    def columns(self) -> list[str]:
        """Return every raw column that is read, each once."""
        names = [self.task.column, self.label.column]
        names += [part.column for part in (self.time, self.row_id) if part is not None]
        names += [part.column for part in self.sparse]
        names += [part.column for part in self.dense]
        names += [self.splits.column] if self.splits.column else []
        return list(dict.fromkeys(names))

    def to_json(self) -> dict[str, Any]:
        """Return plain values for the manifest."""
        return _plain(self)  # type: ignore[no-any-return]


def load_schema(path: str | Path) -> Schema:
    """Read and check a schema file.

    Raises:
        SchemaError: it is missing, not TOML, has an unknown key or a value that makes no sense.
    """
    try:
        body = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SchemaError(
            f"schema {path} cannot be read: {error.strerror}. Check the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"schema {path} is not TOML: {error}. Correct that line") from error
    return parse_schema(body)


def parse_schema(body: dict[str, Any]) -> Schema:
    """Return a checked schema from the tables of a TOML file, or of a manifest's JSON.

    Raises:
        SchemaError: a key is unknown or missing, or a value makes no sense.
    """
    schema = parse(Schema, body, WORDING)
    _check(schema)
    return schema


def features_of(schema: Schema, vocabulary_sizes: dict[str, int]) -> Features:
    """Return the prepared columns; a vocabulary table has one row more than values."""
    tables: dict[str, int] = {}
    for column in schema.sparse:
        rows = column.hash if column.hash is not None else vocabulary_sizes[column.table_name] + 1
        tables.setdefault(column.table_name, rows)
    return Features(
        tables=tuple(TableSpec(name, rows) for name, rows in tables.items()),
        single=tuple(FeatureSpec(column.column, column.table_name) for column in schema.single),
        multi=tuple(FeatureSpec(column.column, column.table_name) for column in schema.multi),
        dense=tuple(column.column for column in schema.dense),
        row_id=schema.row_id.column if schema.row_id else "",
    )


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {
            f.name: _plain(getattr(value, f.name))
            for f in fields(value)
            if getattr(value, f.name) is not None
        }
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value


def _wrong_type(key: str, hint: Any, value: object) -> str:
    options = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    names = " or ".join(_kind_name(option) for option in options if option is not NoneType)
    return f"schema key {key} is {value!r}; it must be {names}. Correct it"


def _kind_name(option: Any) -> str:
    origin = get_origin(option)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in get_args(option))
    names = {
        str: "text", int: "a whole number", float: "a number", bool: "true or false",
        tuple: "a list of tables", dict: "a table of numbers",
    }  # fmt: skip
    return names.get(origin or option, "a table")


WORDING = Wording(SchemaError, "schema key ", known="allowed", wrong_type=_wrong_type)


def _check(schema: Schema) -> None:
    """Raise SchemaError for what types alone cannot say."""
    if not schema.sparse and not schema.dense:
        raise SchemaError(
            "the schema has no [[single]], [[multi]] or [[dense]] column. Add at least one"
        )
    by_table: dict[str, tuple[int | None, int | None]] = {}
    for column in schema.sparse:
        how = (column.hash, column.vocabulary)
        if (column.hash is None) == (column.vocabulary is None):
            raise SchemaError(
                f"column {column.column} needs either hash (rows of its table) or vocabulary "
                "(least count). Give exactly one"
            )
        if column.hash is not None and not 2 <= column.hash <= 1 << 40:
            raise SchemaError(
                f"column {column.column} has hash {column.hash}; 2 to 2^40 rows are allowed. "
                "Change it"
            )
        if column.vocabulary is not None and not 1 <= column.vocabulary <= 1 << 40:
            raise SchemaError(
                f"column {column.column} has vocabulary {column.vocabulary}; a value must be seen "
                "1 to 2^40 times to get a row. Change it"
            )
        if column.vocabulary is not None and not is_name(column.table_name):
            raise SchemaError(
                f"table {column.table_name!r} has a vocabulary, which becomes a file of that name; "
                f"allowed are {NAME_RULE}. Give the column another table"
            )
        # One table has one way from values to rows, or equal values would meet in different rows.
        if by_table.setdefault(column.table_name, how) != how:
            raise SchemaError(
                f"column {column.column} and another column of table {column.table_name} differ "
                "in hash or vocabulary. Columns that share a table must agree"
            )
    label = schema.label.column
    for columns in (schema.single, schema.multi, schema.dense):
        names = [column.column for column in columns]
        for name in names:
            if names.count(name) > 1:
                raise SchemaError(f"column {name} is listed twice in one kind. Remove one of them")
        if label in names:
            raise SchemaError(
                f"column {label} is the label and a feature: the model would be told the answer. "
                "Remove the feature"
            )
    roles = {
        "task": schema.task,
        "time": schema.time,
        "row_id": schema.row_id,
        "splits": schema.splits,
    }
    for role, part in roles.items():
        if part is not None and part.column == label:
            raise SchemaError(
                f"column {label} is the label and the column of [{role}]: rows would be dealt by "
                "the answer. Name another column"
            )
    for column in schema.multi:
        if column.separator == "":
            raise SchemaError(
                f'column {column.column} has separator ""; a list is split at a text of one '
                "character or more. Change it"
            )
    if not 0 <= schema.seed < 1 << 64:
        raise SchemaError(f"seed is {schema.seed}; 0 to 2^64 - 1 is allowed. Change it")
    _check_episodes(schema)
    _check_splits(schema.splits)


def _check_episodes(schema: Schema) -> None:
    rule = schema.episodes
    if rule.by == "time":
        if rule.at is None or schema.time is None:
            raise SchemaError(
                "episodes.by is time, which needs episodes.at and a [time] column. Add both"
            )
    elif (rule.query_rows is None) == (rule.query_share is None):
        raise SchemaError(
            f"episodes.by is {rule.by}, which needs query_rows or query_share. Give exactly one "
            "of them"
        )
    if rule.by == "last" and rule.query_rows is None:
        raise SchemaError(
            "episodes.by is last, which needs query_rows. Add it, or use by = 'ratio'"
        )
    if rule.by == "ratio" and rule.query_share is None:
        raise SchemaError(
            "episodes.by is ratio, which needs query_share. Add it, or use by = 'last'"
        )
    # Beside the query rows at least one support row must be left.
    least = 1 + (rule.query_rows or 1)
    if rule.query_rows is not None and rule.query_rows < 1:
        raise SchemaError(
            f"episodes.query_rows is {rule.query_rows}; at least 1 is needed. Raise it"
        )
    if not least <= rule.min_rows <= rule.max_rows:
        raise SchemaError(
            f"episodes.min_rows is {rule.min_rows} and max_rows is {rule.max_rows}; {least} <= "
            "min_rows <= "
            "max_rows is needed, so that each episode has support and query rows. Change them"
        )
    if rule.query_share is not None and not 0 < rule.query_share < 1:
        raise SchemaError(
            f"episodes.query_share is {rule.query_share}; it must lie between 0 and 1. Change it"
        )


def _check_splits(rule: SplitRule) -> None:
    if rule.column is not None and rule.shares is not None:
        raise SchemaError("splits has both column and shares. Give one of them")
    if rule.shares is not None:
        total = sum(rule.shares.values())
        # Tenths do not add up to exactly 1 in binary.
        if abs(total - 1) > 1e-9 or min(rule.shares.values()) <= 0:
            raise SchemaError(
                f"splits.shares add up to {total:g}; positive shares with sum 1 are needed. "
                "Change them"
            )
        if rule.train not in rule.shares:
            raise SchemaError(
                f"splits.train is {rule.train}, which is not among the shares "
                f"{', '.join(rule.shares)}. Add it"
            )
