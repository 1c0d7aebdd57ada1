"""Messages between the ranks of one host: the values lie in memory that all of them map, and a
packet on a Unix socket says where.

gloo sends every message through the kernel's TCP twice over and wakes two threads for it, on the
core that trains: with a core a rank that is a quarter of a step (benchmarks/scaling.py).

Nothing has a name that could outlive the ranks: memory is a memfd whose descriptor travels through
the socket, sockets are abstract and closed once everybody is connected. A rank that dies closes its
sockets, which its peers notice at once. Sending and receiving a packet are also what orders the
writes before the reads, on any processor.
"""

import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from gmeta.distributed.transport.transport import Swap, Transport

FIRST_BYTES = 1 << 22
ALIGNMENT = 64  # bytes; a cache line
# Number of the message, first byte and bytes of the values, last message that the sender has read.
PACKET = struct.Struct("<qqqq")
PEER = struct.Struct("3i")  # struct ucred: process, user, group
HELLO = struct.Struct("<q")  # the caller's rank


def open_shared_memory(control: dist.ProcessGroup, timeout_s: int) -> "SharedMemory | None":
    """Connect all ranks and return the transport, if all are on one host that has what it takes;
    None otherwise. Every rank calls it.

    Raises:
        DistError: a rank did not connect within the timeout.
    """
    rank, world_size = control.rank(), control.size()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        hosts: list[Any] = [None] * world_size
        dist.all_gather_object(hosts, _listen(listener, world_size), group=control)
        if None in hosts or len({host for host, _ in hosts}) > 1:
            return None
        try:
            sockets = _connect_peers(listener, rank, [address for _, address in hosts], timeout_s)
        except OSError as error:
            raise dist.DistNetworkError(
                f"the ranks of this host cannot connect to each other: {error}"
            ) from error
    return SharedMemory(rank, sockets)


def _connect_peers(
    listener: socket.socket, rank: int, addresses: list[bytes], timeout_s: int
) -> dict[int, socket.socket]:
    """Return a socket to every other rank: this one calls those before it, and is called by the
    others.
    """
    sockets: dict[int, socket.socket] = {}
    for peer in range(rank):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.settimeout(timeout_s)
        one.connect(addresses[peer])
        one.send(HELLO.pack(rank))
        sockets[peer] = one
    listener.settimeout(timeout_s)
    while len(sockets) < len(addresses) - 1:
        one, _ = listener.accept()
        # Anybody on the host may call an abstract socket.
        if _user_of(one) != os.geteuid():
            one.close()
            continue
        one.settimeout(timeout_s)
        hello = one.recv(HELLO.size)
        if not hello:
            raise ConnectionResetError("one of them is gone")
        sockets[HELLO.unpack(hello)[0]] = one
    return sockets


def _listen(listener: socket.socket, world_size: int) -> tuple[str, bytes] | None:
    """Return what tells this host, network namespace and user from others, and the address where
    this rank listens; None where the system lacks a part of it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = os.stat("/proc/self/ns/net").st_ino
        os.close(os.memfd_create("gmeta"))
        address = b"\0gmeta-" + secrets.token_hex(16).encode()
        listener.bind(address)
        listener.listen(world_size)
    except (OSError, AttributeError):
        return None  # not Linux, or a sandbox that forbids it
    return f"{boot} {network} {os.geteuid()}", address


def _user_of(one: socket.socket) -> int:
    credentials = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    user: int = PEER.unpack(credentials)[1]
    return user


class _Segment:
    """Mapped memory."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        self._memory = mmap(descriptor, num_bytes)

    @classmethod
    def new(cls, num_bytes: int) -> "_Segment":
        """Return zeroed memory, to be shared by its descriptor."""
        descriptor = os.memfd_create("gmeta", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        return cls(descriptor, num_bytes)

    def values(self, first: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """Return a view of the bytes from `first` on, as values of this type."""
        if not num_bytes:
            return torch.empty(0, dtype=dtype)
        count = num_bytes // dtype.itemsize
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=first)


@dataclass
class _Block:
    """Memory of one message."""

    segment: _Segment
    first: int
    message: int


class _Outbox:
    """A ring of memory that this rank writes and its peers read; a larger one where it is full."""

    def __init__(self) -> None:
        self._blocks: deque[_Block] = deque()  # oldest first
        self._end = 0
        self.segment = _Segment.new(FIRST_BYTES)

    def write(self, values: Tensor, message: int, read: int) -> _Block:
        """Return where a copy of a message's values lies; the memory of messages up to `read` may
        be used again.
        """
        while self._blocks and self._blocks[0].message <= read:
            self._blocks.popleft()
        num_bytes = values.numel() * values.element_size()
        room = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        first = self._find_room(room)
        self._end = first + room
        self._blocks.append(_Block(self.segment, first, message))
        if num_bytes:
            self.segment.values(first, num_bytes, values.dtype).copy_(values)
        return self._blocks[-1]

    def _find_room(self, room: int) -> int:
        size = self.segment.num_bytes
        if not self._blocks:
            self._end = 0
        # Of a ring: in use is [oldest, end), or, where it has wrapped, all but [end, oldest).
        oldest = self._blocks[0].first if self._blocks else 0
        wrapped = self._blocks and oldest >= self._end
        if self._end + room <= (oldest if wrapped else size):
            return self._end
        if not wrapped and room <= oldest:
            return 0
        # Peers that still read the old one have it mapped.
        os.close(self.segment.descriptor)
        self.segment = _Segment.new(2 * max(size, room))
        self._blocks.clear()
        return 0


@dataclass
class _Inbox:
    """What one peer has told this rank."""

    socket: socket.socket
    segment: _Segment | None = None
    read: int = -1  # the peer has read this rank's messages up to here
    arrived: dict[int, tuple[_Segment, int, int]] = field(default_factory=dict)


@final
class SharedMemory(Transport):
    """Carries the messages of ranks on one host through memory that all of them map. For one
    thread.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = [_Inbox(sockets[peer]) for peer in sorted(sockets)]
        self._names = sorted(sockets)
        self._outbox = _Outbox()
        self._known: _Segment | None = None  # of this rank's memory, to all peers
        self._next = 0
        self._open: dict[int, None] = {}  # messages that this rank will read

    def swap(
        self,
        values: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: Tensor | None = None,
    ) -> "_SharedSwap":
        """Write the values into shared memory, and tell every peer where its part lies."""
        size = values.element_size()
        message, _ = self._post(values, [count * size for count in send_counts])
        into = None if out is None else out.split_with_sizes(list(receive_counts))
        return _SharedSwap(_Message(self, message), values.dtype, into)

    def add(self, values: Tensor) -> "_Sum":
        """Share this rank's values; whoever waits for the sum adds all ranks' values itself."""
        message, block = self._post(values, None)
        num_bytes = values.numel() * values.element_size()
        mine = block.segment.values(block.first, num_bytes, values.dtype)
        return _Sum(_Message(self, message), self._rank, mine, values)

    def _read_by_all(self) -> int:
        """Return the last message that nobody needs any more, like all before it."""
        return min(self._oldest_open() - 1, *(peer.read for peer in self._peers))

    def _oldest_open(self) -> int:
        return next(iter(self._open), self._next)

    def _post(self, values: Tensor, bytes_of_peer: list[int] | None) -> tuple[int, _Block]:
        """Write values and tell every peer where its part is (`bytes_of_peer`), or all of them
        where to find all; return the message's number and memory.
        """
        read, message = self._oldest_open() - 1, self._next
        block = self._outbox.write(values, message, self._read_by_all())
        self._next += 1
        self._open[message] = None
        # The first packet that names a segment brings its descriptor.
        descriptors = [] if self._known is block.segment else [block.segment.descriptor]
        self._known = block.segment
        at, all_values = block.first, values.numel() * values.element_size()
        of_peer = bytes_of_peer or [all_values] * len(self._peers)
        for name, peer, num_bytes in zip(self._names, self._peers, of_peer, strict=True):
            try:
                # What was read is told with the next message: an answer of its own would double the
                # packets.
                packet = PACKET.pack(message, at, num_bytes, read)
                socket.send_fds(peer.socket, [packet], descriptors)
            except OSError as error:
                raise _lost_peer_error(name, error) from error
            if bytes_of_peer is not None:
                at += num_bytes
        return message, block

    def parts(self, message: int, dtype: torch.dtype) -> list[Tensor]:
        """Wait for what every peer gave, and return it where it lies."""
        found = []
        for name, peer in zip(self._names, self._peers, strict=True):
            while message not in peer.arrived:
                self._receive(name, peer)
            segment, first, num_bytes = peer.arrived[message]
            found.append(segment.values(first, num_bytes, dtype))
        return found

    def close(self, message: int) -> None:
        """Let the memory of this message be used again: nobody reads it here any more."""
        self._open.pop(message, None)
        for peer in self._peers:
            peer.arrived.pop(message, None)

    def _receive(self, name: int, peer: _Inbox) -> None:
        try:
            packet, descriptors, flags, _ = socket.recv_fds(
                peer.socket, PACKET.size, 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise _lost_peer_error(name, error) from error
        if not packet:
            raise _lost_peer_error(name, None)
        if flags & socket.MSG_CTRUNC:
            # The kernel drops a descriptor that finds no room; its memory would be missed unseen.
            raise dist.DistNetworkError(
                f"rank {name} sent memory that cannot be opened here: this process has too many "
                "open files. Raise their limit (ulimit -n)"
            )
        for descriptor in descriptors:
            peer.segment = _Segment(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)
        assert peer.segment is not None  # a peer's first packet brings it
        message, first, num_bytes, read = PACKET.unpack(packet)
        peer.read = max(peer.read, read)
        # A packet of a message that this rank has closed is only read for what it says of the peer.
        if message >= self._next or message in self._open:
            peer.arrived[message] = peer.segment, first, num_bytes


class _Message:
    """A message that this rank reads, and its own: nobody's memory is reused while it lives."""

    def __init__(self, shared: SharedMemory, number: int) -> None:
        self._shared = shared
        self._number = number

    def parts(self, dtype: torch.dtype) -> list[Tensor]:
        """Wait for what every peer gave, and return it where it lies."""
        return self._shared.parts(self._number, dtype)

    def close(self) -> None:
        """Let the memory of this message be used again."""
        self._shared.close(self._number)

    def __del__(self) -> None:
        self.close()


@final
class _SharedSwap(Swap):
    def __init__(self, message: _Message, dtype: torch.dtype, out: Sequence[Tensor] | None) -> None:
        self._message = message
        self._dtype = dtype
        self._out = out

    def parts(self) -> list[Tensor]:
        """Wait for what every peer gave; copy it to where it is wanted, if anywhere."""
        found = self._message.parts(self._dtype)
        if self._out is None:
            return found
        for mine, part in zip(self._out, found, strict=True):
            mine.copy_(part)
        return list(self._out)


@final
class _Sum:
    """A sum under way: this rank's own values, and where the total is to stand."""

    def __init__(self, message: _Message, rank: int, mine: Tensor, total: Tensor) -> None:
        self._message = message
        self._rank = rank
        self._mine = mine
        self._total = total

    def wait(self) -> None:
        """Add all ranks' values, once they are there."""
        parts = self._message.parts(self._mine.dtype)
        # In the order of ranks, so that the sum is the same number everywhere.
        ordered = [*parts[: self._rank], self._mine, *parts[self._rank :]]
        torch.add(ordered[0], ordered[1], out=self._total)
        for part in ordered[2:]:
            self._total.add_(part)
        self._message.close()


def _lost_peer_error(rank: int, error: OSError | None) -> dist.DistNetworkError:
    """Return the error that torch raises for a lost peer."""
    match error:
        case None | ConnectionError():
            reason = "closed its connection"
        case TimeoutError():
            reason = "did not answer in time"
        case _:
            reason = f"cannot be reached: {error}"
    return dist.DistNetworkError(f"rank {rank} {reason}")
