"""One version of a model as a folder: an exported model, or a delta, whose checksum covers its
parent's, so that the newest names its entire chain."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gmeta.errors import GMetaError
from gmeta.platform.files.checksums import FileChecksum, find_differences, parse_entries
from gmeta.serving.exported_folder import (
    CONFIG_FILE,
    DELTA_FILE,
    REMEDY,
    ExportedConfig,
    checksum_in,
    read_config,
)
from metaio.errors import FormatError
from metaio.format.atomic_folder import copy_folder
from metaio.format.checked_json import parse_checked_json
from metaio.format.manifest import xxh3_hex
from metaio.format.typed_json import parse_typed

DELTA_FORMAT = "gmeta-delta"
MODEL_FILE = "model.json"  # the config.json of the model that a delta leads to


@dataclass(frozen=True)
class ParentVersion:
    """The version that a delta builds on: its number in the channel, and its checksum."""

    number: int
    checksum: str

    @property
    def name(self) -> str:
        """Return the number and the first digits of the checksum, as people quote it."""
        return f"{self.number}-{self.checksum[:12]}"


@dataclass(frozen=True)
class ChangedRows:
    """How many rows of a table a delta holds, and how many the table has."""

    rows: int
    num_rows: int


@dataclass(frozen=True)
class DeltaConfig:
    """What delta.json says."""

    parent: ParentVersion
    files: dict[str, FileChecksum]
    # The checksums of the values that each vocabulary has once the delta is applied.
    vocabularies: dict[str, str]
    touched: dict[str, ChangedRows]
    full_bytes: int  # of the full model


@dataclass(frozen=True)
class Version:
    """One version; `delta` is None of a full one. `number` is 0 outside a channel."""

    folder: Path
    checksum: str
    num_bytes: int
    full_bytes: int
    delta: DeltaConfig | None = None
    number: int = 0

    @property
    def kind(self) -> str:
        """Return "full" or "delta"."""
        return "full" if self.delta is None else "delta"

    @property
    def name(self) -> str:
        """Return its name, as ParentVersion.name."""
        return ParentVersion(self.number, self.checksum).name


@dataclass(frozen=True)
class VersionChain:
    """A full version and the deltas over it, oldest first; the last of them is the version."""

    base: Version
    deltas: Sequence[Version] = field(default_factory=tuple)

    @property
    def newest(self) -> Version:
        """Return the version that the chain leads to."""
        return self.deltas[-1] if self.deltas else self.base

    @property
    def delta_bytes(self) -> int:
        """Count the bytes of the deltas."""
        return sum(delta.num_bytes for delta in self.deltas)


def is_delta(folder: Path) -> bool:
    """Return whether `gmeta export --since` wrote a delta here."""
    return (folder / DELTA_FILE).is_file()


def read_version(folder: Path, number: int = 0) -> Version:
    """Return the version in a folder that `gmeta export` wrote; only its description is read."""
    if is_delta(folder):
        path = folder / DELTA_FILE
        body = parse_checked(path.read_bytes(), str(path), DELTA_FORMAT)
        delta = _parse_delta(folder, body)
        num_bytes = sum(entry.num_bytes for entry in delta.files.values())
        return Version(folder, body["checksum"], num_bytes, delta.full_bytes, delta, number)
    config = read_config(folder)
    num_bytes = sum(entry.num_bytes for entry in config.files.values())
    return Version(folder, checksum_in(folder), num_bytes, num_bytes, None, number)


def model_config(version: Version) -> ExportedConfig:
    """Return the config of the model that a version leads to."""
    return read_config(version.folder, CONFIG_FILE if version.delta is None else MODEL_FILE)


def model_checksum(folder: Path) -> str:
    """Return the checksum of the model that a version leads to, be it full or a delta."""
    # model.json is a copy of the model's config.json, so both kinds have the same hash.
    name = MODEL_FILE if is_delta(folder) else CONFIG_FILE
    return xxh3_hex((folder / name).read_bytes())


def check_version(version: Version) -> None:
    """Raise GMetaError for a file of a version that is missing, cut short or altered."""
    listed_in = description_of(version.folder)
    for difference in find_differences(version.folder, files_of(version), listed_in, contents=True):
        raise GMetaError(f"{difference}. {REMEDY}")


def copy_version(version: Version, to: Path, copied: Callable[[Path, Path], Any]) -> None:
    """Copy what a version lists, and what describes it, to a folder by `copied`."""
    # What else lies in its folder may be a stranger's link to anything. The description goes last.
    copy_folder(version.folder, to, copied, (*files_of(version), description_of(version.folder)))


def description_of(folder: Path) -> str:
    """Return the name of the file that describes the version in a folder."""
    return DELTA_FILE if is_delta(folder) else CONFIG_FILE


def files_of(version: Version) -> Mapping[str, FileChecksum]:
    """Return what a version lists: all of its files but the description."""
    return read_config(version.folder).files if version.delta is None else version.delta.files


def _parse_delta(folder: Path, body: dict[str, Any]) -> DeltaConfig:
    # The checksum held, but whoever can write the folder can make it hold.
    try:
        fields_by_name = {part.name: body[part.name] for part in fields(DeltaConfig)}
        delta: DeltaConfig = parse_typed(DeltaConfig, fields_by_name, "delta")
        # parse_entries refuses names that lead out of the folder.
        if MODEL_FILE not in parse_entries(fields_by_name["files"]):
            raise ValueError(f"it lists no file {MODEL_FILE}")
    except (LookupError, ValueError, TypeError) as error:
        raise GMetaError(
            f"{folder / DELTA_FILE} is not what an export writes ({error!r:.200}). {REMEDY}"
        ) from error
    return delta


def parse_checked(
    content: bytes,
    name: str,
    kind: str,
    remedy: str = "Bring the file back from a copy, or make it anew",
) -> dict[str, Any]:
    """Return the object in a file that `write_checked_json` wrote, its checksum compared."""
    try:
        return parse_checked_json(content, name, kind, remedy)
    except FormatError as error:
        # metaio's errors are another tree: who uses a channel catches GMetaError.
        raise GMetaError(str(error)) from error
