"""The process of a command that a library call starts: it ends with the process that called."""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def run() -> None:
    """Run `gmeta ARGUMENTS` of argv, behind the number of the process that called."""
    parent = int(sys.argv.pop(1))
    if sys.platform == "linux":
        # A kernel that is killed leaves no training behind that nobody sees. SIGTERM keeps every
        # step, for which the pipe of its lines stays open: one that nobody reads would end it
        # before its checkpoint.
        os.open("/proc/self/fd/2", os.O_RDONLY)
        # The parent may be gone by now.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(128 + signal.SIGTERM)
    runpy.run_module("gmeta", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run()
