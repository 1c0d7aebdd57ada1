"""Peers as processes: a worker each, in the peer's environment and on the given cores."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from peers.interface import PEERS
from peers.setup import python_of

BENCHMARKS = Path(__file__).resolve().parent.parent
SETUP_COMMAND = "python benchmarks/peers_movielens.py --setup"


class PeerFailedError(Exception):
    """A worker ended before it answered."""


@dataclass
class RemotePeer:
    """A running worker. Idle workers wait on their input and take no processor time."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(
        cls, name: str, environment: Path, num_threads: int, movielens: Path, log: Path
    ) -> Self:
        """Start the worker; `wait_until_ready` must follow. Several may load side by side."""
        python = python_of(environment) if PEERS[name].own_environment else Path(sys.executable)
        command = [str(python), "-m", "peers.worker", name, "--movielens", str(movielens)]
        threads = str(num_threads)
        # Before the process starts: libraries read them once, when they are loaded.
        variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "JAX_PLATFORMS": "cpu"}
        # Its errors go to a file: a pipe that nobody reads would fill up and stop it.
        with log.open("w") as log_file:
            process = subprocess.Popen(
                command,
                cwd=BENCHMARKS,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
            )
        return cls(name, process, log)

    def wait_until_ready(self) -> str | None:
        """None, or why the peer cannot run here."""
        answer = self._read()
        self.versions = answer.get("versions", {})
        return answer.get("missing")

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have the worker's method `do` called, and wait for its result."""
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """End the worker and give its memory back."""
        self.process.kill()
        self.process.communicate()

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            tail = "".join(self.log.read_text().splitlines(keepends=True)[-15:])
            raise PeerFailedError(
                f"{self.name} ended with code {self.process.wait()} before it answered:\n{tail}"
            )
        return json.loads(line)


def why_missing(name: str, environment: Path) -> str | None:
    """Why a peer cannot even be started, or None."""
    if PEERS[name].own_environment and not python_of(environment).exists():
        return f"{environment} does not exist"
    return None


@contextmanager
def running(
    names: Sequence[str], environment: Path, cores: Sequence[int], movielens: Path, logs: Path
) -> Iterator[tuple[dict[str, RemotePeer], dict[str, str]]]:
    """Workers of the peers that can run here, and why each of the others cannot."""
    missing = {name: reason for name in names if (reason := why_missing(name, environment))}
    with ExitStack() as stack:
        started = {}
        for name in names:
            if name not in missing:
                log = logs / f"{name}-{len(cores)}.log"
                started[name] = RemotePeer.start(name, environment, len(cores), movielens, log)
                stack.callback(started[name].stop)
        # All have been started: they load side by side, and are waited for one by one.
        missing |= {
            name: reason for name, peer in started.items() if (reason := peer.wait_until_ready())
        }
        ready = {name: peer for name, peer in started.items() if name not in missing}
        for peer in ready.values():
            peer.ask("pin", cores=list(cores))
        yield ready, missing
