"""The leases that a client holds: which are live, which were lost, and how much of each the service
has acknowledged. Several threads ask: the training loop, its reporter, the heartbeat."""

import threading
from collections.abc import Iterable
from typing import final

from gmeta.antdt.client.lease import Lease
from gmeta.antdt.model import Outcome

_UNKNOWN_TOKEN = "the service does not know its token any more: it expired or was revoked"
Sent = list[tuple[Lease, int]]  # with the units that a call reports


@final
class HeldLeases:
    """May be called from any thread."""

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
        """Return the tokens of the leases that may still be used. A lost one is left out, though it
        may live on at the service: renewed, it would be nobody's to train, and END would never
        come."""
        with self._lock:
            return {token for token, lease in self._held.items() if not lease.lost}

    def collect_progress(self) -> Sent:
        """Return what each live lease has in the model now. Raise LeaseLostError when one was lost
        since the last call with units that the service does not know of."""
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
        """Take in an answer of the service: it renewed the leases `named` in the call, but for
        those `gone`. Leases granted while the call was under way are left alone."""
        with self._lock:
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
        """Take in the service's answer to a report; with `drop` the report has ended the leases.
        Raise LeaseLostError."""
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
