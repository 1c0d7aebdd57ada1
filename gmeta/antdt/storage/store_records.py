"""What a store keeps of a ledger, as bytes: batches of records, and a snapshot of the state."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class RecordBatch(NamedTuple):
    """Consecutive records, the number of the first one, and the chain's head after the last one."""

    first_event: int
    records: Sequence[bytes]
    head: bytes


@dataclass(frozen=True)
class StoredSnapshot:
    """The state after `num_events` events; `pages` maps (dataset, page number) to bytes."""

    # As written: pages of the datasets in `cleared` are dropped first, then `pages` replace theirs.
    # As read back: `pages` are all pages, `cleared` is empty.
    num_events: int
    head: bytes
    document: str
    pages: dict[tuple[str, int], bytes] = field(default_factory=dict)
    cleared: frozenset[str] = frozenset()

    @property
    def seal(self) -> bytes:
        """Return the sha256 of all but the pages, whose digests the document holds."""
        return seal_of(self.num_events, self.head, self.document)


def seal_of(num_events: object, head: object, document: object) -> bytes:
    """Return the seal of a snapshot."""
    # Of any types: a damaged store can hold values of any type.
    return hashlib.sha256(f"{num_events!r} {head!r} {document}".encode()).digest()
