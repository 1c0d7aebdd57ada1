"""Where multiprocessing makes its sockets, for the processes of benchmarks and of tests."""

import os
import tempfile
from multiprocessing import util

LONGEST_SOCKET_PATH = 107  # bytes, by unix(7)
LONGEST_SOCKET_NAME = len("/pymp-12345678/listener-12345678")


def keep_socket_paths_short() -> None:
    """Where TMPDIR is so long that no socket below it can have a name, multiprocessing makes its
    own in /tmp; before its first socket, and as Python 3.14 does."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) + LONGEST_SOCKET_NAME <= LONGEST_SOCKET_PATH:
        return
    try:
        tempfile.tempdir = "/tmp"
        util.get_temp_dir()  # keeps what it finds, for the life of this process
    finally:
        tempfile.tempdir = folder
