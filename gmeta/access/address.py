"""Addresses of the form HOST:PORT, checked before anything listens or calls."""

import errno
import socket

from gmeta.access.errors import AntdtError
from gmeta.errors import UserError

DEFAULT_ADDRESS = "127.0.0.1:7070"  # of a service, and where its callers look for one
HIGHEST_PORT = 65535


class AddressError(AntdtError, UserError):
    """An address is not of the form HOST:PORT, or cannot be listened on."""


def split_address(name: str, address: str) -> tuple[str, int]:
    """Return (host, port) to listen on; `name` is the option that the message names."""
    host, port = _halves(address)
    if not host or not 0 <= port <= HIGHEST_PORT:
        raise AddressError(
            f"{name} is {address!r}; allowed is HOST:PORT with a port from 0 (any free one) to "
            f"{HIGHEST_PORT}, such as 0.0.0.0:7070. Correct it."
        )
    return host, port


def check_target(address: str) -> None:
    """Raise AddressError unless `address` is a service's."""
    # A scheme of gRPC's is accepted too: `dns:///HOST:PORT`, `unix:PATH`.
    host, port = _halves(address)
    if not address.startswith("unix:") and (not host or not 0 < port <= HIGHEST_PORT):
        raise AddressError(
            f"the service's address is {address!r}; allowed is HOST:PORT with a port from 1 to "
            f"{HIGHEST_PORT}, such as 127.0.0.1:7070. Correct it."
        )


def _halves(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port) if port.isdecimal() else -1


def check_free(name: str, host: str, port: int) -> None:
    """Raise AddressError with the reason where an address cannot be bound."""
    # Tried before gRPC does: its own error says only that it cannot bind.
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: a port that an earlier service has just left is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Never listens: a client that tries again must not meet this probe.
            probe.bind(where)
    except OSError as error:
        help_text = (
            "Stop the service that has it, or choose another port"
            if error.errno == errno.EADDRINUSE
            else "Name an address of this machine"
        )
        raise AddressError(
            f"cannot serve at {name} {host}:{port}: {(error.strerror or str(error)).lower()}. "
            f"{help_text}."
        ) from error
