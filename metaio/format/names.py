"""Names that become files and folders: which ones a schema, a log or a manifest may give."""

import re
import reprlib

from metaio.errors import SchemaError

# A valid name leads one step down, never up and never elsewhere: names come from files of others.
NAME_RULE = 'letters, digits, spaces, ".", "_" and "-", at most 200 bytes, neither "." nor ".."'
_NAME = re.compile(r"(?!\.{1,2}\Z)[\w .-]+")
# Narrower: a split's name is typed on command lines, and "vocabulary" is a folder of its own.
_SPLIT = re.compile(r"(?!vocabulary\Z)[a-z0-9][a-z0-9-]{,199}")
_MAX_BYTES = 200  # file systems allow 255, and endings such as .parquet are added


def is_name(value: object) -> bool:
    """Return whether `value` may name one file or folder; messages quote NAME_RULE.

    >>> is_name("user-cold"), is_name(".."), is_name("../x"), is_name("a/b"), is_name("")
    (True, False, False, False, False)"""
    return (
        isinstance(value, str)
        and _NAME.fullmatch(value) is not None
        and len(value.encode()) <= _MAX_BYTES
    )


def is_path_below(value: object) -> bool:
    """Return whether `value` is a path of names joined by "/", so that it leads below its root.

    >>> is_path_below("train/blocks.parquet"), is_path_below("/etc/passwd"), is_path_below("a/../b")
    (True, False, False)"""
    return isinstance(value, str) and all(is_name(part) for part in value.split("/"))


def check_split_name(name: str) -> None:
    """Raise SchemaError unless a split, whose name becomes a folder, may have this name."""
    if not _SPLIT.fullmatch(name):
        raise SchemaError(
            f"split name {reprlib.repr(name)} is not allowed: lower-case letters, digits and "
            'dashes only, at most 200, and not "vocabulary". Rename the split'
        )
