"""Waiting for what another thread or process does: for the event itself, never for a time."""

import time
from collections.abc import Callable
from typing import Any

# Far beyond what a slow machine with busy neighbours needs: a test that passes never waits for it.
PATIENCE_S = 240.0


def wait_until(
    reached: Callable[[], Any], what: str = "it", pause_s: float = 0.01,
    patience_s: float = PATIENCE_S,
) -> None:  # fmt: skip
    """Returns once `reached()` is true; `what` says in the failure what did not happen."""
    until_s = time.monotonic() + patience_s
    while not reached():
        assert time.monotonic() < until_s, f"{what}: not within {patience_s:.0f} s"
        time.sleep(pause_s)
