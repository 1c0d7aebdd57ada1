"""JSON files that carry their own checksum: a file that was edited or cut is refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metaio.errors import FormatError
from metaio.format.atomic_folder import flush_to_disk
from metaio.format.manifest import add_checksum, compute_checksum

VERSION = 1


def write_checked_json(path: Path, kind: str, body: Mapping[str, Any]) -> None:
    """Write a JSON file of this kind atomically: it gets its name once it is on the disk."""
    found = add_checksum({"format": kind, "version": VERSION, **body})
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    flush_to_disk([partial])
    # Its content is on the disk by now: a crash leaves the old file or all of the new one.
    partial.replace(path)
    flush_to_disk([path.parent])


def parse_checked_json(content: bytes, name: str, kind: str, remedy: str) -> dict[str, Any]:
    """Return the body of the JSON file `name`, after checking its format, version and checksum."""
    try:
        body = json.loads(content)
    # Deep nesting overflows the parser's recursion.
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name} is not JSON: it was cut short or edited. {remedy}") from error
    if not isinstance(body, dict) or body.get("format") != kind:
        raise FormatError(f"{name} is no file of format {kind}. {remedy}")
    if body.get("version") != VERSION:
        raise FormatError(
            f"{name} has version {body.get('version')!r:.20}, this release reads version "
            f"{VERSION}. Read it with the release that wrote it"
        )
    if body.get("checksum") != compute_checksum(body):
        raise FormatError(f"{name} does not match its own checksum: it was edited. {remedy}")
    return body


def has_shape(value: Any, shape: Any) -> bool:
    """Return whether a JSON value has this shape: a type, a list of one entry, an object with at
    least these keys, or, under the key "", an object whose values all have one shape.

    >>> has_shape({"a": [1], "b": 0}, {"a": [int]}), has_shape({"a": [1], "b": ""}, {"": [int]})
    (True, False)"""
    if isinstance(shape, list):
        return isinstance(value, list) and all(has_shape(one, shape[0]) for one in value)
    if not isinstance(shape, dict):
        # Not isinstance: true is a bool, which Python counts among the integers.
        return type(value) is shape
    if not isinstance(value, dict):
        return False
    keys = value if "" in shape else shape
    return all(
        key in value and has_shape(value[key], shape.get(key, shape.get(""))) for key in keys
    )
