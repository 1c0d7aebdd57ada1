"""Guesses the role of each column of a log from its name and first rows."""

# Only for a first schema (schema_template.py), which says why and which a person corrects: nothing
# is prepared by a guess.
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from metaio.errors import DataError, to_one_line
from metaio.prepare.schema.rules import VALIDATION
from metaio.prepare.schema.schema import TextRule
from metaio.prepare.source.profile import ColumnProfile, LogSample, is_list, profile_column

# Above this share ids are hashed: a vocabulary is kept in memory and copied into exports.
MAX_DISTINCT_SHARE = 0.5
MIN_DISTINCT_NUMBERS = 20  # a column named as a number, or a time, with fewer serves as ids
_ID = r"(_?(id|no|nr|idx|index|key|code|hash|token|uuid|number|num))?"
# The first of these patterns that some columns fit decides.
LABELS = (
    r"(is_|has_)?(click(ed|s)?|clk|label|liked?|convert(ed)?|conversion|purchased?|bought|buy)"
    r"|rating|stars|score|target|y",
    r"(is_|has_)?(ordered|watched|installed|subscribed|accepted|responded|booked|favou?rite|fav)"
    r"|ratings|rate|overall|grade|response|outcome|reward|play_?count|plays|watch_ratio",
    r".*_(rating|score|label|stars|clicks?|clicked|liked)",
)
TASKS = (
    r"(user|uid|customer|cust|client|member|visitor|advertiser|account|buyer|shopper|reader|viewer"
    rf"|listener|player|subscriber|reviewer|person|patient|student|subject|household"
    rf"|consumer){_ID}",
    rf"(session|cookie|device|store|shop|seller|query|group){_ID}",
)
TIMES = (
    r"time(_?stamp)?|ts|date(_?time)?|event_?time|unix_?time|created_?at|when",
    r".*(_?time(_?stamp)?|_date|_datetime|_ts|_at|time)",
)
_VALID_SPLITS = ("valid", "val", "validation", "dev")
# Names of integers that count or measure: only a name tells these from ids.
_MEASURES = re.compile(
    r"price|cost|amount|count|num|qty|quantity|duration|length|width|height|weight|size|views|age"
    r"|distance|income|salary|minutes|seconds|days|hours|percent|ratio|temperature|total|sum|mean"
    r"|avg|volume|score|pages|balance"
)
_ROW_IDS = (
    r"(unnamed_\d+|row|index|record|event|impression|interaction|log|line|request)?"
    r"_?(id|no|nr|number|index|uuid)?|column0"
)

MAX_CHANGED_ITEMS_SHARE = 0.02  # share of the items of which a column of theirs may have two values

Role = Literal[
    "task", "label", "time", "row id", "split", "side", "single", "multi", "dense", "vector",
    "left out",
]  # fmt: skip
_INPUTS: tuple[Role, ...] = ("single", "multi", "dense", "vector")


@dataclass(frozen=True)
class InferredRoles:
    """What each column is for, by the first `num_rows` rows."""

    columns: tuple[ColumnProfile, ...]
    roles: dict[str, Role]
    num_rows: int
    mean_label: float
    median_label: float
    task_sizes: npt.NDArray[np.int64]  # rows of each task, ascending
    of_item: tuple[str, ...] = ()  # columns that change with the item alone
    # Why columns are left out.
    reasons: Mapping[str, str] = field(default_factory=dict)
    text: TextRule = TextRule()  # noqa: RUF009 - frozen
    splits: frozenset[str] = frozenset()  # that a column names

    def select(self, role: Role) -> list[ColumnProfile]:
        """Return the columns of a role, in their order."""
        return [column for column in self.columns if self.roles[column.name] == role]

    @property
    def inputs(self) -> list[ColumnProfile]:
        """Return the columns that the model sees."""
        return [column for role in _INPUTS for column in self.select(role)]

    @property
    def is_rating(self) -> bool:
        """Return whether the label has more than two values."""
        return self.label.num_distinct > 2

    @property
    def label(self) -> ColumnProfile:
        """Return the column of the label."""
        (label,) = self.select("label")
        return label

    @property
    def threshold(self) -> float | None:
        """Return what turns a label such as -1 and 1 into 0 and 1; None if it is not needed."""
        is_binary = {self.label.least, self.label.most} <= {0, 1}
        return None if self.is_rating or is_binary else self.label.most

    @property
    def is_positives(self) -> bool:
        """Return whether the log has positives alone, so that items must be drawn as negatives."""
        return self.label.least == self.label.most == 1 and bool(self.item)

    @property
    def valid_split(self) -> str:
        """Return the split that settings are chosen on: the log's own, or that which is made."""
        return next((name for name in _VALID_SPLITS if name in self.splits), VALIDATION)

    @property
    def item(self) -> str:
        """Return the item's column: the ids with the most values; "" without one."""
        ids = self.ids
        return max(ids, key=lambda column: column.num_distinct).name if ids else ""

    @property
    def item_and_its_columns(self) -> tuple[str, ...]:
        """Return the item's column and those that change with it alone; () without an item."""
        return (self.item, *self.of_item) if self.item else ()

    @property
    def ids(self) -> list[ColumnProfile]:
        """Return the columns of one id a row whose ids recur in other rows."""
        most = MAX_DISTINCT_SHARE * self.num_rows
        return [column for column in self.select("single") if 1 < column.num_distinct <= most]


def infer_roles(log: LogSample, given_roles: Mapping[Role, str]) -> InferredRoles:
    """Return what each column is for; `given_roles` names the task, label or time where known."""
    rows = log.rows
    columns = tuple(profile_column(name, rows[name]) for name in rows.column_names)
    roles: dict[str, Role] = {name: role for role, name in given_roles.items()}
    _check_given(columns, given_roles)
    roles = _find_protocol(columns, rows) | roles
    wanted: tuple[tuple[Role, tuple[str, ...]], ...] = (
        ("label", LABELS),
        ("task", TASKS),
        ("time", TIMES),
    )
    for role, patterns in wanted:
        if role in given_roles:
            continue
        unused = [column for column in columns if column.name not in roles]
        name = _find_column(unused, role, patterns, len(rows))
        if name:
            roles[name] = role
        elif role != "time":
            names = to_one_line(", ".join(column.name for column in columns))
            hint = ""
            if role == "label":
                hint = ", or add a column of ones to a log of positives alone (docs/datasets.md)"
            raise DataError(
                f"no column of {names} looks like the {role}. Name it with --{role}{hint}"
            )
    why: dict[str, str] = {}
    for column in columns:
        if column.name not in roles:
            has_row_id = "row id" in roles.values()
            roles[column.name], reason = _infer_feature_role(column, len(rows), has_row_id)
            if reason:
                why[column.name] = reason
    (label,) = (name for name, role in roles.items() if role == "label")
    (task,) = (name for name, role in roles.items() if role == "task")
    splits = [_texts_of(rows[name]) for name, role in roles.items() if role == "split"]
    values = pc.cast(rows[label], pa.float64(), safe=False)  # integers beyond 2^53, too
    # A value that occurs, since it is proposed as a threshold.
    median = pc.quantile(values, 0.5, interpolation="higher")[0].as_py()
    mean = pc.mean(values).as_py() or 0.0
    found = InferredRoles(
        columns, roles, len(rows), mean, median or 0.0, log.task_sizes(task), (), why, log.text,
        frozenset().union(*splits),
    )  # fmt: skip
    if found.task_sizes[-1] < 2:
        raise DataError(
            f"each value of {task} has one row: there is nothing that a model could adapt to. Name "
            "another column with --task"
        )
    found = replace(found, of_item=_find_item_columns(found, rows) if found.item else ())
    if found.label.num_distinct < 2 and not found.is_positives:
        raise DataError(
            f"label {label} is {found.label.least} in all of the {len(rows):,} rows looked at: "
            "there is nothing to learn. Name another column with --label; a log of positives alone "
            "needs a column of ones, and one of items"
        )
    return found


def _check_given(columns: Iterable[ColumnProfile], given: Mapping[Role, str]) -> None:
    by_name = {column.name: column for column in columns}
    for role, name in given.items():
        if name not in by_name:
            raise DataError(
                f"there is no column {name!r} for the {role}: the log has "
                f"{to_one_line(', '.join(by_name))}. Name one of them"
            )
        column = by_name[name]
        if role == "label" and not column.is_number:
            raise DataError(
                f"column {name!r} is {column.type}: a label is a number or a truth value. "
                "Name another column, or write numbers"
            )
        if role == "time" and not column.can_be_time:
            raise DataError(
                f"column {name!r} is {column.type}: its values are no times that are known here. "
                "Leave out --time, and give the column and its format under [time] in the schema"
            )
    if len({*given.values()}) < len(given):
        raise DataError(
            f"one column is given twice: {', '.join(f'--{r} {n}' for r, n in given.items())}. "
            "Each has a column of its own"
        )


def _find_protocol(columns: Iterable[ColumnProfile], rows: pa.Table) -> dict[str, Role]:
    """Return the columns that name each row's split, or say whether it is support or query."""
    found: dict[Role, str] = {}
    for column in columns:
        name = normalise_name(column.name).lower()
        if name not in ("split", "side", "is_query") or column.is_list:
            continue
        texts = _texts_of(rows[column.name])
        if name == "split" and "train" in texts and not column.num_null:
            found.setdefault("split", column.name)
        numbers = ({"0", "1"}, {"false", "true"}) if name == "is_query" else ()
        if texts in ({"support", "query"}, *numbers):
            found.setdefault("side", column.name)
    return {name: role for role, name in found.items()}


def _texts_of(values: pa.ChunkedArray) -> set[str]:
    return set(pc.unique(values).drop_null().cast(pa.string()).to_pylist())


def _find_column(
    columns: list[ColumnProfile], role: Role, patterns: tuple[str, ...], num_rows: int
) -> str:
    """Return the column that looks like a role; "" for none."""
    for pattern in patterns:
        fits = [column for column in columns if _matches_role(column, role, pattern, num_rows)]
        if role == "task":
            # Of several, the one with the most tasks that still average two rows or more.
            fits = [column for column in fits if column.num_distinct <= num_rows / 2]
            fits.sort(key=lambda column: -column.num_distinct)
        if fits:
            return fits[0].name
    if role == "label":
        # The only column of 0 and 1 is one, whatever its name.
        fits = [one for one in columns if one.is_number and one.num_distinct == 2]
        fits = [one for one in fits if (one.least, one.most) == (0, 1)]
        return fits[0].name if len(fits) == 1 else ""
    typed = [column for column in columns if column.is_time] if role == "time" else []
    return typed[0].name if typed else ""


def _matches_role(column: ColumnProfile, role: Role, pattern: str, num_rows: int) -> bool:
    name = normalise_name(column.name)
    if column.num_distinct < 2 or not re.fullmatch(pattern, name, re.IGNORECASE):
        return False
    if role == "label":
        return column.is_number
    if role == "time":
        # A number of few values is a code, such as a day of the week.
        few = column.num_distinct < min(MIN_DISTINCT_NUMBERS, num_rows / 2)
        return column.can_be_time and not (column.is_number and few)
    return not column.is_list and not column.is_time


def normalise_name(name: str) -> str:
    """Return a column's name in the form of the patterns."""
    # RecBole appends types: "user_id:token".
    name = re.sub(r":(token|float)(_seq)?$", "", name.strip())
    # "Customer ID" and "customerId" both become "customer_ID".
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return re.sub(r"\W+", "_", words).strip("_")


def _find_item_columns(found: InferredRoles, rows: pa.Table) -> tuple[str, ...]:
    """Return the inputs that have one value for each item, with few exceptions."""
    inputs = [column for column in found.inputs if column.name != found.item]
    names = [c.name for c in inputs if not pa.types.is_nested(c.type) and c.num_distinct > 1]
    values = rows.select([found.item, *names]).rename_columns(["", *map(str, range(len(names)))])
    wanted = [(str(place), "count_distinct") for place in range(len(names))]
    counts = values.group_by("").aggregate(wanted)
    several = [pc.sum(pc.greater(counts["_".join(key)], 1)).as_py() for key in wanted]
    most = MAX_CHANGED_ITEMS_SHARE * counts.num_rows
    return tuple(name for name, items in zip(names, several, strict=True) if (items or 0) <= most)


def _infer_feature_role(column: ColumnProfile, num_rows: int, has_row_id: bool) -> tuple[Role, str]:
    """Return what a column is for the model, and why if it is left out."""
    name = normalise_name(column.name)
    if column.num_distinct < 2 and not pa.types.is_nested(column.type):
        return "left out", "it has one value" if column.num_distinct else "it has no value"
    may_label = column.is_number or column.num_distinct == 2  # a text of yes and no
    if may_label and re.fullmatch(LABELS[0], name, re.IGNORECASE):
        return "left out", "it looks like another label, known only afterwards"
    if column.is_time or column.time_format:
        return "left out", "a time that does not order the rows"
    if pa.types.is_struct(column.type):
        return "left out", "a struct"
    if is_list(column.type):
        if not pa.types.is_floating(column.type.value_type):
            return "multi", ""
        # Lists of floats are no ids.
        return ("vector", "") if column.width else ("left out", "lists of different lengths")
    if column.is_list:
        return "multi", ""
    if pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
        return "dense", ""
    differs = column.num_distinct == num_rows - column.num_null  # in every row that has one
    is_named = re.fullmatch(_ROW_IDS, name, re.IGNORECASE) is not None
    if differs and not column.num_null and is_named and column.is_integer and not has_row_id:
        return "row id", ""
    if pa.types.is_string(column.type) and differs:
        return "left out", "a text of its own in every row says nothing of another row"
    words = name.lower().split("_")
    measures = column.is_integer and column.num_distinct > MIN_DISTINCT_NUMBERS
    if measures and not {"id", "code"} & {*words} and any(map(_MEASURES.fullmatch, words)):
        return "dense", ""
    return "single", ""
