"""Several hosts on one machine: network namespaces on a bridge, and cables that can be pulled."""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

INTERFACE = "eth0"
_CLONE_NEWNET = 0x40000000  # linux/sched.h


class NoNamespacesError(Exception):
    """This machine does not let us make network namespaces."""


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespacesError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Host:
    """A namespace with one address on the bridge."""

    namespace: str
    hub: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs in this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def enter(self) -> None:
        """From now on the network of this thread, and of those that it starts, is this host's."""
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
        with open(f"/var/run/netns/{self.namespace}") as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns to {self.namespace} failed")

    def pull_cable(self) -> None:
        """From now on nothing arrives and nothing leaves, and nobody is told."""
        _ip("-n", self.hub, "link", "set", self.namespace, "down")

    def plug_cable(self) -> None:
        """As before `pull_cable`."""
        _ip("-n", self.hub, "link", "set", self.namespace, "up")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """The first host is the hub, which no cable leads to. Raises NoNamespacesError."""
    if shutil.which("ip") is None:
        raise NoNamespacesError("no `ip` on PATH (Debian: iproute2)")
    hub = f"g{os.getpid()}h"
    made = [Host(hub, hub, "10.77.0.1")]
    made += [Host(f"g{os.getpid()}n{i}", hub, f"10.77.0.{10 + i}") for i in range(count - 1)]
    try:
        for host in made:
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", hub, "addr", "add", f"{made[0].address}/24", "dev", "br0")
        _ip("-n", hub, "link", "set", "br0", "up")
        for host in made[1:]:
            # The end in the hub has the host's name: that is the cable.
            _ip("-n", hub, "link", "add", host.namespace, "type", "veth",
                "peer", "name", INTERFACE, "netns", host.namespace)  # fmt: skip
            _ip("-n", hub, "link", "set", host.namespace, "master", "br0", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip("-n", host.namespace, "link", "set", INTERFACE, "up")
        yield made
    finally:
        for host in reversed(made):
            with contextlib.suppress(NoNamespacesError):
                _ip("netns", "delete", host.namespace)
