"""The TOML description of a raw table: which column is what, and how its rows become episodes and
splits.

docs/format.md shows a whole schema. Unknown keys are refused with the nearest known one.
"""

import tomllib
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from gmeta_keys import Wording, key, parse
from metaio.errors import SchemaError
from metaio.format.features import (
    MAX_TABLE_WIDTH,
    Features,
    FeatureSpec,
    TableSpec,
    component,
    vector_of,
)
from metaio.format.names import NAME_RULE, is_name
from metaio.prepare.rules import (
    EpisodeRule,
    ItemRule,
    MembershipRule,
    NegativesRule,
    RowIdColumn,
    SplitRule,
    StreamRule,
    TransformRule,
    check_episodes,
    check_membership,
    check_splits,
    check_stream,
)

MOST_NUMBERS = 65_536  # of one vector


@dataclass(frozen=True)
class TaskColumn:
    """What the model adapts to: integers are kept, text is hashed to 64 bits."""

    column: str
    # Of a CSV column; absent: as its first rows look.
    type: Literal["integer", "text"] | None = None


@dataclass(frozen=True)
class LabelColumn:
    """A number or truth value. With a threshold the label is 1 where value >= threshold, else 0.

    It is not known in the rows where `mask` is 0, nor, where `null` is "unknown", in those where it
    is null.
    """

    column: str
    threshold: float | None = None
    name: str | None = None  # what config keys and metrics call it; absent: as its column
    mask: str | None = None
    null: Literal["unknown"] | None = None  # absent: nulls are refused

    @property
    def is_always_known(self) -> bool:
        """Tell whether every row must have it."""
        return self.mask is None and self.null is None


@dataclass(frozen=True)
class WeightColumn:
    """What a row's loss is multiplied by: a number from 0 on."""

    column: str


@dataclass(frozen=True)
class TimeColumn:
    """Orders the rows of a task: integer, float, date or timestamp, or text of a `format`."""

    column: str
    # Of text, as strptime of C has it: "%d.%m.%Y %H:%M"; absent: as its first rows look.
    format: str | None = None


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
    # Of the table's rows, a multiple of 4; absent: as the model's config says.
    width: int | None = None

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
class VectorColumn:
    """A list of `width` float32 inputs in each row, such as an embedding of its text that is there
    already; nulls are refused unless `fill` is given, and become a vector of it.
    """

    column: str
    width: int
    fill: float | None = None


@dataclass(frozen=True)
class TextRule:
    """How CSV and TSV files are written, where they are not as most are."""

    encoding: Literal["utf-8", "latin-1", "utf-16"] = "utf-8"
    null: tuple[str, ...] = ()  # words that mean a null, such as NA; an empty field always does
    comment: str = ""  # what begins a line that is left out; without it every line is a row
    max_line_bytes: int = key(2_000_000, "longer lines are refused", min=1, max=2**31 - 1)


@dataclass(frozen=True)
class Schema:
    """A whole description."""

    task: TaskColumn
    label: LabelColumn | tuple[LabelColumn, ...]
    time: TimeColumn | None = None
    weight: WeightColumn | None = None
    row_id: RowIdColumn | None = None
    item: ItemRule | None = None
    single: tuple[SparseColumn, ...] = ()
    multi: tuple[SparseColumn, ...] = ()
    dense: tuple[DenseColumn, ...] = ()
    vector: tuple[VectorColumn, ...] = ()
    text: TextRule | None = None
    transform: TransformRule | None = None
    episodes: EpisodeRule = field(default_factory=EpisodeRule)
    splits: SplitRule = field(default_factory=SplitRule)
    membership: MembershipRule | None = None
    negatives: NegativesRule | None = None
    stream: StreamRule | None = None
    seed: int = key(0, "decides shuffles and shares", max=2**64 - 1)

    @property
    def sparse(self) -> tuple[SparseColumn, ...]:
        """Return the single columns, then the multi ones."""
        return self.single + self.multi

    @property
    def inputs(self) -> list[str]:
        """Return the columns that a model sees."""
        numbers = [*(part.column for part in self.dense), *(part.column for part in self.vector)]
        return [part.column for part in self.sparse] + numbers

    @property
    def dense_names(self) -> list[str]:
        """Return what the dense inputs are called: numbers, then those of vectors, in order."""
        names = [column.column for column in self.dense]
        return names + [component(v.column, i) for v in self.vector for i in range(v.width)]

    @property
    def labels(self) -> tuple[LabelColumn, ...]:
        """Return what [label], or each [[label]], says."""
        return (self.label,) if isinstance(self.label, LabelColumn) else self.label

    @property
    def label_names(self) -> tuple[str, ...]:
        """Return the names of the labels; none of one that every row has: it needs none."""
        if len(self.labels) == 1 and self.labels[0].is_always_known:
            return ()
        return tuple(label.name or label.column for label in self.labels)

    @property
    def label_text(self) -> str:
        """Return the columns of the labels, as a manifest names them."""
        return ", ".join(label.column for label in self.labels)

    @property
    def label_columns(self) -> list[str]:
        """Return the columns that labels, their masks and weights are read from, each once."""
        names = [label.column for label in self.labels]
        names += [label.mask for label in self.labels if label.mask is not None]
        names += [self.weight.column] if self.weight is not None else []
        return list(dict.fromkeys(names))

    @property
    def columns(self) -> list[str]:
        """Return every raw column that is read, each once."""
        names = [self.task.column, *self.label_columns]
        names += [part.column for part in (self.time, self.row_id) if part is not None]
        names += self.inputs
        names += [self.splits.column] if self.splits.column else []
        sides = self.membership.column if self.membership else None
        names += [sides] if sides else []
        return list(dict.fromkeys(names))

    @property
    def item_rule(self) -> ItemRule | None:
        """Return what [item] says, else what [negatives] says of the item; None where neither names
        a [[single]] column.
        """
        rule = self.negatives
        if self.item is not None or rule is None:
            return self.item
        is_single = any(column.column == rule.item for column in self.single)
        return ItemRule(rule.item, rule.columns) if is_single else None

    @property
    def has_sides(self) -> bool:
        """Tell whether more than [episodes] says which rows are support."""
        sided = self.membership is not None or self.splits.by_time is not None
        return sided or self.stream is not None

    @property
    def is_shuffled(self) -> bool:
        """Tell whether no time says in which order the rows of a task stand."""
        return self.time is None or self.episodes.by == "random"

    @property
    def needs_input_order(self) -> bool:
        """Tell whether nothing but its place in the input tells a row from others of its task."""
        return self.is_shuffled and self.row_id is None

    def to_json(self) -> dict[str, Any]:
        """Return plain values for the manifest."""
        found: dict[str, Any] = _plain(self)
        if not self.vector:
            del found["vector"]  # datasets without stay as they were
        return found


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
    if isinstance(schema.label, tuple) and len(schema.label) == 1:
        schema = replace(schema, label=schema.label[0])  # [[label]] once is [label]
    _check(schema)
    return schema


def features_of(schema: Schema, vocabulary_sizes: dict[str, int]) -> Features:
    """Return the prepared columns; a vocabulary table has one row more than values."""
    tables: dict[str, int] = {}
    widths = {c.table_name: c.width for c in schema.sparse if c.width is not None}
    for column in schema.sparse:
        rows = column.hash if column.hash is not None else vocabulary_sizes[column.table_name] + 1
        tables.setdefault(column.table_name, rows)
    return Features(
        tables=tuple(TableSpec(name, rows, widths.get(name, 0)) for name, rows in tables.items()),
        single=tuple(FeatureSpec(column.column, column.table_name) for column in schema.single),
        multi=tuple(FeatureSpec(column.column, column.table_name) for column in schema.multi),
        dense=tuple(schema.dense_names),
        row_id=schema.row_id.column if schema.row_id else "",
        labels=schema.label_names,
        weight=schema.weight.column if schema.weight else "",
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
    if origin is dict and get_args(option)[1] is str:
        return "a table of texts"
    return names.get(origin or option, "a table")


WORDING = Wording(SchemaError, "schema key ", known="allowed", wrong_type=_wrong_type)


def _check(schema: Schema) -> None:
    """Raise SchemaError for what types alone cannot say."""
    if not schema.sparse and not schema.dense_names:
        raise SchemaError(
            "the schema has no [[single]], [[multi]], [[dense]] or [[vector]] column. "
            "Add at least one"
        )
    by_table: dict[str, tuple[int | None, int | None]] = {}
    widths: dict[str, int | None] = {}
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
        width = column.width
        if width is not None and width not in range(4, MAX_TABLE_WIDTH + 1, 4):
            raise SchemaError(
                f"column {column.column} has width {width}; multiples of 4 up to "
                f"{MAX_TABLE_WIDTH} are allowed. Change it"
            )
        if widths.setdefault(column.table_name, column.width) != column.width:
            raise SchemaError(
                f"column {column.column} and another column of table {column.table_name} differ "
                "in width. Columns that share a table must agree"
            )
        # One table has one way from values to rows, or equal values would meet in different rows.
        if by_table.setdefault(column.table_name, how) != how:
            raise SchemaError(
                f"column {column.column} and another column of table {column.table_name} differ "
                "in hash or vocabulary. Columns that share a table must agree"
            )
    for columns in (schema.single, schema.multi, schema.dense, schema.vector):
        names = [column.column for column in columns]
        for name in names:
            if names.count(name) > 1:
                raise SchemaError(f"column {name} is listed twice in one kind. Remove one of them")
    _check_labels(schema)
    _check_vectors(schema)
    for column in schema.multi:
        if column.separator == "":
            raise SchemaError(
                f'column {column.column} has separator ""; a list is split at a text of one '
                "character or more. Change it"
            )
    if not 0 <= schema.seed < 1 << 64:
        raise SchemaError(f"seed is {schema.seed}; 0 to 2^64 - 1 is allowed. Change it")
    has_time, by = schema.time is not None, schema.episodes.by
    check_episodes(schema.episodes, has_time)
    check_splits(schema.splits, has_time, by)
    if schema.membership is not None:
        check_membership(schema.membership, by, schema.splits.by_time is not None)
        if schema.membership.by_files and schema.transform is not None:
            raise SchemaError(
                "[transform] makes files of its own, whose names [membership] does not know. Let "
                "the function return a column that says support or query"
            )
    _check_negatives(schema)
    if schema.stream is not None:
        given = {
            "time": has_time,
            "[splits]": schema.splits != SplitRule(),
            "[membership]": schema.membership is not None,
            "[negatives]": schema.negatives is not None,
        }
        check_stream(schema.stream, given, by)
    _check_item(schema)


def _check_vectors(schema: Schema) -> None:
    for vector in schema.vector:
        if not 1 <= vector.width <= MOST_NUMBERS:
            raise SchemaError(
                f"vector column {vector.column} has width {vector.width}; 1 to {MOST_NUMBERS:,} "
                "numbers in each row are allowed. Change it"
            )
    twice = [name for name, count in Counter(schema.dense_names).items() if count > 1]
    if twice:
        raise SchemaError(
            f"dense column {twice[0]} is called like a number of vector {vector_of(twice[0])}. "
            "Rename one of the two columns"
        )


def _check_labels(schema: Schema) -> None:
    roles = ("task", "time", "row_id", "splits", "membership")
    parts = {name: getattr(schema, name) for name in roles}
    if not schema.labels:
        raise SchemaError("the schema has 0 labels: at least one is needed. Add a [label]")
    for label in schema.labels:
        if label.column in schema.inputs:
            raise SchemaError(
                f"column {label.column} is the label and a feature: the model would be told the "
                "answer. Remove the feature"
            )
        if label.mask in schema.inputs:
            raise SchemaError(
                f"column {label.mask} is the mask of label {label.column} and a feature: rows to "
                "predict have none. Remove the feature"
            )
        for role, part in parts.items():
            if part is not None and part.column == label.column:
                raise SchemaError(
                    f"column {label.column} is the label and the column of [{role}]: rows would be "
                    "dealt by the answer. Name another column"
                )
    for name in schema.label_names:
        if schema.label_names.count(name) > 1:
            raise SchemaError(f"two labels have the name {name}. Give one of them another name")
        if not is_name(name):
            raise SchemaError(
                f"label {name!r} becomes a column of the shards; allowed are {NAME_RULE}. Give it "
                "a name of these"
            )
    if schema.negatives is not None and schema.label_names:
        raise SchemaError(
            f"[negatives] and the labels {', '.join(schema.label_names)}: a row that is added has "
            "label 0, of one label that every row has. Remove [negatives], or the other labels"
        )


def _check_item(schema: Schema) -> None:
    rule = schema.item
    if schema.splits.validation_items is not None and (rule is None or schema.negatives):
        wrong = (
            "there is no [item], which says what the items are. Add it"
            if rule is None
            else "[negatives] are drawn from known items alone, which would tell them from the "
            "held-back ones. Leave one of them out"
        )
        raise SchemaError(f"splits.validation_items holds back items, but {wrong}")
    if rule is None:
        return
    singles = [column.column for column in schema.single]
    if rule.column not in singles or rule.column == schema.task.column:
        others = [name for name in singles if name != schema.task.column]
        raise SchemaError(
            f"item.column is {rule.column}; a [[single]] column that is not the task is needed: "
            f"{', '.join(others) or 'there is none'}. Name one of them, or leave out [item]"
        )
    for name in rule.columns:
        if name not in schema.inputs:
            raise SchemaError(
                f"item.columns names {name}, which is no [[single]], [[multi]], [[dense]] or "
                "[[vector]] column: no input would change with the item. Add the column, or take "
                "the name out"
            )


def _check_negatives(schema: Schema) -> None:
    rule = schema.negatives
    if rule is None:
        return
    if rule.item == schema.task.column:
        raise SchemaError(
            f"negatives.item is {rule.item}, which is the task: another item would be another "
            "task. Name the column that changes within a task"
        )
    for name in rule.features:
        if name not in schema.inputs:
            raise SchemaError(
                f"negatives names the column {name}, which is no [[single]], [[multi]], "
                "[[dense]] or [[vector]] column: no input would change with the item. Add the "
                "column, or take the name out"
            )
