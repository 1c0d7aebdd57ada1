"""The shard manifest: what of each dataset is in a model checkpoint, exactly. It is shards.json
beside the weights: canonical JSON with a digest over all of it but the digest."""

import bisect
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gmeta.access.errors import RefusedError
from gmeta.antdt.errors import ManifestError
from gmeta.antdt.model import (
    MAX_COUNTED_ATTEMPTS,
    MAX_NAME_CHARS,
    MAX_NOTE_CHARS,
    DatasetSpec,
    argument_refusal,
    check_range,
    check_text,
    check_type,
)
from gmeta.antdt.order import ORDER_NAME, ShardOrder

SCHEMA_VERSION = 1
MANIFEST_FILE_NAME = "shards.json"


class Exceptional(NamedTuple):
    """A shard that is not DONE but has an offset, attempts, a note or a last holder."""

    position: int
    units_done: int
    attempts: int
    note: str
    worker_id: str


@dataclass(frozen=True)
class DatasetManifest:
    """One dataset at the step boundary."""

    spec: DatasetSpec
    epoch: int
    # [start, end) runs of positions in the epoch's seeded order (order.py), so that an epoch in
    # progress is one run and a few exceptions. Shards in no list are untouched.
    done: tuple[tuple[int, int], ...] = ()
    partial: tuple[Exceptional, ...] = ()
    skipped: tuple[Exceptional, ...] = ()
    quarantined: tuple[Exceptional, ...] = ()

    @property
    def exceptions(self) -> tuple[Exceptional, ...]:
        """Return every shard that has something to remember."""
        return (*self.partial, *self.skipped, *self.quarantined)

    @property
    def num_done(self) -> int:
        """Return how many shards are in the model as a whole."""
        return sum(end - start for start, end in self.done)


@dataclass(frozen=True)
class ShardManifest:
    """All that a checkpoint must hold to continue the data where the model stands."""

    job: str
    checkpoint_id: str
    step: int
    generation: int
    parent: str  # digest of the manifest before it in the lineage, "" for the first
    ledger_events: int
    ledger_head: str
    datasets: tuple[DatasetManifest, ...] = field(default=())

    def to_json(self) -> str:
        """Return canonical JSON, digest included: the bytes of shards.json."""
        body = self._body()
        return _canonical({**body, "digest": _digest(body)})

    @property
    def digest(self) -> str:
        """Return the sha256 over the canonical JSON without the digest."""
        return _digest(self._body())

    def _body(self) -> dict[str, Any]:
        datasets = [{**vars(one), "spec": one.spec.to_dict()} for one in self.datasets]
        version = {"schema_version": SCHEMA_VERSION, "order": ORDER_NAME}
        return {**version, **vars(self), "datasets": datasets}

    def save(self, folder: Path) -> Path:
        """Write shards.json into a checkpoint folder, and return its path."""
        path = Path(folder) / MANIFEST_FILE_NAME
        # Not atomic: the folder is still being written, and its rename commits it.
        path.write_text(self.to_json(), encoding="utf-8")
        return path


def load_manifest(path: Path) -> ShardManifest:
    """Return the manifest of a file or a checkpoint folder. Raise ManifestError."""
    path = Path(path)
    file = path / MANIFEST_FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise ManifestError(
            f"{file} does not exist: a checkpoint tied to the shard service holds a file "
            f"{MANIFEST_FILE_NAME}. "
            "Name the checkpoint folder, or a run trained with the data service."
        )
    return parse_manifest(file.read_text(encoding="utf-8", errors="replace"), str(file))


def parse_manifest(text: str, source: str = "the manifest") -> ShardManifest:
    """Return the manifest with every field checked. Raise ManifestError for any other text."""
    try:
        raw = json.loads(text)
        version = raw.pop("schema_version")
        order, digest = raw.pop("order"), raw.pop("digest")
        # The digest of what was read: parsing converts, and could hide what was altered.
        actual_digest = _digest({"schema_version": version, "order": order, **raw})
    # A lone surrogate is a ValueError when it is encoded, nesting without end a RecursionError.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(
            f"{source} is no shard manifest ({error!r:.200}): it was cut short or is another file. "
            f"Use the {MANIFEST_FILE_NAME} of a whole checkpoint."
        ) from error
    if version != SCHEMA_VERSION or order != ORDER_NAME:
        raise ManifestError(
            f"{source} has schema version {version!r:.80} and order {order!r:.80}; this program "
            f"reads version {SCHEMA_VERSION} and {ORDER_NAME}. Use the version of gmeta that "
            "wrote it."
        )
    if actual_digest != digest:
        raise ManifestError(
            f"{source} was altered after it was written: its content has digest "
            f"{actual_digest[:12]}, it "
            f"states {str(digest)[:12]}. Restore the checkpoint from a copy."
        )
    try:
        datasets = tuple(_parse_dataset(item) for item in raw.pop("datasets"))
        manifest = ShardManifest(**raw, datasets=datasets)
        _check_fields(manifest)
        for dataset in datasets:
            _check_positions(dataset, source)
        if manifest.digest != digest:
            raise ValueError("it is written in another form than the service's")
    except (KeyError, TypeError, ValueError, RefusedError) as error:
        raise ManifestError(
            f"{source} has a field that does not fit: {str(error).rstrip('.')}. Use a manifest "
            "that the service wrote."
        ) from error
    return manifest


def covers(runs: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """Return whether one of these ascending runs of positions holds all of [start, end)."""
    # No position is this large: so the run that begins at `start` counts too.
    number = bisect.bisect_right(runs, (start, 1 << 62)) - 1
    return number >= 0 and end <= runs[number][1]


def _parse_dataset(raw: dict[str, Any]) -> DatasetManifest:
    """Return one dataset's entry. Raise RefusedError, TypeError or ValueError."""
    spec = DatasetSpec(**raw["spec"])
    check_range("epoch", raw["epoch"], 0, spec.num_epochs - 1)
    done = tuple((start, end) for start, end in raw["done"])
    for edge in itertools.chain.from_iterable(done):
        check_type("an edge of done", edge, int)
    lists = {
        name: tuple(Exceptional(*item) for item in raw[name])
        for name in ("partial", "skipped", "quarantined")
    }
    for item in itertools.chain.from_iterable(lists.values()):
        # Their bounds are the shard's: _check_positions checks them.
        check_type("position", item.position, int)
        check_type("units_done", item.units_done, int)
        check_range("attempts", item.attempts, 0, MAX_COUNTED_ATTEMPTS)
        check_text("note", item.note, 2 * MAX_NOTE_CHARS)
        check_text("worker_id", item.worker_id, MAX_NAME_CHARS)
    return DatasetManifest(spec, raw["epoch"], done, **lists)


def _check_fields(manifest: ShardManifest) -> None:
    """Raise RefusedError for a field of another type, or a dataset that is listed twice."""
    for name in ("job", "checkpoint_id", "parent", "ledger_head"):
        check_text(name, getattr(manifest, name), MAX_NOTE_CHARS)
    for name in ("step", "generation", "ledger_events"):
        check_range(name, getattr(manifest, name), 0, (1 << 64) - 1)
    ((name, count),) = Counter(x.spec.name for x in manifest.datasets).most_common(1) or [("", 0)]
    if count > 1:
        raise argument_refusal(f"dataset {name} is listed {count} times; once is allowed")


def _check_positions(dataset: DatasetManifest, source: str) -> None:
    """Raise ManifestError for a position or offset outside, or a position listed twice."""
    spec = dataset.spec
    order = ShardOrder(spec.num_shards, spec.seed, dataset.epoch, spec.shuffle)
    exceptions = ((item.position, item.position + 1) for item in dataset.exceptions)
    runs = sorted([*dataset.done, *exceptions])
    # If sorted runs neither overlap nor leave the dataset, their edges never decrease.
    edges = [0, *(edge for run in runs for edge in run), spec.num_shards]
    if any(left > right for left, right in itertools.pairwise(edges)):
        raise ManifestError(
            f"{source} lists a shard of dataset {spec.name} twice or outside "
            f"0..{spec.num_shards - 1}: "
            "a unit would be trained twice or never. Use a manifest that the service wrote."
        )
    for item in dataset.exceptions:
        length = spec.length_of(order.index_of(item.position))
        if not 0 <= item.units_done <= length:
            raise ManifestError(
                f"{source} says that {item.units_done} units of the shard at position "
                f"{item.position} of dataset "
                f"{spec.name} are trained; it has {length}. Use a manifest that the service wrote."
            )


def _canonical(body: dict[str, Any]) -> str:
    # Equal contents give equal text: the digest is of these bytes.
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body).encode()).hexdigest()
