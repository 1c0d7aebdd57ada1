"""One peer in a process of its own: answers requests, a line of JSON each, until its input ends."""

import argparse
import gc
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from peers.interface import PEERS, Peer, load_peer
from peers.workload import Rates, Workload, initial_parameters, load_workload


class Worker:
    """What a request may ask for: one public method each, whose name is the request's `do`."""

    def __init__(self, peer: Peer, movielens: Path) -> None:
        self._peer = peer
        self._movielens = movielens
        self._prepared: list[Any] = []
        self._next = 0

    def pin(self, cores: list[int]) -> dict[str, Any]:
        """Stay on these cores. XLA sizes its thread pool by them, when it is first used."""
        if hasattr(os, "sched_setaffinity"):
            # Each thread has its own affinity: what libraries have started must be moved too.
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), cores)
        return {}

    def check(
        self, gradients_path: str, workload: dict[str, Any], rates: dict[str, float]
    ) -> dict[str, Any]:
        """Save the outer gradient on the first batch, then train on each batch once."""
        self._build(workload, rates)
        np.savez(gradients_path, **self._peer.gradients(self._prepared[0]))
        # `gradients` may have left its own behind in the peer's parameters.
        return self.build(workload, rates)

    def build(self, workload: dict[str, Any], rates: dict[str, float]) -> dict[str, Any]:
        """Start afresh and train on each batch once: warms up, and gives losses to compare."""
        self._build(workload, rates)
        losses = [self._peer.step(prepared) for prepared in self._prepared]
        return {"losses": losses}

    def time(self, steps: int) -> dict[str, Any]:
        """Seconds of the next `steps` steps, the batches in turn."""
        turn = [self._prepared[(self._next + step) % len(self._prepared)] for step in range(steps)]
        self._next += steps
        start = time.perf_counter()
        for prepared in turn:
            self._peer.step(prepared)
        return {"seconds": time.perf_counter() - start}

    def drop(self) -> dict[str, Any]:
        """Give the workload's memory back."""
        self._prepared.clear()
        vars(self._peer).clear()
        gc.collect()
        return {}

    def _build(self, spec: dict[str, Any], rates: dict[str, float]) -> None:
        self._prepared.clear()
        gc.collect()  # a workload of large tables holds gigabytes
        data: Workload = load_workload(**spec, movielens=self._movielens)
        self._peer.build(data, initial_parameters(data, self._movielens), Rates(**rates))
        self._prepared = [self._peer.prepare(batch) for batch in data.batches]
        self._next = 0


def serve(name: str, movielens: Path, requests: TextIO, answers: TextIO) -> None:
    """Say whether the peer can run here, then answer each request."""

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        worker = Worker(load_peer(name), movielens)
    except ImportError as error:
        answer({"missing": str(error)})
        return
    gc.freeze()  # as gmeta train does: what was imported is not searched for garbage in the steps
    answer({"versions": {package: version_of(package) for package in PEERS[name].packages}})
    for line in requests:
        request = json.loads(line)
        answer(getattr(worker, request.pop("do"))(**request))


def version_of(package: str) -> str:
    """Version of an installed package, or of copied files that name it themselves."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version: str = importlib.import_module(f"{package}._version").__version__
        return version


def main() -> None:
    """Entry point of `python -m peers.worker`, started by peers_movielens.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--movielens", type=Path, required=True)
    options = parser.parse_args()
    # Libraries may print: what they write to standard output goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(options.name, options.movielens, sys.stdin, answers)
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may abort an orderly exit


if __name__ == "__main__":
    main()
