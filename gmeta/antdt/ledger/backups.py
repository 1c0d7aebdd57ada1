"""Speculative execution (Dean and Ghemawat, MapReduce, OSDI 2004, section 3.6): which shards may be
leased a second time, and which two leases are of one shard.

Two leases of a shard are equals: either may complete it, and the first one does. When one ends in
another way the other is the only one, as if it had always been.
"""

from collections.abc import Mapping
from typing import final

from gmeta.antdt.ledger.table import ShardTable
from gmeta.antdt.model import Lease, ShardState, Worker


@final
class Backups:
    """Durable, like the leases it speaks of; `LedgerState.drop_lease` keeps it true."""

    def __init__(self) -> None:
        self.wanted: set[int] = set()  # tokens whose shard may be leased to another worker too
        self.twins: dict[int, int] = {}  # token -> the other token of its shard, both ways

    def pair(self, token: int, other: int) -> None:
        """Record that the two tokens are leases of one shard."""
        self.twins[token], self.twins[other] = other, token

    def drop(self, token: int) -> None:
        """Forget a lease that ended."""
        self.wanted.discard(token)
        other = self.twins.pop(token, None)
        if other is not None:
            del self.twins[other]

    def candidates(
        self, worker: Worker, leases: Mapping[int, Lease], tables: Mapping[str, ShardTable]
    ) -> list[int]:
        """Return those of the worker's leases that a decision to back it up is about: of
        speculative datasets, where nothing is left to hand out, and without a second lease yet."""
        free = worker.tokens - self.wanted - self.twins.keys()
        return [token for token in sorted(free) if _is_at_its_tail(tables[leases[token].dataset])]

    def next_for(
        self, worker: Worker, table: ShardTable, leases: Mapping[int, Lease]
    ) -> int | None:
        """Return the oldest lease of the dataset beside which this worker may get one; None where
        there is none, or where the worker is itself one of the slow ones."""
        if not self.wanted.isdisjoint(worker.tokens):
            return None
        # Tokens rise with time: the shard that was held longest comes first.
        for token in sorted(self.wanted - self.twins.keys()):
            lease = leases[token]
            # A shard that failed too often while it had two leases waits for its last one.
            is_exhausted = table.attempts.get(lease.position, 0) > table.spec.max_attempts
            if lease.dataset == table.spec.name and not is_exhausted:
                return token
        return None


def _is_at_its_tail(table: ShardTable) -> bool:
    return table.spec.speculative and not table.counts[ShardState.READY]
