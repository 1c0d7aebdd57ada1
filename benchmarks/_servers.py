"""Servers in processes of their own: ours, and the loop over `gmeta.load`."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from _common import REPOSITORY


class Server:
    """A process that begins to serve at once; `port` takes connections after `wait`."""

    def __init__(self, *arguments: str, port: int) -> None:
        roots = (REPOSITORY, REPOSITORY / "models", REPOSITORY / "protos")
        path = os.pathsep.join(map(str, roots))
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *arguments]
        self.port = port
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)

    def wait(self) -> None:
        """Until it takes connections."""
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                if self.process.poll() is not None:
                    told = f"{self.process.args!r} ended with {self.process.returncode}"
                    raise RuntimeError(told) from None
                time.sleep(0.05)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of its process and of the workers that this has now."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ticks = 0
        for each in (pid, *children):
            after_name = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += int(after_name[11]) + int(after_name[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


@contextmanager
def locked(folder: Path) -> Iterator[Server]:
    """The loop over gmeta.load, as long as the block lasts."""
    port, script = free_port(), Path(__file__).with_name("_lock_server.py")
    server = Server(str(script), str(folder), str(port), port=port)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def serving(folder: Path, workers: int) -> Iterator[Server]:
    """`gmeta serve`, as long as the block lasts."""
    port = free_port()
    server = Server(
        "-m", "gmeta", "serve", str(folder), "--name", "model", "--insecure", "--no-access-log",
        "--listen", f"127.0.0.1:{port}", "--workers", str(workers), "--reload-every", "0.05",
        port=port,
    )  # fmt: skip
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
