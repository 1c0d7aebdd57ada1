"""How many calls a second a server takes from one caller."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import final

CONNECTION_CALLS_PER_S = 1000.0  # a worker that batches makes a few
# An identity may hold several connections: a worker's address has one for each rank of its pod.
IDENTITY_CALLS_PER_S = 4000.0
BURST_S = 2.0


@final
class RateLimit:
    """A token bucket for each caller, so that one that runs wild does not starve the rest."""

    def __init__(
        self,
        calls_per_s: float,
        burst: float,
        clock: Callable[[], float] = time.monotonic,
        max_callers: int = 65_536,
    ) -> None:
        self._rate = calls_per_s
        self._burst = burst
        self._clock = clock
        self._max_callers = max_callers
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # left, when
        self._lock = threading.Lock()

    def admit(self, caller: str) -> bool:
        """Return whether the caller may make one more call now."""
        now_s = self._clock()
        with self._lock:
            # Taken out and put back at the end: the first bucket is of the longest silent caller.
            left, at_s = self._buckets.pop(caller, (self._burst, now_s))
            # Filled by the time since the last call: no timer, whatever the number of callers.
            left = min(self._burst, left + (now_s - at_s) * self._rate)
            admitted = left >= 1
            self._buckets[caller] = (left - admitted, now_s)
            if len(self._buckets) > self._max_callers:
                self._buckets.popitem(last=False)  # the one silent for longest
            return admitted


@final
class CallLimits:
    """Both limits of a call: on its connection, and on its caller over all connections."""

    def __init__(
        self,
        connection_calls_per_s: float = CONNECTION_CALLS_PER_S,
        identity_calls_per_s: float = IDENTITY_CALLS_PER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rates = connection_calls_per_s, identity_calls_per_s
        self._connections, self._identities = (
            RateLimit(rate, BURST_S * rate, clock) for rate in self._rates
        )

    def refusal(self, connection: str, identity: str) -> str | None:
        """Return why the call must wait; None admits it."""
        if not self._connections.admit(connection):
            who, rate = "this connection", self._rates[0]
        elif not self._identities.admit(identity):
            who, rate = "this caller, over all its connections,", self._rates[1]
        else:
            return None
        return (
            f"{who} makes more than {rate:.0f} calls a second. Retry after a pause, and ask for "
            "more shards a call."
        )
