"""Whether ranks reach the others, before they wait for them: names nodes that do not."""

import fcntl
import json
import os
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gmeta.errors import GMetaError, UserError

STORE_TIMEOUT_S = 10.0
CONNECT_S = 5.0
LOOK_AT = (
    "See whether that host runs, what a firewall closes, and whether GLOO_SOCKET_IFNAME on each "
    "host names an interface by which the others reach it"
)
MOST_PEERS = 16  # that each node tries, the next ones: more would take more than seconds
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h


def is_spread() -> bool:
    """Return whether the job has ranks on other nodes, too."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return world_size > int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def check_reachable() -> None:
    """Raise UserError or GMetaError where this rank of several would wait for others in vain."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    # The loopback's last.
    interfaces = sorted((each for _, each in socket.if_nameindex()), key=lambda each: each == "lo")
    if missing := set(filter(None, name.split(","))) - {*interfaces}:
        raise UserError(
            f"GLOO_SOCKET_IFNAME = {name!r}: this host has no interface {min(missing)!r}, but "
            f"{', '.join(interfaces)}. Name the one by which the other hosts reach this one"
        )
    first, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "0")
    # gloo, which carries ids, tells the others the address that this host's name stands for. Where
    # the first host's is the loopback's, too, all are on this host.
    own = socket.gethostname()
    if is_spread() and not name and _is_loopback(own) and not _is_loopback(first):
        raise UserError(
            f"this host's name, {own!r}, stands for the loopback's address, by which no other host "
            f"reaches it: set GLOO_SOCKET_IFNAME to the interface that they reach, of "
            f"{', '.join(interfaces)}"
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            # A rank whose agent was killed first would try it again for minutes.
            socket.create_connection((first, int(port)), STORE_TIMEOUT_S).close()
        except ConnectionRefusedError as error:
            raise GMetaError(
                f"torchrun, which started this rank, no longer answers at {first}:{port}: start "
                "the job again"
            ) from error
        except OSError:
            pass  # a network that may come back: joining the job waits for it


def _is_loopback(host: str) -> bool:
    """Return whether a host's first address is the loopback's, which gloo takes if it has none."""
    with suppress(socket.gaierror):
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        return address.startswith(("127.", "::1"))
    return True


def check_all_nodes(store: Store) -> None:
    """Call `check_nodes` where this rank is the one of its node, in a job of several."""
    if is_spread() and os.environ.get("LOCAL_RANK") == "0":
        rank, on_node, world_size = (
            int(os.environ[name]) for name in ("RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
        )
        own = PrefixStore("nodes", store)
        check_nodes(own, rank // on_node, world_size // on_node, own_address())


def check_nodes(store: Store, node: int, num_nodes: int, address: str) -> None:
    """Have each node of a job, by one of its ranks, try others at the `address` that gloo tells
    them. Raises GMetaError on all nodes: some do not reach each other. Collective."""
    named = f"node {node} ({socket.gethostname()}, {address})"
    with _listen(address) as listening:
        store.set(f"at-{node}", json.dumps([named, address, listening.getsockname()[1]]))
        peers = [(node + step) % num_nodes for step in range(1, min(num_nodes, MOST_PEERS + 1))]
        # One after the other: a store answers one question at a time.
        places = [place for peer in peers if (place := _hear(store, f"at-{peer}"))]
        with ThreadPoolExecutor(MOST_PEERS) as pool:
            tried = zip(places, pool.map(_try_to_reach, places), strict=True)
            own = [(named, place[0], why) for place, why in tried if why]
        store.set(f"report-{node}", json.dumps(own))
        # Of all: those that still try would miss a node that ends now.
        reports = [_hear(store, f"report-{each}") for each in range(num_nodes)]
    silent = [each for each, of_node in enumerate(reports) if of_node is None]
    failures = [failure for of_node in reports for failure in of_node or ()]
    if silent:
        raise GMetaError(f"node {silent[0]} of {num_nodes} says nothing. {LOOK_AT}")
    if failures:
        # Who takes part in most of them, rather than whom it does not reach.
        blamed, _ = Counter(name for failure in failures for name in failure[:2]).most_common(1)[0]
        source, target, why = min(failures, key=lambda failure: failure[1] != blamed)
        more = f" ({len(failures) - 1} more such pairs)" if len(failures) > 1 else ""
        raise GMetaError(f"{source} does not reach {target}{more}: {why}. {LOOK_AT}")


def own_address() -> str:
    """Return the address that gloo tells other hosts: of GLOO_SOCKET_IFNAME's interface, or what
    this host's name stands for; "": it cannot be told."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    with suppress(OSError):
        if not name:
            found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            return str(found[0][4][0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            answer = fcntl.ioctl(asked, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family)
    except OSError as error:
        raise UserError(
            f"this host's name, {socket.gethostname()!r}, stands for {address}, which is no "
            f"address of its own ({error.strerror}): set GLOO_SOCKET_IFNAME to the interface by "
            "which the other hosts reach it"
        ) from error


def _try_to_reach(place: Sequence[Any]) -> str:
    """Return why a node cannot be reached, or ""."""
    _, address, port = place
    if not address:
        return ""
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except OSError as error:
        return error.strerror or f"no answer within {CONNECT_S:g} s"
    return ""


def _hear(store: Store, key: str) -> list[Any] | None:
    with suppress(RuntimeError):  # torch's of a timeout
        store.wait([key])  # for the store's own time: a node may still have to import
        found: list[Any] = json.loads(store.get(key))
        return found
    return None
