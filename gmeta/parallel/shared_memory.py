"""Messages between the ranks of one host: the values lie in memory that all of them map, and one
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

from gmeta.parallel.transport import Transport

FIRST_BYTES = 1 << 22
ALIGNMENT = 64  # bytes; a cache line
# Number of the message, first byte and bytes of the values, last message that the sender has read.
PACKET = struct.Struct("<qqqq")
PEER = struct.Struct("3i")  # struct ucred: process, user, group
HELLO = struct.Struct("<q")  # the caller's rank


def open_shared_memory(control: dist.ProcessGroup, timeout_s: int) -> "SharedMemory | None":
    """Connect all ranks, if all are on one host that has what it takes; every rank calls it.

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
            sockets = _connected(listener, rank, [address for _, address in hosts], timeout_s)
        except OSError as error:
            raise dist.DistNetworkError(
                f"the ranks of this host cannot connect to each other: {error}"
            ) from error
    return SharedMemory(rank, sockets)


def _connected(
    listener: socket.socket, rank: int, addresses: list[bytes], timeout_s: int
) -> dict[int, socket.socket]:
    """A socket to every other rank: this one calls those before it, and is called by the others."""
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
    """What tells this host, this network namespace and this user from others; where this rank
    listens. None where the system lacks a part of it.
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
        self.bytes = torch.frombuffer(mmap(descriptor, num_bytes), dtype=torch.uint8)

    @classmethod
    def new(cls, num_bytes: int) -> "_Segment":
        """Zeros, to be shared by their descriptor."""
        descriptor = os.memfd_create("gmeta", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        return cls(descriptor, num_bytes)

    def values(self, first: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """A view of what lies there."""
        return self.bytes[first : first + num_bytes].view(dtype)


class _Outbox:
    """A ring of memory that this rank writes and its peers read; a larger one where it is full."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[int, int]] = deque()  # message, first byte; oldest first
        self._end = 0
        self.segment = _Segment.new(FIRST_BYTES)

    def put(self, message: int, read: int, values: Tensor, divisor: int) -> int:
        """The first byte of values / divisor; blocks of messages up to `read` are free again."""
        while self._blocks and self._blocks[0][0] <= read:
            self._blocks.popleft()
        num_bytes = values.numel() * values.element_size()
        room = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        first = self._place(room)
        self._blocks.append((message, first))
        self._end = first + room
        if num_bytes:
            written = self.segment.values(first, num_bytes, values.dtype)
            if divisor == 1:  # also whole numbers
                written.copy_(values)
            else:
                torch.div(values, divisor, out=written)
        return first

    def _place(self, room: int) -> int:
        size = self.segment.bytes.numel()
        if not self._blocks:
            self._end = 0
        oldest = self._blocks[0][1] if self._blocks else 0
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
    knows: _Segment | None = None  # of this rank's memory


@final
class SharedMemory(Transport):
    """See the top of the file. For one thread."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = [_Inbox(sockets[peer]) for peer in sorted(sockets)]
        self._names = sorted(sockets)
        self._outbox = _Outbox()
        self._next = 0
        self._open: dict[int, None] = {}  # messages that this rank will read

    def swap(
        self,
        given: Tensor,
        counts_given: Sequence[int],
        taken: Tensor,
        counts_taken: Sequence[int],
        divisor: int = 1,
    ) -> "_Message":
        """See Transport."""
        size = given.element_size()
        message, _ = self._post(given, [count * size for count in counts_given], divisor)

        def take(parts: list[Tensor]) -> None:
            for mine, part in zip(taken.split(list(counts_taken)), parts, strict=True):
                mine.copy_(part)

        return _Message(self, message, taken.dtype, take)

    def add(self, values: Tensor) -> "_Message":
        """See Transport."""
        num_bytes = values.numel() * values.element_size()
        message, first = self._post(values, None)
        segment = self._outbox.segment

        def take(parts: list[Tensor]) -> None:
            # In the order of ranks, so that the sum is the same number everywhere.
            mine = segment.values(first, num_bytes, values.dtype)
            ordered = [*parts[: self._rank], mine, *parts[self._rank :]]
            torch.add(ordered[0], ordered[1], out=values)
            for part in ordered[2:]:
                values.add_(part)

        return _Message(self, message, values.dtype, take)

    def _post(
        self, values: Tensor, bytes_of_peer: list[int] | None, divisor: int = 1
    ) -> tuple[int, int]:
        """Write values and tell every peer where its part is, or all of them where to find all."""
        message = self._next
        self._next += 1
        oldest_open = next(iter(self._open), message)
        read_by_all = min(oldest_open - 1, *(peer.read for peer in self._peers))
        first = self._outbox.put(message, read_by_all, values, divisor)
        self._open[message] = None
        segment, at = self._outbox.segment, first
        whole = values.numel() * values.element_size()
        for name, peer, num_bytes in zip(
            self._names, self._peers, bytes_of_peer or [whole] * len(self._peers), strict=True
        ):
            packet = PACKET.pack(message, at, num_bytes, oldest_open - 1)
            try:
                if peer.knows is segment:
                    peer.socket.send(packet)
                else:
                    socket.send_fds(peer.socket, [packet], [segment.descriptor])
                    peer.knows = segment
            except OSError as error:
                raise _lost(name, error) from error
            if bytes_of_peer is not None:
                at += num_bytes
        return message, first

    def parts(self, message: int, dtype: torch.dtype) -> list[Tensor]:
        """What every peer gave, where it lies; waits for it."""
        found = []
        for name, peer in zip(self._names, self._peers, strict=True):
            while message not in peer.arrived:
                self._receive(name, peer)
            segment, first, num_bytes = peer.arrived.pop(message)
            found.append(segment.values(first, num_bytes, dtype))
        return found

    def close(self, message: int) -> None:
        """Nobody will read this message here any more."""
        self._open.pop(message, None)
        for peer in self._peers:
            peer.arrived.pop(message, None)

    def _receive(self, name: int, peer: _Inbox) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(
                peer.socket, PACKET.size, 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise _lost(name, error) from error
        if not packet:
            raise _lost(name, None)
        for descriptor in descriptors:
            peer.segment = _Segment(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)
        message, first, num_bytes, read = PACKET.unpack(packet)
        assert peer.segment is not None  # a peer's first packet brings it
        peer.read = max(peer.read, read)
        if message >= self._next or message in self._open:
            peer.arrived[message] = peer.segment, first, num_bytes


class _Message:
    """What a call returned; one that is dropped unread is closed."""

    def __init__(self, shared: SharedMemory, number: int, dtype: torch.dtype, take: Any) -> None:
        self._shared = shared
        self._number = number
        self._dtype = dtype
        self._take = take

    def wait(self) -> None:
        """See Pending."""
        self._take(self._shared.parts(self._number, self._dtype))
        self._shared.close(self._number)

    def __del__(self) -> None:
        self._shared.close(self._number)


def _lost(rank: int, error: OSError | None) -> dist.DistNetworkError:
    """As torch tells of a lost peer."""
    match error:
        case None | ConnectionError():
            reason = "closed its connection"
        case TimeoutError():
            reason = "did not answer in time"
        case _:
            reason = f"cannot be reached: {error}"
    return dist.DistNetworkError(f"rank {rank} {reason}")
