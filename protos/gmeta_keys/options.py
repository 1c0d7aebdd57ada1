"""Options that one model or algorithm alone has: the keys of its section's `options`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gmeta_keys import Wording, parse


def parse_options(
    kind: type | None,
    given: Mapping[str, Any],
    known: Mapping[str, type | None],
    wording: Wording,
    prefix: str,
    owner: str,
) -> Any:
    """Return `given` as the dataclass `kind`; None where `owner` has none. Options of the others
    that are `known` are checked alike and have no effect, so that a config can be tried under
    another name. Raises wording.error: an option is unknown, of a wrong type, or outside its
    bounds."""
    given = dict(given)
    for other in filter(None, known.values()):
        for name in (names_of(other) - names_of(kind)) & given.keys():
            parse(other, {name: given.pop(name)}, wording, prefix)
    if kind is not None:
        return parse(kind, given, wording, prefix)
    if given:
        raise wording.error(
            f"{prefix}{next(iter(given))} is given, but {owner} has no options. Remove it"
        )
    return None


def names_of(kind: type | None) -> set[str]:
    """Return the names of a dataclass's fields; none of None."""
    return set() if kind is None else {item.name for item in fields(kind)}
