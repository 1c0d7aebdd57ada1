"""Schema files: every mistake is one line that names the key."""

from pathlib import Path
from typing import Any

import pytest

from metaio import SchemaError
from metaio.prepare.schema.schema_file import load_schema, parse_schema
from tests.support.refusals import catch_message

GOOD: dict[str, Any] = {
    "task": {"column": "user"}, "label": {"column": "click"},
    "single": [{"column": "item", "hash": 100}], "episodes": {"query_rows": 5, "min_rows": 6},
}  # fmt: skip


def refusal(**parts: Any) -> str:
    return catch_message(SchemaError, parse_schema, {**GOOD, **parts})


def test_a_whole_schema_survives_json() -> None:
    schema = parse_schema({**GOOD, "time": {"column": "ts"}, "splits": {"shares": {"train": 1}}})
    assert parse_schema(schema.to_json()) == schema


def test_columns_are_listed_once() -> None:
    schema = parse_schema({**GOOD, "dense": [{"column": "item"}], "splits": {"column": "part"}})
    assert schema.columns == ["user", "click", "item", "part"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"task": {"columm": "x"}}, "schema key task.columm is unknown; did you mean task.column?"),
        ({"label": {}}, "schema key label.column is missing; it has no default. Add it"),
        ({"label": {"column": 3}}, "schema key label.column is 3; it must be text. Correct it"),
        (
            {"dense": [{"column": "click"}]},
            "column click is the label and a feature: the model would be told the answer. Remove "
            "the feature",
        ),
        (
            {"single": [{"column": "a/b", "vocabulary": 2}]},
            "table 'a/b' has a vocabulary, which becomes a file of that name; allowed are "
            'letters, digits, spaces, ".", "_" and "-", at most 200 bytes, neither "." nor "..". '
            "Give the column another table",
        ),
        (
            {"episodes": {"by": "luck"}},
            "schema key episodes.by is 'luck'; it must be 'last' or 'ratio' or 'random' or 'time'. "
            "Correct it",
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
            {"single": [{"column": "a", "hash": 9}, {"column": "b", "table": "a", "hash": 8}]},
            "column b and another column of table a differ in hash or vocabulary. Columns that "
            "share a table must agree",
        ),
        (
            {"episodes": {}},
            "episodes.by is last, which needs query_rows or query_share. Give exactly one of them",
        ),
        (
            {"episodes": {"query_rows": 5, "min_rows": 5}},
            "episodes.min_rows is 5 and max_rows is 4096; 6 <= min_rows <= max_rows is needed, so "
            "that each episode has support and query rows. Change them",
        ),
        (
            {"splits": {"shares": {"train": 0.5, "valid": 0.6}}},
            "splits.shares add up to 1.1; positive shares with sum 1 are needed. Change them",
        ),
    ],
)
def test_mistakes_are_named(parts: dict[str, Any], message: str) -> None:
    assert refusal(**parts) == message


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    assert catch_message(SchemaError, load_schema, tmp_path / "no.toml") == (
        f"schema '{tmp_path}/no.toml' cannot be read: No such file or directory. Give a TOML file"
    )
    (tmp_path / "bad.toml").write_text("[task]\ncolumn = user\n")
    assert catch_message(SchemaError, load_schema, tmp_path / "bad.toml") == (
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
