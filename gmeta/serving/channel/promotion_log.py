"""promotions.jsonl: each line carries a checksum of its own, and that of the line before it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gmeta.platform.files.checked_json import json_object
from gmeta.serving.channel.verdict_file import is_verdict
from metaio.format.checked_json import has_shape
from metaio.format.manifest import canonical_json, xxh3_hex

PROMOTIONS = "promotions.jsonl"
PROMOTED, ROLLED_BACK, REFUSED = "promoted", "rolled back", "refused"
_BEFORE, _SEAL = "before", "seal"
# An earlier release sealed no line, and wrote no other keys.
_UNSEALED_KEYS = {"number", "checksum", "action", "at", "verdict", "model"}


@dataclass
class PromotionLog:
    """The sound lines of a log, oldest first, and what is wrong with it first ("": nothing)."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    damage: str = ""
    # What the next line follows: the seal of the last one, or a checksum of all unsealed ones.
    last: str = ""
    seals: set[str] = field(default_factory=set)


def parse_log(content: bytes) -> PromotionLog:
    """Return what is sound of a log, and its first damage."""
    log, num_bytes, is_sealed = PromotionLog(), 0, False
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        num_bytes += len(line)
        try:
            entry = _parse_entry(line, may_lack_seal=not is_sealed)
        except ValueError as error:
            log.damage = log.damage or f"line {number} {error}"
            continue
        if is_sealed or _SEAL in entry:
            if entry[_BEFORE] != log.last:
                log.damage = log.damage or f"line {number} does not follow the line before it"
            is_sealed, log.last = True, entry[_SEAL]
        else:
            log.last = xxh3_hex(content[:num_bytes])
        log.seals.add(log.last)
        log.entries.append(entry)
    return log


def format_entry(entry: Mapping[str, Any], before: str) -> bytes:
    """Return the line of an entry behind the line with the seal `before`."""
    body = {**entry, _BEFORE: before}
    body.pop(_SEAL, None)
    return canonical_json({**body, _SEAL: xxh3_hex(canonical_json(body))}) + b"\n"


def _parse_entry(line: bytes, *, may_lack_seal: bool) -> dict[str, Any]:
    """Return the entry in a line; raise ValueError with what is wrong with it."""
    try:
        entry = json_object(line.decode())
    except ValueError as error:
        raise ValueError(f"cannot be read ({error})") from error
    if not (may_lack_seal and entry.keys() <= _UNSEALED_KEYS):
        body = {key: value for key, value in entry.items() if key != _SEAL}
        is_sealed = has_shape(entry, {_BEFORE: str, _SEAL: str})
        if not is_sealed or entry[_SEAL] != xxh3_hex(canonical_json(body)):
            raise ValueError("does not match its own checksum: it was edited")
    action, verdict = entry.get("action"), entry.get("verdict")
    if not (
        has_shape({"model": "", **entry}, {"at": str, "model": str})
        and action in (PROMOTED, ROLLED_BACK, REFUSED)
        and (type(entry.get("number")) is int or action == REFUSED)
        and (verdict is None or is_verdict(verdict))
    ):
        raise ValueError("is no promotion, rollback or refusal")
    return entry
