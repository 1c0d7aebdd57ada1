"""The TOML description of a raw table: the role of each column, and how rows become episodes.

docs/format.md shows a complete schema."""

import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from gmeta_keys import key
from metaio.format.features import (
    Features,
    FeatureSpec,
    TableSpec,
    name_component,
    name_event_column,
)
from metaio.prepare.schema.conditions import parse_duration_s, parse_where
from metaio.prepare.schema.rules import (
    EpisodeRule,
    EventsRule,
    ItemRule,
    MembershipRule,
    NegativesRule,
    RowIdColumn,
    SplitRule,
    StreamRule,
    TransformRule,
)


@dataclass(frozen=True)
class TaskColumn:
    """What the model adapts to: integers are kept, text is hashed to 64 bits."""

    column: str
    # Of a CSV column; absent: as its first rows look.
    type: Literal["integer", "text"] | None = None


@dataclass(frozen=True)
class LabelColumn:
    """A number or truth value; with a threshold 1 where value >= threshold, else 0."""

    column: str
    threshold: float | None = None
    name: str | None = None  # what config keys and metrics call it; absent: as its column
    # Not known in rows where this column is 0.
    mask: str | None = None
    null: Literal["unknown"] | None = None  # absent: nulls are refused
    # Of a stream: how old a row must be for the label to be final, as "24h"; until then it waits.
    matures: str | None = None
    # weigh: a row is learnt from at once as one of label 0, and again once its label is above 0.
    unripe: Literal["weigh"] | None = None  # absent: the row waits

    @property
    def matures_s(self) -> float:
        """Return how old a row must be for the label to be final, in seconds."""
        return 0.0 if self.matures is None else parse_duration_s("label.matures", self.matures)

    @property
    def is_weighed(self) -> bool:
        """Return whether rows are learnt from before it is final."""
        return self.unripe == "weigh"

    @property
    def is_always_known(self) -> bool:
        """Return whether every row must have it."""
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
class IdColumn:
    """Ids of one table, given by exactly one of `hash` and `vocabulary`."""

    column: str
    table: str | None = None  # absent: a table of its own, named like the column
    # Rows of the table: values use rows 1 to hash - 1. Row 0 is for values outside of a vocabulary,
    # and for nulls if `null` is "unknown".
    hash: int | None = None
    # Least count of a value in the train split; rows follow the sorted values.
    vocabulary: int | None = None
    null: Literal["refuse", "unknown"] = "refuse"
    # Splits the text of a [[multi]] column.
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
    """A float32 input; nulls are refused unless `fill` is given."""

    column: str
    fill: float | None = None
    # In this order: log1p, then (x - mean) / deviation of the train split.
    log1p: bool = False
    standardise: bool = False


@dataclass(frozen=True)
class VectorColumn:
    """A list of `width` float32 inputs a row, such as an embedding; `fill` replaces nulls."""

    column: str
    width: int
    fill: float | None = None


@dataclass(frozen=True)
class TextRule:
    """How CSV and TSV files are written, where they differ from most."""

    encoding: Literal["utf-8", "latin-1", "utf-16"] = "utf-8"
    null: tuple[str, ...] = ()  # words that mean a null, such as NA; an empty field always does
    comment: str = ""  # what begins a line that is left out; without it every line is a row
    separator: str | None = None  # of values, 1 to 4 bytes; absent: as the first lines look
    max_line_bytes: int = key(2_000_000, "longer lines are refused", min=1, max=2**31 - 1)
    bad_lines: Literal["skip"] | None = None  # absent: a line that cannot be read is refused
    max_bad_lines: int | None = None  # more are refused, too; absent: 1,000

    @property
    def delimiter(self) -> str | None:
        """Return the separator, of which a tab may be spelled \\t, and Hive's \\x01 or \\001."""
        pattern = r"\\(?:x([0-9a-fA-F]{2})|([0-7]{3})|t)"
        return self.separator and re.sub(
            pattern,
            lambda m: chr(int(m[1], 16) if m[1] else int(m[2], 8) if m[2] else 9),
            self.separator,
        )


@dataclass(frozen=True)
class Schema:
    """A complete description of a raw table."""

    task: TaskColumn
    label: LabelColumn | tuple[LabelColumn, ...]
    time: TimeColumn | None = None
    weight: WeightColumn | None = None
    row_id: RowIdColumn | None = None
    item: ItemRule | None = None
    events: EventsRule | None = None
    single: tuple[IdColumn, ...] = ()
    multi: tuple[IdColumn, ...] = ()
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
    def sparse(self) -> tuple[IdColumn, ...]:
        """Return the single columns, then the multi ones."""
        return self.single + self.multi

    @property
    def inputs(self) -> list[str]:
        """Return the columns that a model sees."""
        numbers = [*(part.column for part in self.dense), *(part.column for part in self.vector)]
        return [part.column for part in self.sparse] + numbers

    @property
    def dense_names(self) -> list[str]:
        """Return the names of the dense inputs: numbers, then those of vectors, in order."""
        names = [column.column for column in self.dense]
        return names + [name_component(v.column, i) for v in self.vector for i in range(v.width)]

    @property
    def labels(self) -> tuple[LabelColumn, ...]:
        """Return the rules of [label], or of each [[label]]."""
        return (self.label,) if isinstance(self.label, LabelColumn) else self.label

    @property
    def label_names(self) -> tuple[str, ...]:
        """Return the names of the labels; () for a single one that every row shows."""
        # Such a label needs no name, and its datasets stay as they were before labels had names.
        first = self.labels[0]
        if len(self.labels) == 1 and first.is_always_known and not first.is_weighed:
            return ()
        return tuple(label.name or label.column for label in self.labels)

    @property
    def label_text(self) -> str:
        """Return the columns of the labels, as a manifest names them."""
        return ", ".join(label.column for label in self.labels)

    @property
    def label_columns(self) -> list[str]:
        """Return the columns that labels, masks and weights are read from, each once."""
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
        names += self.event_conditions
        return list(dict.fromkeys(names))

    @property
    def event_conditions(self) -> list[str]:
        """Return the columns that decide which rows are events, of this log's rows."""
        rule = self.events
        if rule is None or rule.files:
            return []
        return [condition.column for condition in parse_where(rule.where)]

    @property
    def event_files(self) -> list[str]:
        """Return the URL, glob or folder of another log, whose rows are the events; [] of none."""
        return [self.events.files] if self.events is not None and self.events.files else []

    @property
    def item_rule(self) -> ItemRule | None:
        """Return [item], else what [negatives] says of the item; None without a [[single]] item."""
        rule = self.negatives
        if self.item is not None or rule is None:
            return self.item
        is_single = any(column.column == rule.item for column in self.single)
        return ItemRule(rule.item, rule.columns) if is_single else None

    @property
    def has_sides(self) -> bool:
        """Return whether rows have sides: not [episodes] alone decides, or some are events."""
        sided = self.membership is not None or self.splits.by_time is not None
        return sided or self.stream is not None or bool(self.event_files)

    @property
    def is_shuffled(self) -> bool:
        """Return whether the rows of a task have no order in time."""
        return self.time is None or self.episodes.by == "random"

    @property
    def needs_input_order(self) -> bool:
        """Return whether only its place in the input tells a row from others of its task."""
        return self.is_shuffled and self.row_id is None

    def to_json(self) -> dict[str, Any]:
        """Return plain values for the manifest."""
        given = asdict(self, dict_factory=lambda items: {k: v for k, v in items if v is not None})
        found: dict[str, Any] = json.loads(json.dumps(given))
        if not self.vector:
            del found["vector"]  # datasets without stay as they were
        if found.get("stream", {}).get("missing") == "quarantine":
            del found["stream"]["missing"]  # as do streams
        return found


def make_event_schema(schema: Schema) -> Schema:
    """Return the schema of the log whose rows are the events: without labels, all of them rows of
    the train split where a column says which split a row is in."""
    rule = schema.events or EventsRule(())
    splits = SplitRule() if schema.splits.column is not None else schema.splits
    return Schema(
        schema.task,
        (),
        schema.time,
        events=replace(rule, files=""),
        single=tuple(column for column in schema.single if column.column in rule.columns),
        dense=tuple(column for column in schema.dense if column.column in rule.dense),
        text=schema.text,
        splits=splits,
        stream=schema.stream,
        seed=schema.seed,
    )


def make_features(schema: Schema, vocabulary_sizes: dict[str, int]) -> Features:
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
        events=tuple(
            FeatureSpec(name_event_column(column.column), column.table_name)
            for name in (schema.events.columns if schema.events else ())
            for column in schema.single
            if column.column == name
        ),
        event_dense=schema.events.dense if schema.events else (),
        event_longest=schema.events.longest if schema.events else 0,
    )
