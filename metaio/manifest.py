"""The manifest: what a dataset holds, and the checksums that every other file is held against."""

import json
from dataclasses import dataclass, field
from typing import Any

import xxhash

from metaio.errors import FormatError
from metaio.features import Features
from metaio.layout import FORMAT_NAME, FORMAT_VERSION, MANIFEST_NAME


@dataclass(frozen=True)
class FileEntry:
    """Size and checksums of one file; `footer_*` cover the Parquet footer with its length and
    magic.
    """

    num_bytes: int
    xxh3: str
    footer_bytes: int
    footer_xxh3: str


@dataclass(frozen=True)
class ShardEntry:
    """One shard: consecutive blocks, and its file of each stream."""

    num_blocks: int
    num_episodes: int
    num_rows: int
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class SplitEntry:
    """One split: its shards in stored order, and the file of its block table."""

    num_episodes: int
    num_rows: int
    num_values: int
    block_table: FileEntry
    shards: tuple[ShardEntry, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything in manifest.json but its own checksum. `task_kind` is "integer" or "hashed"."""

    features: Features
    task: str
    task_kind: str
    label: str
    seed: int
    block_rows: int
    splits: dict[str, SplitEntry]
    fingerprint: str
    recipe: dict[str, Any]
    recipe_xxh3: str
    protocol: str
    vocabularies: dict[str, FileEntry] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    created_by: dict[str, str] = field(default_factory=dict)


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value that checksums are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def xxh3_hex(data: bytes | memoryview) -> str:
    """xxh3_64 as 16 hexadecimal digits."""
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json, checksum included."""
    body: dict[str, Any] = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **vars(manifest)}
    body["features"] = manifest.features.to_json()
    # There and back, so that the checksum sees what a reader will see: lists, not tuples.
    body = json.loads(json.dumps(body, default=vars))
    # Last, over all of the rest.
    body["checksum"] = xxh3_hex(canonical_json(body))
    # Indented for people; the checksum is over the canonical form.
    return json.dumps(body, indent=1).encode()


def decode_manifest(data: bytes, name: str) -> Manifest:
    """Inverse of `encode_manifest`; `name` is the address that messages speak of.

    Raises:
        FormatError: it is not a manifest, of another version, or altered since it was written.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _altered(name, f"is not JSON ({error})") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        raise _altered(name, f"is not a {FORMAT_NAME} manifest")
    if body.get("version") != FORMAT_VERSION:
        raise FormatError(
            f"{name} has format version {body.get('version')}, this release reads version "
            f"{FORMAT_VERSION}. "
            "Prepare the dataset again, or read it with the release that wrote it"
        )
    # Over the canonical form: reformatting the file does no harm, changing a value does.
    checksum = body.pop("checksum", None)
    if checksum != xxh3_hex(canonical_json(body)):
        raise _altered(name, "does not match its own checksum")
    return _from_json(body)


def _altered(name: str, what: str) -> FormatError:
    return FormatError(
        f"{name} {what}: it was cut short or edited. {MANIFEST_NAME} is written by prepare alone; "
        "copy the dataset again or prepare it again"
    )


def _from_json(body: dict[str, Any]) -> Manifest:
    # Only a body that passed its checksum gets here, so its shape is what encode_manifest wrote.
    kept = {name: value for name, value in body.items() if name not in ("format", "version")}
    kept["features"] = Features.from_json(kept["features"])
    kept["splits"] = {name: _split_from_json(split) for name, split in kept["splits"].items()}
    kept["vocabularies"] = {
        name: FileEntry(**entry) for name, entry in kept["vocabularies"].items()
    }
    return Manifest(**kept)


def _split_from_json(value: dict[str, Any]) -> SplitEntry:
    shards = tuple(
        ShardEntry(
            **{**shard, "files": {name: FileEntry(**file) for name, file in shard["files"].items()}}
        )
        for shard in value["shards"]
    )
    return SplitEntry(
        **{**value, "block_table": FileEntry(**value["block_table"]), "shards": shards}
    )
