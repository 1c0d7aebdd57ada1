"""The event loop's thread, and the end of the process."""

import subprocess
import sys

# glibc calls sleep(exit code) once the interpreter is gone and the process is not: as unloading
# torch takes its time.
ENDS_SLOWLY = """
import ctypes, sys, threading, time
from gmeta.antdt.rpc.event_loop import event_loop

libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)
loop, begun = event_loop(), threading.Event()
loop.call_soon_threadsafe(lambda: (loop.call_later(0.7, print), begun.set()))
begun.wait()
time.sleep(0.2)  # the loop's thread waits for the timer
sys.exit(1)
"""


def test_a_timer_that_comes_due_while_the_process_ends_does_not_crash_it() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_SLOWLY], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")
