"""What a server takes at once, and what one request may ask for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask for."""

    body_bytes: int = 16 << 20
    rows: int = 10_000  # of both sides


@dataclass(frozen=True)
class BatchLimits:
    """How much waits and how much is answered at once."""

    waiting: int = 256  # requests; more are refused
    tasks: int = 64  # of a batch
    rows: int = 20_000  # of a batch; one larger request is a batch of its own
    inline_s: float = 0.1  # a batch that likely takes longer is computed in a thread
    timeout_s: float = 10.0  # from a request's arrival to its answer
