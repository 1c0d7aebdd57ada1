"""The leases that a client holds: live or lost, and how much of each is acknowledged."""

import threading
from collections.abc import Iterable
from typing import final

from gmeta.antdt.client.lease import Lease
from gmeta.antdt.model import Outcome

_UNKNOWN_TOKEN = "the service does not know its token any more: it expired or was revoked"
Sent = list[tuple[Lease, int]]  # with the units that a call reports


@final
class HeldLeases:
    """May be called from any thread: the training loop, its reporter, the heartbeat."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, Lease] = {}
        self._lost: list[Lease] = []  # since the last flush: some of their units may be unreported

    def add(self, leases: Iterable[Lease]) -> None:
        """Add leases that were granted."""
        with self._lock:
            self._held.update((lease.token, lease) for lease in leases)

    def live(self) -> list[Lease]:
        """Return the live leases in the order of their grants."""
        with self._lock:
            return list(self._held.values())

    def tokens(self) -> set[int]:
        """Return the tokens of the leases that may still be used."""
        # A lost one may live on at the service. Renewed, it would be nobody's to train: no END.
        with self._lock:
            return {token for token, lease in self._held.items() if not lease.lost}

    def collect_progress(self) -> Sent:
        """Return what each live lease has in the model. Raise LeaseLostError for unreported units
        of a lease lost since the last call."""
        with self._lock:
            progress = [(lease, lease.units_done) for lease in self._held.values()]
            lost, self._lost = self._lost, []
        for lease in lost:
            if lease.units_done > lease.units_reported:
                lease.check()
        return progress

    def drop(self, tokens: Iterable[int]) -> None:
        """Drop leases that were given back."""
        with self._lock:
            for token in tokens:
                self._held.pop(token, None)

    def lose_all(self, why: str) -> None:
        """Mark every lease lost: none may be used any more."""
        with self._lock:
            for lease in self._held.values():
                lease.lost = why
            self._held.clear()

    def apply_renewal(
        self, usable_until_s: float, renewed_tokens: set[int], lost_tokens: set[int]
    ) -> None:
        """Take in an answer of the service: it renewed `renewed_tokens` but for `lost_tokens`."""
        with self._lock:
            # Leases granted while the call was under way are in neither set, and stay as they are.
            for token in renewed_tokens & self._held.keys():
                lease = self._held[token]
                if token not in lost_tokens:
                    # Answers may overtake each other.
                    lease.usable_until_s = max(lease.usable_until_s, usable_until_s)
                else:
                    lease.lost = _UNKNOWN_TOKEN
                    del self._held[token]
                    if not lease.speculative:  # speculative ones count only as a whole
                        self._lost.append(lease)

    def apply_outcomes(self, sent: Sent, outcomes: Iterable[int], drop: bool) -> None:
        """Take in the answer to a report, which ends the leases if `drop`. Raise LeaseLostError."""
        lost = []
        for (lease, units_sent), outcome in zip(sent, outcomes, strict=True):
            if outcome in (Outcome.FENCED, Outcome.INVALID):
                lost.append(lease)
                lease.lost = _UNKNOWN_TOKEN
            else:
                lease.units_reported = units_sent
                if drop:
                    # A restarted service may have called the completed token unknown in between.
                    # A lease with units left stays lost: nobody would complete it.
                    lease.lost = ""
                    with self._lock:
                        self._lost = [other for other in self._lost if other is not lease]
            if drop or lease.lost:
                self.drop([lease.token])
        for lease in lost:
            lease.check()
