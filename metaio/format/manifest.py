"""The manifest: what a dataset holds, and the checksums that every other file is held against."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from metaio.errors import FormatError, make_content_error
from metaio.format.features import Features
from metaio.format.layout import FORMAT_NAME, FORMAT_VERSION, MANIFEST_NAME, RAW_IDS_FOLDER
from metaio.format.typed_json import parse_typed

MIN_FOOTER_BYTES = 8  # of a Parquet file: the length of its footer, and "PAR1"


@dataclass(frozen=True)
class FileEntry:
    """Size and checksums of one file; `footer_*` cover Parquet's footer, length and magic."""

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
class StreamPlace:
    """The place of a dataset in a stream, and the table rows that mean another value from it on."""

    stream: str
    increment: int
    # Fingerprint of the increment before; "" of the first.
    parent: str
    # Span of event time [from, to) of the query rows, on the scale of the time column.
    window: tuple[int, ...]
    # By table, how many rows lost their value.
    freed: dict[str, int] = field(default_factory=dict)
    # reset/TABLE.parquet: the rows that got another value, ascending.
    resets: dict[str, FileEntry] = field(default_factory=dict)

    def identity(self) -> list[Any]:
        """Return what a fingerprint covers; by `parent` it chains all increments before."""
        return [self.stream, self.increment, self.parent, list(self.window)]


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json but its checksum."""

    features: Features
    task: str
    # "integer" or "hashed".
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
    # None for a dataset that is no increment of a stream.
    stream: StreamPlace | None = None

    @property
    def raw_ids(self) -> dict[str, FileEntry]:
        """Return the files of raw ids by role, "task" or "item"; empty in older datasets."""
        found: dict[str, FileEntry] = parse_typed(
            dict[str, FileEntry], self.report.get(RAW_IDS_FOLDER, {}), "manifest.report.raw_ids"
        )
        # The names become paths, so no other is let through.
        if not found.keys() <= {"task", "item"}:
            raise ValueError(f"manifest.report.raw_ids: {', '.join(found)}; task, item are allowed")
        return found

    @property
    def support_is_past(self) -> bool:
        """Return whether the support rows of an episode are older than its query rows."""
        schema = self.recipe.get("schema")
        if not isinstance(schema, dict):
            return self.recipe.get("order") == "time"
        rule = schema.get("episodes")
        return isinstance(rule, dict) and "time" in schema and rule.get("by") != "random"

    @property
    def support_is_fixed(self) -> bool:
        """Return whether the protocol fixes the support rows: by time, membership or windows."""
        schema = self.recipe.get("schema")
        if self.support_is_past or not isinstance(schema, dict):
            return self.support_is_past
        splits = schema.get("splits")
        return "membership" in schema or (isinstance(splits, dict) and "by_time" in splits)


def canonical_json(value: Any) -> bytes:
    """Return the one way to write a JSON value of which checksums are taken."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


xxh3_hex = xxhash.xxh3_64_hexdigest  # 16 digits


def compute_checksum(body: Mapping[str, Any]) -> str:
    """Return the checksum of a JSON object without its own checksum."""
    # Of canonical JSON: reformatting the file does no harm, changing a value does.
    return xxh3_hex(canonical_json({name: body[name] for name in body if name != "checksum"}))


def add_checksum(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its checksum as the last key."""
    # Through JSON and back: the checksum must cover what a reader sees, lists and not tuples.
    found: dict[str, Any] = json.loads(json.dumps(body, default=vars))
    return {**found, "checksum": compute_checksum(found)}


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json, checksum included."""
    body: dict[str, Any] = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **vars(manifest)}
    body["features"] = manifest.features.to_json()
    if manifest.stream is None:
        del body["stream"]  # manifests of datasets that stand alone stay as they were
    return json.dumps(add_checksum(body), indent=1).encode()


def decode_manifest(data: bytes, name: str) -> Manifest:
    """Return the manifest that `encode_manifest` wrote; `name` is its address in messages."""
    try:
        body = json.loads(data)
        json.dumps(body, ensure_ascii=False).encode()  # half of a character could not be shown
    except (ValueError, RecursionError) as error:
        raise _make_altered_error(name, f"is not JSON ({error})") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
        raise _make_altered_error(name, f"is not a {FORMAT_NAME} manifest")
    if body.get("version") != FORMAT_VERSION:
        raise FormatError(
            f"{name} has format version {body.get('version')}, this release reads version "
            f"{FORMAT_VERSION}. "
            "Prepare the dataset again, or read it with the release that wrote it"
        )
    if body.pop("checksum", None) != compute_checksum(body):
        raise _make_altered_error(name, "does not match its own checksum")
    kept = {key: value for key, value in body.items() if key not in ("format", "version")}
    try:
        manifest: Manifest = parse_typed(Manifest, kept, "manifest")
    except ValueError as error:
        raise make_content_error(f"{name}: {error}") from error
    return manifest


def _make_altered_error(name: str, what: str) -> FormatError:
    return FormatError(
        f"{name} {what}: it was cut short or edited. {MANIFEST_NAME} is written by prepare alone; "
        "copy the dataset again or prepare it again"
    )
