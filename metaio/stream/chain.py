"""A stream of increments as readers see it; each increment is a dataset."""

# Imports nothing that only prepare needs: a trainer opens a stream as fast as a dataset.
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import pyarrow as pa

from metaio.errors import FormatError, NoDatasetError, make_content_error
from metaio.format.checked_json import has_shape, parse_checked_json
from metaio.format.dataset import Dataset, open_dataset, read_column
from metaio.format.layout import MANIFEST_NAME, RESET_FOLDER
from metaio.format.manifest import Manifest, decode_manifest
from metaio.format.storage import Storage, find_file_system, is_local
from metaio.ragged import Int64

STREAM_FILE = "stream.json"
STREAM_FORMAT = "gmeta-stream"
INCREMENTS = "increments"
FIRST_INCREMENT = 1
TICKS_PER_S = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9, "day": 1 / 86_400}
# Shapes of what is read of reports and descriptions, which somebody else may have written.
_COUNTS = dict.fromkeys(("rows", "capacity", "new", "freed", "pending"), int)
_REPORT = {
    **dict.fromkeys(("rows", "late", "too_late"), int),
    "tables": {"": _COUNTS},
    "tasks": {"": {"new": int, "returning": int}},
    "alarms": [str],
    "inputs": [{"name": str}],
}
_RECIPE = dict.fromkeys(("schema", "moments", "kinds"), dict)
_DESCRIPTION = dict.fromkeys(("stream", "task_kind", "time_type", "time_unit"), str) | {
    **_RECIPE,
    "columns": [str],
}
# From 1973 to 2286; integers that do not count from 1970 are smaller.
_LEAST_S, _MOST_S = 1e8, 1e10
_NUMBER = re.compile(r"\d{6,}")


def name_increment_folder(number: int) -> str:
    """Return the name of an increment's folder.

    >>> name_increment_folder(7)
    '000007'"""
    return f"{number:06d}"


def format_event_time(ticks: int, unit: str) -> str:
    """Return an event time in UTC, or as a number if it does not count from 1970.

    >>> format_event_time(1_767_225_602_000_000, "us"), format_event_time(86_400, "s")
    ('2026-01-01 00:00:02', '86,400')"""
    seconds = ticks / TICKS_PER_S[unit]
    if not _LEAST_S <= seconds < _MOST_S:
        return f"{ticks:,}"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def infer_time_unit(ticks: int) -> str | None:
    """Return the unit of a time that counts from 1970, None if it does not look like one.

    >>> [infer_time_unit(ticks) for ticks in (1_767_225_602, 1_767_225_602_000, 86_400)]
    ['s', 'ms', None]"""
    fitting = (u for u in ("s", "ms", "us", "ns") if _LEAST_S <= ticks / TICKS_PER_S[u] < _MOST_S)
    return next(fitting, None)


@dataclass(frozen=True)
class IncrementRecord:
    """One increment: its place in the chain, and the report of `gmeta prepare --extend`."""

    number: int
    fingerprint: str
    parent: str
    window: tuple[int, int]
    num_rows: int  # of the train split
    report: Mapping[str, Any]


class Stream:
    """The increments of a stream, oldest first; each manifest is read when it is first needed."""

    def __init__(self, storage: Storage, description: dict[str, Any], numbers: list[int]) -> None:
        self.description = description
        self.numbers = numbers
        self._storage = storage
        self._manifests: dict[int, Manifest] = {}

    @property
    def url(self) -> str:
        """Return where the stream was opened."""
        return self._storage.url

    @property
    def id(self) -> str:
        """Return the name by which the manifests of all increments refer to this stream."""
        return str(self.description["stream"])

    @property
    def ticks_per_s(self) -> float:
        """Return how many units of the stream's times a second has."""
        return TICKS_PER_S[str(self.description["time_unit"])]

    @cached_property
    def records(self) -> list[IncrementRecord]:
        """Return every increment, oldest first; reads all manifests."""
        found = [self.record(number) for number in self.numbers]
        parent = ""
        # Each manifest holds its parent's fingerprint, so a removed or replaced increment shows.
        for expected, record in enumerate(found, start=FIRST_INCREMENT):
            if record.number != expected or record.parent != parent:
                raise FormatError(
                    f"{self.url}: increment {record.number} does not continue increment "
                    f"{expected - 1}: one was removed or replaced. Put back what prepare --extend "
                    "wrote, or begin a new stream"
                )
            parent = record.fingerprint
        return found

    def record(self, number: int) -> IncrementRecord:
        """Return one increment by its number."""
        if number not in self._manifests:
            path = f"{self._path(number)}/{MANIFEST_NAME}"
            name = self._storage.name(path)
            self._manifests[number] = decode_manifest(self._storage.read(path), name)
        manifest = self._manifests[number]
        place = manifest.stream
        if place is None or place.increment != number or place.stream != self.id:
            raise FormatError(
                f"{self.url}/{self._path(number)} is no increment {number} of this stream: it was "
                "put there by hand. Remove it"
            )
        report = manifest.report.get("stream", {})
        if len(place.window) != 2 or not has_shape(report, _REPORT):
            name = self._storage.name(f"{self._path(number)}/{MANIFEST_NAME}")
            raise make_content_error(
                f"{name}: stream.window or report.stream is not that of an increment"
            )
        window = place.window[0], place.window[1]
        num_rows = manifest.splits["train"].num_rows if "train" in manifest.splits else 0
        return IncrementRecord(number, manifest.fingerprint, place.parent, window, num_rows, report)

    @property
    def newest(self) -> IncrementRecord:
        """Return the last increment."""
        return self.record(self.numbers[-1])

    @property
    def newest_recipe(self) -> dict[str, Any]:
        """Return the schema, moments and kinds of columns of the last increment: columns may join,
        which stream.json does not say."""
        self.record(self.numbers[-1])
        recipe = self._manifests[self.numbers[-1]].recipe
        if not has_shape(recipe, _RECIPE):
            name = self._storage.name(f"{self._path(self.numbers[-1])}/{MANIFEST_NAME}")
            raise make_content_error(f"{name}: recipe is not that of an increment")
        return recipe

    def dataset(self, number: int, damaged: list[str] | None = None) -> Dataset:
        """Return an increment as a dataset; `damaged` is that of `open_dataset`."""
        self.record(number)
        return open_dataset(f"{self.url}/{self._path(number)}", damaged)

    def _path(self, number: int) -> str:
        if number not in self.numbers:
            raise NoDatasetError(
                f"{self.url} has no increment {number}; it has {self.numbers[0]} to "
                f"{self.numbers[-1]}. Choose one of them, or append it with gmeta prepare --extend"
            )
        return f"{INCREMENTS}/{name_increment_folder(number)}"


def open_stream(url: str) -> Stream:
    """Return the stream at a local path or any fsspec URL."""
    storage = Storage(url)
    numbers = list_increment_numbers(url)
    if not numbers:
        raise NoDatasetError(
            f"{url} holds no stream: there is no increment. Run: gmeta prepare --schema FILE "
            f"--extend {url} INPUT..."
        )
    description = read_stream_json(storage, STREAM_FILE, STREAM_FORMAT)
    if not has_shape(description, _DESCRIPTION) or description["time_unit"] not in TICKS_PER_S:
        raise make_content_error(f"{storage.name(STREAM_FILE)} is not the description of a stream")
    return Stream(storage, description, numbers)


def read_stream_json(storage: Storage, path: str, kind: str) -> dict[str, Any]:
    """Return the body of a JSON file of a stream, after checking its checksum."""
    remedy = "gmeta prepare --extend alone writes it: put back the file that it wrote"
    return parse_checked_json(storage.read(path), storage.name(path), kind, remedy)


def is_stream(url: str) -> bool:
    """Return whether a stream, and not a dataset, lies at this path or URL."""
    fs, root = find_file_system(url)
    return bool(fs.exists(f"{root}/{STREAM_FILE}"))


def list_increment_numbers(url: str) -> list[int]:
    """Return the numbers of the increments at a URL, ascending."""
    fs, root = find_file_system(url)
    try:
        # fsspec caches listings, which would hide increments published since.
        listed = fs.ls(f"{root.rstrip('/')}/{INCREMENTS}", detail=False, refresh=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in listed)
    # Names with a dot are being written, or were when their writer was killed.
    numbers = sorted(int(name) for name in names if _NUMBER.fullmatch(name))
    if numbers and not is_local(fs):
        # In a store a folder appears file by file, its manifest last.
        newest = f"{root.rstrip('/')}/{INCREMENTS}/{name_increment_folder(numbers[-1])}"
        if not fs.exists(f"{newest}/{MANIFEST_NAME}"):
            numbers.pop()
    return numbers


def find_earlier_increment(dataset: Dataset, back: int = 1) -> Dataset | None:
    """Return the increment `back` places before this one; None if there is none, or no stream."""
    place = dataset.manifest.stream
    if place is None or place.increment - back < FIRST_INCREMENT:
        return None
    # Increments are sibling folders, each named by its number.
    folder, slash, name = dataset.url.rstrip("/").rpartition("/")
    return open_dataset(f"{folder}{slash}{place.increment - back:0{len(name)}d}")


def count_waiting(dataset: Dataset, split: str) -> int:
    """Return how many rows of a split's tasks wait for a label to mature; 0 where none does."""
    report = dataset.manifest.report.get("stream")
    if report is None or not has_shape(report, {"labels": {"": {"": {"waiting": int}}}}):
        return 0
    return max((own["waiting"] for own in report["labels"].get(split, {}).values()), default=0)


def read_reset_rows(dataset: Dataset) -> dict[str, Int64]:
    """Return by table the rows that mean another value from this increment on, ascending."""
    # A trainer must begin the weights of these rows anew.
    place, found = dataset.manifest.stream, {}
    for table, entry in (place.resets if place else {}).items():
        path = f"{RESET_FOLDER}/{table}.parquet"
        found[table] = read_column(dataset, path, entry, "row", pa.int64()).to_numpy()
    return found
