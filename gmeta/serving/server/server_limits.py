"""What a server takes at once, and what one request may ask for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from gmeta.serving.server.request_errors import RequestError

LARGE_BYTES = 256 << 10  # of a request that is parsed in a thread, and whose bytes are counted
_LARGEST_AT_ONCE = 8  # as many bytes are held as that many of the largest requests have


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask for."""

    body_bytes: int = 16 << 20
    rows: int = 10_000  # of both sides
    ignores_extra: bool = False  # inputs that are no columns of the model; else they are refused

    def check_rows(self, num_rows: int) -> None:
        """Raise RequestError for a request of more rows."""
        if num_rows > self.rows:
            raise RequestError(
                413,
                f"the request has {num_rows} rows of both sides; at most {self.rows} are "
                "allowed. Split it, or start the server with a higher --max-rows",
            )


@dataclass(frozen=True)
class BatchLimits:
    """How much waits and how much is answered at once."""

    waiting: int = 256  # requests; more are refused
    tasks: int = 64  # of a batch
    rows: int = 20_000  # of a batch; one larger request is a batch of its own
    inline_s: float = 0.1  # a batch that likely takes longer is computed in a thread
    timeout_s: float = 10.0  # from a request's arrival to its answer


@final
class HeldBytes:
    """The bytes of the large requests that are under way, from their arrival to their answers."""

    def __init__(self, limits: RequestLimits) -> None:
        self._most, self._held = _LARGEST_AT_ONCE * limits.body_bytes, 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield what sets how many bytes one request holds; it raises RequestError for too many."""
        own = 0

        def hold(num_bytes: int) -> None:
            nonlocal own
            more = num_bytes - own if num_bytes > LARGE_BYTES else 0
            if self._held + more > self._most:
                raise RequestError(
                    429,
                    f"large requests under way hold {self._held} bytes, and {self._most} are the "
                    "most. Retry after a pause, or start more workers",
                    retry_after_s=1,
                )
            own, self._held = own + more, self._held + more

        try:
            yield hold
        finally:
            self._held -= own
