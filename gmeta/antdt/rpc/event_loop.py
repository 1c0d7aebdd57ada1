"""The one event loop of this process, in a thread of its own; service and clients share it."""

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from typing import Any

import uvloop

_starting = threading.Lock()
_started: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []
_STOP_S = 5.0  # for the callback that runs when the process ends


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop; the first call starts it."""
    # Two threads may make the first call at once.
    with _starting:
        # Not when this is imported: a process that only reads a manifest needs no thread.
        if not _started:
            # uvloop's: the standard library's costs a sixth more CPU a call
            # (benchmarks/antdt_service.py). Only one: gRPC's asyncio side wakes all loops of a
            # process through one socket.
            loop = uvloop.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="antdt-loop", daemon=True)
            thread.start()
            _started.append((loop, thread))
        return _started[0][0]


def wait_for(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run the coroutine on the loop and return its result. Never call it on the loop itself."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()


def _stop() -> None:
    """Stop the loop."""
    # Its daemon thread outlives the interpreter while the process unloads, and a callback of
    # uvloop's that comes due then is a segmentation fault.
    for loop, thread in _started:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_STOP_S)


# Registered on import: what uses the loop and cleans up at exit registers later, and runs earlier.
atexit.register(_stop)
# A forked child has a copy of the loop, but not of the thread that runs it.
os.register_at_fork(after_in_child=_started.clear)
