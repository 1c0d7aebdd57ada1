"""How the schema of a stream may change between increments: inputs join, policies change."""

from dataclasses import replace
from typing import Any

from metaio.errors import SchemaError
from metaio.prepare.schema.rules import StreamRule
from metaio.prepare.schema.schema import IdColumn, Schema

# Keys of [stream] that judge files, and change nothing of what rows mean.
_POLICIES = ("missing", "late_share", "drift", "label_shift", "null_shift", "rows_factor")
_INPUTS = ("single", "multi", "dense", "vector")


def apply_changes(before: Schema, after: Schema, stream: str) -> Schema:
    """Return `after`, which differs from a stream's schema by inputs that join and by policies.
    Raises SchemaError: it differs by more, or an input that joins has no null."""
    same: dict[str, Any] = {
        kind: tuple(one for one in getattr(after, kind) if one in getattr(before, kind))
        for kind in _INPUTS
    }
    rules = before.stream or StreamRule(), after.stream or StreamRule()
    policies: dict[str, Any] = {name: getattr(rules[0], name) for name in _POLICIES}
    alike = replace(after, **same, stream=replace(rules[1], **policies))
    differing = [name for name, part in vars(before).items() if getattr(alike, name) != part]
    if differing:
        raise SchemaError(
            f"the schema differs from that of the stream {stream} in {', '.join(differing)}: rows "
            "of both would not mean the same. Inputs may join, and policies change "
            "(docs/streams.md); else leave --schema out, or begin a new stream"
        )
    known = {one.column for kind in _INPUTS for one in getattr(before, kind)}
    for kind in _INPUTS:
        for one in getattr(after, kind):
            is_id = isinstance(one, IdColumn)
            if one.column in known or one in getattr(before, kind):
                continue
            if one.null != "unknown" if is_id else one.fill is None:
                null = 'null = "unknown"' if is_id else "fill = VALUE"
                raise SchemaError(
                    f"column {one.column} joins the stream {stream}, whose earlier rows have none, "
                    f"and has no null. Say what it is: {null}"
                )
    return after


def may_become(before: Schema | None, after: Schema | None) -> bool:
    """Return whether the schema of one increment of a stream may be that of a later one."""
    if before == after or before is None or after is None:
        return before == after
    try:
        apply_changes(before, after, "")
    except SchemaError:
        return False
    return True
