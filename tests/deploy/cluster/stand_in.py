"""stand_in.py SOCKET ARGUMENTS: `python ARGUMENTS` in a container, forked by nursery.py where it is
a module. Signals are handed on, and it exits as what it stands for does.
"""

import json
import os
import signal
import socket
import sys

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    path, *words = sys.argv[1:]
    flags = [*words[:2], ""]
    if "-m" not in flags or flags[0] not in ("-m", "-u"):
        os.execv(sys.executable, [sys.executable, *words])
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking.connect(path)
    told = {
        "words": words[words.index("-m") + 1 :],
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "user": os.getuid(),
        "group": os.getgid(),
        "groups": os.getgroups(),
    }
    socket.send_fds(asking, [json.dumps(told).encode()], [0, 1, 2])
    program = int(asking.recv(100))
    for number in SIGNALS:
        signal.signal(number, lambda number, _: os.kill(program, number))
    code = int(asking.recv(100))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
