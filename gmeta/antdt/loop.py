"""The one event loop of this process, in a thread of its own; service and clients share it.

uvloop's: the standard library's costs a sixth more CPU a call (benchmarks/antdt_service.py).
gRPC's asyncio side wakes all loops of a process through one socket, so a second loop would only
be woken for nothing.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any

import uvloop

_starting = threading.Lock()
_started: list[asyncio.AbstractEventLoop] = []


def event_loop() -> asyncio.AbstractEventLoop:
    """The loop, running; started by the first call."""
    with _starting:
        if not _started:
            loop = uvloop.new_event_loop()
            threading.Thread(target=loop.run_forever, name="antdt-loop", daemon=True).start()
            _started.append(loop)
        return _started[0]


def wait_for(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs the coroutine on the loop; returns or raises what it does. Not from the loop itself."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()


# A forked child has a copy of the loop, but not of the thread that runs it.
os.register_at_fork(after_in_child=_started.clear)
