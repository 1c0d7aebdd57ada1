"""Schema files: every mistake is one line that names the key."""

import math
from pathlib import Path
from typing import Any

import pytest

from metaio import SchemaError
from metaio.prepare.schema.schema_file import load_schema, parse_schema

GOOD: dict[str, Any] = {
    "task": {"column": "user"},
    "label": {"column": "click"},
    "single": [{"column": "item", "hash": 100}],
    "episodes": {"query_rows": 5, "min_rows": 6},
}


def refusal(**parts: Any) -> str:
    with pytest.raises(SchemaError) as caught:
        parse_schema({**GOOD, **parts})
    return str(caught.value)


def test_a_whole_schema_survives_json() -> None:
    schema = parse_schema({**GOOD, "time": {"column": "ts"}, "splits": {"shares": {"train": 1}}})
    assert parse_schema(schema.to_json()) == schema


def test_columns_are_listed_once() -> None:
    schema = parse_schema({**GOOD, "dense": [{"column": "item"}], "splits": {"column": "part"}})
    assert schema.columns == ["user", "click", "item", "part"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"labels": {"column": "x"}},
            "schema key labels is unknown; did you mean label?",
        ),
        (
            {"task": {"columm": "x"}},
            "schema key task.columm is unknown; did you mean task.column?",
        ),
        (
            {"single": [{"column": "a", "zzz": 1}]},
            "schema key single.zzz is unknown; allowed are column, table, hash, vocabulary, null, "
            "separator, type, width",
        ),
        (
            {"label": {}},
            "schema key label.column is missing; it has no default. Add it",
        ),
        (
            {"label": {"column": 3}},
            "schema key label.column is 3; it must be text. Correct it",
        ),
        (
            {"seed": -1},
            "seed is -1; 0 to 2^64 - 1 is allowed. Change it",
        ),
        (
            {"multi": [{"column": "a", "hash": 9, "separator": ""}]},
            'column a has separator ""; a list is split at a text of one character or more. '
            "Change it",
        ),
        (
            {"dense": [{"column": "click"}]},
            "column click is the label and a feature: the model would be told the answer. Remove "
            "the feature",
        ),
        (
            {"time": {"column": "click"}},
            "column click is the label and the column of [time]: rows would be dealt by the "
            "answer. Name another column",
        ),
        (
            {"text": {"encoding": "cp437"}},
            "schema key text.encoding is 'cp437'; it must be 'utf-8' or 'latin-1' or 'utf-16'. "
            "Correct it",
        ),
        (
            {"single": [{"column": "a/b", "vocabulary": 2}]},
            "table 'a/b' has a vocabulary, which becomes a file of that name; allowed are "
            'letters, digits, spaces, ".", "_" and "-", at most 200 bytes, neither "." nor "..". '
            "Give the column another table",
        ),
        (
            {"seed": True},
            "schema key seed is True; it must be a whole number. Correct it",
        ),
        (
            {"episodes": {"by": "luck"}},
            "schema key episodes.by is 'luck'; it must be 'last' or 'ratio' or 'random' or 'time'. "
            "Correct it",
        ),
        (
            {"single": {"column": "x"}},
            "schema key single is {'column': 'x'}; it must be a list of tables. Correct it",
        ),
        (
            {"splits": {"shares": {"train": "half"}}},
            "schema key splits.shares is {'train': 'half'}; it must be a table of numbers. "
            "Correct it",
        ),
        (
            {"splits": {"shares": {"train": math.nan}}},
            "schema key splits.shares is {'train': nan}; it must be a table of numbers. Correct it",
        ),
        (
            {"dense": [{"column": "a", "fill": math.inf}]},
            "schema key dense.fill = inf is not a finite number. Correct the value",
        ),
        (
            {"seed": 2**64},
            "schema key seed = 18446744073709551616 is too large: at most 18446744073709551615 is "
            "allowed. Correct the value",
        ),
        (
            {"single": []},
            "the schema has no [[single]], [[multi]], [[dense]] or [[vector]] column. "
            "Add at least one",
        ),
        (
            {"single": [{"column": "a", "hash": 9, "vocabulary": 1}]},
            "column a needs either hash (rows of its table) or vocabulary (least count). "
            "Give exactly one",
        ),
        (
            {"single": [{"column": "a", "hash": 1}]},
            "column a has hash 1; 2 to 2^40 rows are allowed. Change it",
        ),
        (
            {"single": [{"column": "a", "vocabulary": -5}]},
            "column a has vocabulary -5; a value must be seen 1 to 2^40 times to get a row. "
            "Change it",
        ),
        (
            {"single": [{"column": "a", "hash": 9}, {"column": "b", "table": "a", "hash": 8}]},
            "column b and another column of table a differ in hash or vocabulary. Columns that "
            "share a table must agree",
        ),
        (
            {"single": [{"column": "a", "hash": 9, "width": 6}]},
            "column a has width 6; multiples of 4 up to 65536 are allowed. Change it",
        ),
        (
            {
                "single": [
                    {"column": "a", "hash": 9, "width": 8},
                    {"column": "b", "table": "a", "hash": 9},
                ]
            },
            "column b and another column of table a differ in width. Columns that share a table "
            "must agree",
        ),
        (
            {"dense": [{"column": "a"}, {"column": "a"}]},
            "column a is listed twice in one kind. Remove one of them",
        ),
        (
            {"episodes": {}},
            "episodes.by is last, which needs query_rows or query_share. Give exactly one of them",
        ),
        (
            {"episodes": {"query_share": 0.5}},
            "episodes.by is last, which needs query_rows. Add it, or use by = 'ratio'",
        ),
        (
            {"episodes": {"by": "ratio", "query_rows": 1}},
            "episodes.by is ratio, which needs query_share. Add it, or use by = 'last'",
        ),
        (
            {"episodes": {"by": "ratio", "query_share": 1.0}},
            "episodes.query_share is 1.0; it must lie between 0 and 1. Change it",
        ),
        (
            {"episodes": {"by": "time", "at": 3}},
            "episodes.by is time, which needs episodes.at and a [time] column. Add both",
        ),
        (
            {"episodes": {"query_rows": 0}},
            "episodes.query_rows is 0; at least 1 is needed. Raise it",
        ),
        (
            {"episodes": {"query_rows": 5, "min_rows": 5}},
            "episodes.min_rows is 5 and max_rows is 4096; 6 <= min_rows <= max_rows is needed, so "
            "that each episode has support and query rows. Change them",
        ),
        (
            {"splits": {"column": "x", "shares": {"train": 1.0}}},
            "splits has both column and shares. Give one of them",
        ),
        (
            {"splits": {"shares": {"train": 0.5, "valid": 0.6}}},
            "splits.shares add up to 1.1; positive shares with sum 1 are needed. Change them",
        ),
        (
            {"splits": {"shares": {"fit": 1.0}}},
            "splits.train is train, which is not among the shares fit. Add it",
        ),
    ],
)
def test_mistakes_are_named(parts: dict[str, Any], message: str) -> None:
    assert refusal(**parts) == message


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SchemaError) as caught:
        load_schema(tmp_path / "no.toml")
    assert str(caught.value) == (
        f"schema '{tmp_path}/no.toml' cannot be read: No such file or directory. Give a TOML file"
    )
    (tmp_path / "bad.toml").write_text("[task]\ncolumn = user\n")
    with pytest.raises(SchemaError) as caught:
        load_schema(tmp_path / "bad.toml")
    assert str(caught.value) == (
        f"schema '{tmp_path}/bad.toml' is no TOML: Invalid value (at line 2, column 10). Mend "
        "that line"
    )


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    item = '[[single]]\ncolumn = "item"\nhash = 9\n[episodes]\nquery_rows = 1\n'
    path.write_text(f'[task]\ncolumn = "user"\n[label]\ncolumn = "y"\n{item}')
    expected = load_schema(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as Windows' editors write it
    assert load_schema(path) == expected
