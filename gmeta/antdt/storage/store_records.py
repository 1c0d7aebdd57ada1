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
    """The state after `num_events` events; `pages` maps (dataset, page number) to bytes.

    To be written: pages of the datasets in `cleared` are dropped first, then the given pages
    replace theirs. As read back: `pages` are all pages, `cleared` is empty."""

    num_events: int
    head: bytes
    document: str
    pages: dict[tuple[str, int], bytes] = field(default_factory=dict)
    cleared: frozenset[str] = frozenset()

    @property
    def seal(self) -> bytes:
        """Return the sha256 of all but the pages; of those the document holds digests."""
        return seal_of(self.num_events, self.head, self.document)


def seal_of(num_events: object, head: object, document: object) -> bytes:
    """Return the seal of a snapshot. Damage can make any type of a value, so any is taken."""
    return hashlib.sha256(f"{num_events!r} {head!r} {document}".encode()).digest()
