"""Whether a process was asked to end, as the handlers of its signals note it."""

import signal
import time
from typing import final

_LOOK_EVERY_S = 0.2


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a server to end; a closed terminal's too, unless nohup holds it
    back."""
    ending = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    return ending[: 2 if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else 3]


@final
class StopFlag:
    """True once somebody has asked. No event: a handler that sets one hangs for ever where it
    interrupts the wait for it, whose lock it needs."""

    def __init__(self) -> None:
        self._is_set = False

    def __bool__(self) -> bool:
        return self._is_set

    def stop(self, *_: object) -> None:
        """Note it, as a handler of signals or from another thread."""
        self._is_set = True

    def wait(self, seconds: float) -> bool:
        """Wait that long, or until somebody asks; return whether somebody has."""
        until_s = time.monotonic() + seconds
        while not self._is_set and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_EVERY_S))
        return self._is_set
