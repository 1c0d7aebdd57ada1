"""Schemas from TOML files, and from the JSON of manifests; unknown keys are refused."""

import tomllib
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from gmeta_keys import Wording, parse
from metaio.errors import SchemaError
from metaio.prepare.schema import Schema
from metaio.prepare.schema_check import check_schema


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
    check_schema(schema)
    return schema


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
