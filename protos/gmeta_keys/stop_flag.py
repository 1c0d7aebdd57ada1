"""A flag that signal handlers set to make a process end."""

import signal
import time
from typing import final

# Sleeps in short steps, since nothing wakes a sleeper when another thread sets the flag.
_LOOK_EVERY_S = 0.2


def stop_signals() -> list[signal.Signals]:
    """Return the signals that make a server end."""
    # nohup ignores SIGHUP, so that a server survives its terminal: then SIGHUP is left alone.
    ending = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    return ending[: 2 if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else 3]


# A plain attribute, not a threading.Event: a handler that calls Event.set() deadlocks if it
# interrupts Event.wait(), which holds the lock that set() needs.
@final
class StopFlag:
    """True once a stop was requested."""

    def __init__(self) -> None:
        self._is_set = False

    def __bool__(self) -> bool:
        return self._is_set

    def stop(self, *_: object) -> None:
        """Request the stop; a signal handler, or called from another thread."""
        self._is_set = True

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds` or until a stop is requested; return whether it was."""
        until_s = time.monotonic() + seconds
        while not self._is_set and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_EVERY_S))
        return self._is_set
