"""promotions.jsonl and verdict.json, which carry checksums; each line of the log has its own, and
that of the line before it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gmeta.platform.files.checked_json import json_object, read_json
from metaio.format.checked_json import has_shape, write_checked_json
from metaio.format.manifest import canonical_json, compute_checksum, xxh3_hex

PROMOTIONS = "promotions.jsonl"
PROMOTED, ROLLED_BACK, REFUSED = "promoted", "rolled back", "refused"
_VERDICT_FORMAT = "gmeta-verdict"
# An earlier release wrote no other keys into a line, and none of these into a verdict's file.
_UNSEALED_KEYS = {"number", "checksum", "action", "at", "verdict", "model"}
_FILE_KEYS = {"format", "version", "checksum"}


@dataclass
class PromotionLog:
    """The sound lines of a log, oldest first, and its first damage ("": none)."""

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
        is_sealed = is_sealed or "seal" in entry
        if is_sealed and entry.get("before") != log.last:
            log.damage = log.damage or f"line {number} does not follow the line before it"
        log.last = entry["seal"] if is_sealed else xxh3_hex(content[:num_bytes])
        log.seals.add(log.last)
        log.entries.append(entry)
    return log


def extend_log(content: bytes, entries: Iterable[Mapping[str, Any]]) -> bytes:
    """Return a log with the lines of these entries behind it."""
    before = parse_log(content).last
    for entry in entries:
        body = {**entry, "before": before}
        before = _compute_seal(body)
        content += canonical_json({**body, "seal": before}) + b"\n"
    return content


def _compute_seal(entry: Mapping[str, Any]) -> str:
    return xxh3_hex(canonical_json({key: entry[key] for key in entry if key != "seal"}))


def _parse_entry(line: bytes, *, may_lack_seal: bool) -> dict[str, Any]:
    """Return the entry in a line; raise ValueError with what is wrong with it."""
    try:
        entry = json_object(line.decode())
    except ValueError as error:
        raise ValueError(f"cannot be read ({error})") from error
    is_former = may_lack_seal and entry.keys() <= _UNSEALED_KEYS
    if not is_former and entry.get("seal") != _compute_seal(entry):
        raise ValueError("does not match its own checksum: it was edited")
    if not (
        has_shape({"model": "", **entry}, {"at": str, "model": str})
        and entry.get("action") in (PROMOTED, ROLLED_BACK, REFUSED)
        and (type(entry.get("number")) is int or entry["action"] == REFUSED)
        and (entry.get("verdict") is None or _is_verdict(entry["verdict"]))
    ):
        raise ValueError("is no promotion, rollback or refusal")
    return entry


def write_verdict(path: Path, verdict: Mapping[str, Any]) -> None:
    """Write a verdict, whole or not at all."""
    write_checked_json(path, _VERDICT_FORMAT, verdict)


def read_verdict(path: Path) -> dict[str, Any]:
    """Return the verdict in a file. Raise ValueError for one that is damaged, with the reason."""
    body = read_json(path)
    if _FILE_KEYS & body.keys() and (
        body.get("format") != _VERDICT_FORMAT or body.get("checksum") != compute_checksum(body)
    ):
        raise ValueError("it does not match its own checksum: it was edited")
    verdict = {key: value for key, value in body.items() if key not in _FILE_KEYS}
    if not _is_verdict(verdict) or verdict.get("verdict") not in ("promote", "refuse"):
        raise ValueError("it is not what the judge writes")
    return verdict


def _is_verdict(value: Any) -> bool:
    known = {"model": "", "reasons": []}
    return isinstance(value, dict) and has_shape(known | value, {"model": str, "reasons": [str]})
