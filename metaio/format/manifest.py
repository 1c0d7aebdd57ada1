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
    """Size and checksums of one file; `footer_*` cover the Parquet footer with its length and
    magic."""

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
    """Where in a stream of increments a dataset stands, and which table rows mean another value
    from it on.

    `parent` is the fingerprint of the increment before, "" of the first. `window` is the span of
    event time [from, to) of its query rows, on the scale of the time column. `freed` counts by
    table the rows that lost their value. `resets` are the files reset/TABLE.parquet, with the rows
    that got another value: one column `row`, ascending.
    """

    stream: str
    increment: int
    parent: str
    window: tuple[int, ...]
    freed: dict[str, int] = field(default_factory=dict)
    resets: dict[str, FileEntry] = field(default_factory=dict)

    def identity(self) -> list[Any]:
        """Return what a fingerprint covers: it chains an increment to all before it."""
        return [self.stream, self.increment, self.parent, list(self.window)]


@dataclass(frozen=True)
class Manifest:
    """Everything in manifest.json but its own checksum. `task_kind` is "integer" or "hashed";
    `stream` is None for a dataset that stands alone."""

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
    stream: StreamPlace | None = None

    @property
    def raw_ids(self) -> dict[str, FileEntry]:
        """Return the files of raw ids by role, "task" or "item"; none in datasets of an earlier
        release, nor where ids are kept otherwise. Raises ValueError: what the report says of them
        is nothing that a writer writes."""
        found: dict[str, FileEntry] = parse_typed(
            dict[str, FileEntry], self.report.get(RAW_IDS_FOLDER, {}), "manifest.report.raw_ids"
        )
        if not found.keys() <= {"task", "item"}:
            raise ValueError(f"manifest.report.raw_ids: {', '.join(found)}; task, item are allowed")
        return found

    @property
    def support_is_past(self) -> bool:
        """Tell whether the support rows of an episode are older than its query rows."""
        schema = self.recipe.get("schema")
        if not isinstance(schema, dict):
            return self.recipe.get("order") == "time"
        rule = schema.get("episodes")
        return isinstance(rule, dict) and "time" in schema and rule.get("by") != "random"

    @property
    def support_is_fixed(self) -> bool:
        """Tell whether its protocol says which rows of a task are support: by time, by membership,
        or by windows of time. Otherwise they are drawn, and another draw is as good."""
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
    """Return the checksum of a JSON object, of all in it but its own: reformatting the file does no
    harm, changing a value does."""
    return xxh3_hex(canonical_json({name: body[name] for name in body if name != "checksum"}))


def add_checksum(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its checksum behind all of the rest."""
    # There and back, so that the checksum sees what a reader will see: lists, not tuples.
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
    """Return what `encode_manifest` was given; `name` is the address that messages speak of."""
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
