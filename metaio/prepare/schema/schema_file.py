"""Parses and checks schemas, from TOML files and from the JSON of manifests."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

import xxhash

from gmeta_keys import Wording, parse, read_toml
from metaio.errors import SchemaError
from metaio.format.features import MAX_TABLE_WIDTH, find_vector_column, name_event_column
from metaio.format.manifest import Manifest, canonical_json
from metaio.format.names import NAME_RULE, is_name
from metaio.prepare.schema.conditions import parse_duration_s, parse_where
from metaio.prepare.schema.rule_checks import (
    check_episodes,
    check_membership,
    check_splits,
    check_stream,
)
from metaio.prepare.schema.rules import ItemRule, SplitRule, StreamRule
from metaio.prepare.schema.schema import Schema, TextRule

MAX_DENSE_NUMBERS = 65_536  # of one vector


def load_schema(path: str | Path) -> Schema:
    """Return the checked schema of a TOML file."""
    return parse_schema(read_toml("schema", Path(path), SchemaError, "task"))


def parse_schema(body: dict[str, Any]) -> Schema:
    """Return the checked schema of the tables of a TOML file or of a manifest's JSON."""
    schema = parse(Schema, body, WORDING)
    if isinstance(schema.label, tuple) and len(schema.label) == 1:
        schema = replace(schema, label=schema.label[0])  # [[label]] once is [label]
    check_schema(schema)
    return schema


def read_item_rule(manifest: Manifest) -> ItemRule | None:
    """Return the item rule of a dataset's schema; None without one."""
    schema = manifest.recipe.get("schema")
    return parse_schema(schema).item_rule if isinstance(schema, dict) else None


def list_weighed_labels(manifest: Manifest) -> tuple[str, ...]:
    """Return the labels of a dataset whose rows are learnt from before they are final."""
    schema = manifest.recipe.get("schema")
    if manifest.stream is None or not isinstance(schema, dict):
        return ()
    found = parse_schema(schema)
    weighed = zip(found.label_names, found.labels, strict=False)
    return tuple(name for name, label in weighed if label.is_weighed)


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


def check_schema(schema: Schema) -> None:
    """Raise SchemaError for values that have the right types but make no sense."""
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
        # FBGEMM's embedding kernels take widths that are multiples of 4.
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
        # One way from values to rows a table: else equal values would get different rows.
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
    if schema.text is not None:
        check_separator(schema.text)
    # Hashes mix the seed in as an unsigned 64-bit number.
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
    _check_events(schema)


def check_separator(rule: TextRule) -> None:
    """Raise SchemaError for what cannot stand between two values of a text file."""
    mark = rule.delimiter
    if mark is not None and (not 1 <= len(mark.encode()) <= 4 or {*mark} & {*'\r\n"\\'}):
        raise SchemaError(
            f"separator of [text] is {rule.separator!r}; 1 to 4 bytes are allowed, without a "
            r"quote or an end of line, such as ';', '\t', '::' or '\x01'. Change it"
        )


def _check_vectors(schema: Schema) -> None:
    for vector in schema.vector:
        if not 1 <= vector.width <= MAX_DENSE_NUMBERS:
            raise SchemaError(
                f"vector column {vector.column} has width {vector.width}; 1 to "
                f"{MAX_DENSE_NUMBERS:,} numbers in each row are allowed. Change it"
            )
    twice = [name for name, count in Counter(schema.dense_names).items() if count > 1]
    if twice:
        raise SchemaError(
            f"dense column {twice[0]} is called like a number of vector "
            f"{find_vector_column(twice[0])}. Rename one of the two columns"
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
    _check_maturity(schema)
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


def _check_maturity(schema: Schema) -> None:
    late = [label for label in schema.labels if label.matures is not None]
    try:
        longest_s = max((label.matures_s for label in late), default=0.0)
    except ValueError as error:
        raise SchemaError(str(error)) from error
    for name, part in (("[stream]", schema.stream), ("[row_id]", schema.row_id)):
        if late and part is None:
            raise SchemaError(
                f"label {late[0].column} matures, and the schema has no {name}: a row waits in a "
                "stream, and is corrected by its id. Add it, or leave matures out"
            )
    for label in schema.labels:
        if label.is_weighed and label.matures is None:
            raise SchemaError(
                f'label {label.column} has unripe = "weigh" and no matures: it is final at once. '
                "Give matures, or leave unripe out"
            )
    if late and schema.stream is not None and 0 < schema.stream.ttl <= longest_s:
        raise SchemaError(
            f"stream.ttl is {schema.stream.ttl:g} s, and labels mature after {longest_s:g} s: rows "
            "would be forgotten while they wait. Raise ttl"
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
    _check_inputs(schema, rule.columns, "item.columns names")


def _check_events(schema: Schema) -> None:
    rule = schema.events
    if rule is None:
        return
    if schema.time is None:
        raise SchemaError("[events] stand in time, and the schema has no [time] column. Add it")
    if not rule.columns:
        raise SchemaError("events.columns is empty; at least one [[single]] column is needed")
    for key, names, kind, known in (
        ("columns", rule.columns, "[[single]]", [column.column for column in schema.single]),
        ("dense", rule.dense, "[[dense]]", [column.column for column in schema.dense]),
    ):
        for name in names:
            if name not in known or names.count(name) > 1:
                raise SchemaError(
                    f"events.{key} names {name}; {kind} columns, each once, are allowed: "
                    f"{', '.join(known) or 'there is none'}. Correct it"
                )
    if rule.files and schema.splits.validation_items is not None:
        raise SchemaError(
            "splits.validation_items holds back items, which the files of [events] would show. "
            "Leave one of them out"
        )
    lists = {column.column for column in schema.multi}
    for name in map(name_event_column, rule.columns):
        if name in lists:
            raise SchemaError(f"[[multi]] column {name} is called like one of events. Rename it")
    try:
        parse_where(rule.where)
        if isinstance(rule.delay, str):
            parse_duration_s("events.delay", rule.delay)
    except ValueError as error:
        raise SchemaError(str(error)) from error
    if not isinstance(rule.delay, str) and rule.delay < 0:
        raise SchemaError(
            f"events.delay is {rule.delay:g}; below 0 a row would know its own events. Raise it"
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
    _check_inputs(schema, rule.features, "negatives names the column")


def _check_inputs(schema: Schema, names: Iterable[str], kind: str) -> None:
    for name in names:
        if name not in schema.inputs:
            raise SchemaError(
                f"{kind} {name}, which is no [[single]], [[multi]], [[dense]] or [[vector]] "
                "column: no input would change with the item. Add the column, or take the name out"
            )


def fingerprint_schema(schema: Schema) -> str:
    """Return a mark that is equal for two streams that begin with the same schema."""
    # With defaults: spelling them out in a schema file changes nothing.
    return xxhash.xxh3_64_hexdigest(canonical_json(with_stream_defaults(schema).to_json()))


def with_stream_defaults(schema: Schema) -> Schema:
    """Return the schema as that of a stream, with defaults where it has no [stream]."""
    # Through JSON and back: [stream] is checked against other tables where a schema is parsed.
    return parse_schema(replace(schema, stream=schema.stream or StreamRule()).to_json())
