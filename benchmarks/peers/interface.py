"""What a peer must offer to be checked and timed, and which peers there are."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peers.workload import Batch, Rates, Workload

Parameters = dict[str, NDArray[np.float32]]


class Peer(ABC):
    """One way to train MeLU by second-order MAML: one inner step, only the decision layers adapt.

    The outer loss is the mean over tasks of the query rows' mean squared error."""

    @abstractmethod
    def build(self, data: Workload, init: Mapping[str, NDArray[np.float32]], rates: Rates) -> None:
        """Make model and optimizer from the initial parameters, which the peer may overwrite."""

    @abstractmethod
    def prepare(self, batch: Batch) -> Any:
        """The batch in the layout this peer wants, as a data loader would give it. Not timed."""

    @abstractmethod
    def step(self, prepared: Any) -> float:
        """One outer step. Returns the query loss before it. This is what is timed."""

    @abstractmethod
    def gradients(self, prepared: Any) -> Parameters:
        """The outer gradient, dense, under the initial parameters' names. Trains nothing."""


@dataclass(frozen=True)
class Entry:
    """Where a peer's code is, and whose environment it needs."""

    module: str
    packages: tuple[str, ...]  # whose versions are reported
    own_environment: bool = True  # True: .venv-peers; False: the project's own
    dense_gradients: bool = False  # its gradients of the tables are as large as the tables


REFERENCE = "loop"
OURS = "gmeta"
PEERS: dict[str, Entry] = {
    OURS: Entry("peers.ours", ("torch", "torchrec"), own_environment=False),
    "loop": Entry("peers.torch_loop", ("torch",), own_environment=False),
    "vmap": Entry("peers.torch_vmap", ("torch",), own_environment=False),
    "learn2learn": Entry("peers.learn2learn_maml", ("learn2learn", "torch"), dense_gradients=True),
    "jax": Entry("peers.jax_vmap", ("jax",)),
}


def load_peer(name: str) -> Peer:
    """The peer of that name, from its module's `make()`.

    Raises:
        ImportError: a package that it needs is not installed in this environment."""
    peer = importlib.import_module(PEERS[name].module).make()
    if not isinstance(peer, Peer):
        raise TypeError(f"{PEERS[name].module}.make() returned {type(peer)}; it must return a Peer")
    return peer
