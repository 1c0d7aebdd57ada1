"""Messages through shared memory: what gloo brings, to the bit, in any order, until a rank dies."""

import os
import resource
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gmeta.distributed.averaging import LayerAverage
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.transport.shared_memory import FIRST_BYTES, SharedMemory, open_shared_memory
from gmeta.distributed.transport.transport import GlooTransport, Swap, Transport
from tests.distributed.harness import on_ranks
from tests.distributed.test_sharding_plans import Run
from tests.support.waiting import PATIENCE_S

DTYPES = (torch.float32, torch.int32, torch.int64, torch.float16)
ROUNDS = 12


def sharing(ranks: Ranks) -> Ranks:
    """The same ranks, but through shared memory."""
    transport = open_shared_memory(ranks.control, PATIENCE_S)
    assert isinstance(transport, SharedMemory)
    return replace(ranks, transport=transport)


def swapped(transport: Transport, ranks: Ranks, seed: int) -> tuple[torch.Tensor, Swap]:
    """Start to swap values of every rank's own; all ranks draw the same sizes."""
    generator = torch.Generator().manual_seed(seed)
    world = ranks.world_size
    counts_WW = torch.randint(0, 50, (world, world), generator=generator).tolist()
    counts_WW[seed % world] = [0] * world  # somebody gives nothing
    dtype = DTYPES[seed % len(DTYPES)]
    others = [peer for peer in range(world) if peer != ranks.rank]
    given = [counts_WW[ranks.rank][peer] for peer in others]
    taken = [counts_WW[peer][ranks.rank] for peer in others]
    values = (torch.arange(sum(given)) + 1_000 * ranks.rank).to(dtype)
    result = torch.full((sum(taken),), -1, dtype=dtype)
    return result, transport.swap(values, given, taken, result)


def exchange_on_rank(ranks: Ranks) -> dict[str, Any]:
    """Swaps and sums by both transports, waited for backwards; every third is never read."""
    ranks = sharing(ranks)
    found: dict[str, Any] = {}
    for name, transport in (
        ("shared", ranks.transport),
        ("gloo", GlooTransport(ranks.rows, ranks.control)),
    ):
        results = []
        for round_number in range(ROUNDS):
            swaps = [swapped(transport, ranks, 7 * round_number + i) for i in range(3)]
            values = torch.arange(5.0, dtype=torch.float64) * (ranks.rank + 1)
            summing = transport.add(values)
            summing.wait()
            swaps = swaps[:2] if name == "shared" else swaps
            for result, swap in reversed(swaps):
                assert torch.equal(torch.cat(swap.parts()), result)
            results += [result for result, _ in swaps[:2]] + [values]
        found[name] = results
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
def test_swaps_and_sums_are_those_of_gloo_in_whatever_order_they_are_read(world_size: int) -> None:
    for found in on_ranks(world_size, exchange_on_rank):
        assert len(found["shared"]) == 3 * ROUNDS
        for mine, expected in zip(found["shared"], found["gloo"], strict=True):
            assert torch.equal(mine, expected)


def large_on_rank(ranks: Ranks) -> tuple[list[bool], list[float]]:
    """Sums that outgrow the memory while earlier ones are unread; then many that fit."""
    ranks = sharing(ranks)
    sizes = [FIRST_BYTES // 16, FIRST_BYTES // 8, FIRST_BYTES]
    values = [torch.full((size,), float(ranks.rank + index)) for index, size in enumerate(sizes)]
    pending = [ranks.transport.add(one) for one in values]
    for one in pending:
        one.wait()
    exact = [bool((one == 2 * index + 1).all()) for index, one in enumerate(values)]
    small = []
    for number in range(200):
        numbers = torch.full((FIRST_BYTES // 16,), float(number))
        ranks.transport.add(numbers).wait()
        small.append(numbers.mean().item())
    return exact, small


@pytest.mark.distributed
def test_memory_grows_with_the_messages_and_is_used_again() -> None:
    for exact, small in on_ranks(2, large_on_rank):
        assert exact == [True, True, True]
        assert small == [2.0 * number for number in range(200)]


def kept_on_rank(ranks: Ranks) -> tuple[list[bool], bool, int]:
    """A swap that is kept while others come and go, and behind one that needs larger memory; how
    large that is in the end.
    """
    ranks = sharing(ranks)
    transport, size = ranks.transport, FIRST_BYTES // 16
    assert isinstance(transport, SharedMemory)

    def given(number: int) -> torch.Tensor:
        return torch.full((size,), float(number + 100 * ranks.rank))

    mine = given(0)
    kept = transport.swap(mine, [size], [size])
    (part,) = kept.parts()
    peer = 100 * (1 - ranks.rank)
    for number in range(1, 20):
        (other,) = transport.swap(given(number), [size], [size]).parts()
        assert (other == number + peer).all()
    unchanged = [bool((part == peer).all()), bool((mine == 100 * ranks.rank).all())]
    del kept
    waiting = given(7)
    large = torch.ones(FIRST_BYTES)
    transport.swap(large, [FIRST_BYTES], [FIRST_BYTES]).parts()
    (moved,) = transport.swap(waiting, [size], [size]).parts()
    last = bool((moved == 7 + peer).all())
    for _ in range(50):
        transport.swap(given(0), [size], [size]).parts()
    return unchanged, last, transport._outbox.segment.num_bytes


@pytest.mark.distributed
def test_memory_of_a_swap_stays_as_it_is_while_the_swap_lives() -> None:
    for unchanged, moved, num_bytes in on_ranks(2, kept_on_rank):
        assert unchanged == [True, True]
        assert moved
        assert num_bytes < 20 * FIRST_BYTES


def lose_peer_on_rank(ranks: Ranks) -> tuple[float, str, str]:
    """Rank 1's sockets close, as the kernel does when a process is killed, while rank 0 waits."""
    ranks = sharing(ranks)
    assert isinstance(ranks.transport, SharedMemory)
    if ranks.rank == 1:
        time.sleep(0.5)
        for peer in ranks.transport._peers:
            peer.socket.close()
        return 0.0, "", ""
    zeros = torch.zeros(3)
    start, messages = time.monotonic(), []
    for _ in range(2):  # while it waits, and when it sends
        with pytest.raises(dist.DistError) as error:
            ranks.transport.add(zeros).wait()
        messages.append(str(error.value))
    return time.monotonic() - start, messages[0], messages[1]


@pytest.mark.distributed
def test_a_peer_that_is_gone_is_told_at_once_and_by_its_number() -> None:
    (seconds, waiting, sending), _ = on_ranks(2, lose_peer_on_rank)
    assert seconds < PATIENCE_S / 4  # not by its timeout
    assert waiting == "rank 1 closed its connection"
    assert sending == waiting


def without_descriptors_on_rank(ranks: Ranks) -> str:
    """Rank 0 may open no file more when rank 1 sends it memory that is larger."""
    ranks = sharing(ranks)
    dist.barrier(group=ranks.control)
    first = len(os.listdir("/proc/self/fd"))
    count = FIRST_BYTES  # four times as many bytes
    if ranks.rank == 1:
        ranks.transport.swap(torch.ones(count), [count], [0])
        dist.barrier(group=ranks.control)
        dist.barrier(group=ranks.control)  # its sockets live until rank 0 has read
        return ""
    swap = ranks.transport.swap(torch.zeros(0), [0], [count])
    dist.barrier(group=ranks.control)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Every number below the limit is taken.
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + 64, before[1]))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    try:
        with pytest.raises(dist.DistNetworkError) as error:
            swap.parts()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        dist.barrier(group=ranks.control)
    return str(error.value)


@pytest.mark.distributed
def test_memory_that_cannot_be_opened_is_told() -> None:
    told, _ = on_ranks(2, without_descriptors_on_rank)
    assert told == (
        "rank 1 sent memory that cannot be opened here: this process has too many open files. "
        "Raise their limit (ulimit -n)"
    )


def train_both_ways(ranks: Ranks) -> list[dict[str, Any]]:
    results = []
    over_tcp = replace(ranks, transport=GlooTransport(ranks.rows, ranks.control))
    for how in (sharing(ranks), over_tcp):
        run = Run(how, "mixed")
        # It lays out its messages anew after one step, and gloo then adds those of three ranks in
        # another order: a resumed run would be another one in its last digits.
        assert not any(isinstance(one, DistributedDataParallel) for one in run.sharded.modules())
        run.train(0, 3)
        results.append(run.result())
    return results


@pytest.mark.distributed
def test_training_through_shared_memory_is_training_over_tcp() -> None:
    for shared, over_tcp in on_ranks(2, train_both_ways):
        assert shared["losses"] == over_tcp["losses"]
        for name, value in over_tcp["layers"].items():
            assert torch.equal(shared["layers"][name], value)
        for name, parts in over_tcp["tables"].items():
            for (_, expected), (_, values) in zip(parts, shared["tables"][name], strict=True):
                assert torch.equal(values, expected)


def average_on_rank(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor, str]:
    ranks = sharing(ranks)
    torch.manual_seed(ranks.rank)
    used, unused = nn.Linear(3, 2), nn.Linear(2, 2)
    wide = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    LayerAverage([*used.parameters(), wide], ranks)
    ((used(torch.ones(1, 3)).sum() + wide) * (ranks.rank + 1)).backward()
    assert wide.grad is not None
    assert wide.grad.tolist() == [1.5]
    assert used.weight.grad is not None
    LayerAverage([*unused.parameters()], ranks)
    with pytest.raises(RuntimeError) as error:
        unused.weight.sum().backward()
    return used.weight.detach(), used.weight.grad, str(error.value)


@pytest.mark.distributed
def test_layers_start_equal_average_their_gradients_and_must_all_have_one() -> None:
    (weight, grad, message), (other, _, _) = on_ranks(2, average_on_rank)
    assert torch.equal(weight, other)
    assert torch.equal(grad, torch.full((2, 3), 1.5))
    assert message == "backward gave 1 of the layers no gradient to average"
