"""A container's `python -m PROGRAM`, forked with everything imported: a fresh interpreter imports
torch and TorchRec for three seconds. What stands for it in the container (stand_in.py) asks for it
over a socket; the program then has that one's namespaces, root, user, folder, variables and files.
"""

import ctypes
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.processes import with_imports_ready
from tests.waiting import wait_until

_PR_SET_NO_NEW_PRIVS = 38
_MOST_BYTES = 1 << 17  # of what is asked for: one packet


@contextmanager
def nursery(folder: Path) -> Iterator[str]:
    """The socket at which programs are asked for."""
    path = folder / "nursery"
    process = with_imports_ready().Process(
        target=_serve, args=(str(folder), path.name), daemon=True
    )
    process.start()
    try:
        wait_until(path.exists, "the socket of the nursery")
        yield str(path)
    finally:
        process.kill()
        process.join()


def _serve(folder: str, name: str) -> None:
    os.chdir(folder)  # a socket's path must be short
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Under another name until it listens and all may ask.
    listener.bind(f"{name}.new")
    os.chmod(f"{name}.new", 0o666)
    listener.listen(100)
    os.rename(f"{name}.new", name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        asking, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _fork_for(asking)
            os._exit(0)
        asking.close()


def _fork_for(asking: socket.socket) -> None:
    """Start what is asked for, and answer with its exit code once it has ended; it ends with who
    asks."""
    credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    asker: int = struct.unpack("3i", credentials)[0]
    told, files, *_ = socket.recv_fds(asking, _MOST_BYTES, 3)
    root = os.open(f"/proc/{asker}/root", os.O_PATH | os.O_DIRECTORY)
    # The first is for children alone; a process outside the container does not go further.
    pids, *others = (
        os.open(f"/proc/{asker}/ns/{name}", os.O_RDONLY) for name in ("pid", "net", "uts", "mnt")
    )
    _enter(pids)
    program = os.fork()
    if program == 0:
        for space in others:
            _enter(space)
        os.fchdir(root)
        os.chroot(".")
        _become(json.loads(told), files, asking)
    ended = os.pidfd_open(program)
    ready, _, _ = select.select([asking, ended], [], [])
    if ended not in ready:  # it says nothing more: it is gone
        os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    with suppress(BrokenPipeError):
        asking.send(str(os.waitstatus_to_exitcode(status)).encode())


def _enter(space: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(space, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _become(told: dict[str, Any], files: list[int], asking: socket.socket) -> None:
    """The program, from its user and its files to its exit."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(told["folder"])
    os.setgroups(told["groups"])
    os.setgid(told["group"])
    os.setuid(told["user"])  # and all capabilities are gone
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.environ.clear()
    os.environ.update(told["variables"])
    asking.send(str(os.getpid()).encode())
    asking.close()
    program, *_ = sys.argv = told["words"]
    code: Any = 1
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    finally:
        if sys.exception() is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
