"""The server that test processes are forked from, with everything imported: one for the suite."""

import multiprocessing as mp
import os
import tempfile
from multiprocessing import util
from multiprocessing.context import ForkServerContext

PRELOADED = ["gmeta.antdt.server", "gmeta.train"]
LONGEST_SOCKET_PATH = 107  # bytes, by unix(7)
LONGEST_SOCKET_NAME = len("/pymp-12345678/listener-12345678")


def with_imports_ready() -> ForkServerContext:
    """The context whose processes start with `PRELOADED` imported."""
    keep_socket_paths_short()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def keep_socket_paths_short() -> None:
    """Where TMPDIR is so long that no socket below it can have a name, multiprocessing makes its
    own in /tmp; before its first socket, and as Python 3.14 does.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) + LONGEST_SOCKET_NAME <= LONGEST_SOCKET_PATH:
        return
    try:
        tempfile.tempdir = "/tmp"
        util.get_temp_dir()  # keeps what it finds, for the life of this process
    finally:
        tempfile.tempdir = folder
