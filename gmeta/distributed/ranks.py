"""Ranks: joining and leaving the process group, small messages between all of them."""

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from gmeta.distributed.reachability import check_all_nodes, check_reachable
from gmeta.distributed.transport.transport import Transport
from gmeta.errors import GMetaError, UserError
from gmeta.platform.numerics import keep_freed_memory

T = TypeVar("T")
LONG_WAIT_S = 30.0
LONG_WAIT = (
    "rank %d has waited for the other ranks for %g s: see whether all of them run, and whether "
    "GLOO_SOCKET_IFNAME on each host names an interface by which the others reach it"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ranks:
    """This process among all; `control` is a gloo group for small messages between hosts, `rows`
    carries ids, and on the CPU rows and their gradients; `transport` uses both."""

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup
    # Apart from the AllReduce of the layers, which ranks start at different points of backward.
    rows: dist.ProcessGroup
    transport: Transport

    def enter_thread(self) -> None:
        """Have a new thread use this rank's GPU."""
        # Threads begin on the machine's first GPU, and would take memory of another rank's.
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)


def start_ranks(device: str, timeout_s: int, store: Store | None = None) -> Ranks:
    """Join the process group that torchrun describes in the environment; one rank without torchrun.
    A `store` replaces the rendezvous. Raises UserError: no GPU is visible, or fewer than ranks; the
    other hosts could not reach this one."""
    quieten()
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            'run.device = "cuda", but torch sees no GPU. '
            'Set run.device = "cpu" or install the driver'
        )
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    # One rank without torchrun has none of these variables.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    where = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        _check_gpu(local_rank, torch.cuda.device_count())
        torch.cuda.set_device(where)
    else:
        keep_freed_memory()
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if use_cuda else "gloo"
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    waiting = threading.Timer(LONG_WAIT_S, _log.warning, (LONG_WAIT, rank, LONG_WAIT_S))
    waiting.daemon = True
    if world_size > 1:
        waiting.start()
    try:
        if store is None and "RANK" in os.environ:
            check_reachable()
            store = next(rendezvous("env://", timeout=timeout))[0]
            store.set_timeout(timeout)
            check_all_nodes(store)
        # One rank meets no other: a store in its own memory needs no port.
        store = store or HashStore()
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        # torch tells groups apart by the order in which they are made: the same on every rank.
        control = dist.new_group(backend="gloo", timeout=timeout)
        rows = dist.new_group(backend="gloo", timeout=timeout)
    finally:
        waiting.cancel()
    return Ranks(rank, world_size, where, control, rows, Transport(rows, control))


def _check_gpu(local_rank: int, visible: int) -> None:
    # CUDA would say "invalid device ordinal", and nothing of ranks.
    if local_rank >= visible:
        raise UserError(
            f"LOCAL_RANK = {local_rank}, and torch sees {visible} GPUs on this machine: each rank "
            "needs its own, by that number. Start fewer ranks (--nproc-per-node), let each see all "
            'GPUs (CUDA_VISIBLE_DEVICES), or set run.device = "cpu"'
        )


def quieten() -> None:
    """Hide warnings of TorchRec's own calls, which no user can act on."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torchrec|torch\.distributed")
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="fbgemm_gpu")
    warnings.filterwarnings("ignore", "`_get_pg_default_device`|Multiple backends", UserWarning)
    for name in ("torch.fx._symbolic_trace", "torchrec.distributed.planner"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def explain_lost_peers() -> Iterator[None]:
    """Turn a broken collective into one line. Raises GMetaError: a peer died or kept silent."""
    try:
        # The rank that caused it reports the cause itself.
        yield
    except RuntimeError as error:
        if lost := lost_contact(error):
            raise lost from error
        raise


def lost_contact(error: BaseException) -> GMetaError | None:
    """Return the error to raise in place of a broken collective's; None: it is something else."""
    # gloo raises plain RuntimeErrors, NCCL and the store raise subclasses of DistError.
    message = str(error)
    # gloo's name one of its files, or say this after a late message.
    names_gloo = "gloo" in message or "Application timeout caused pair closure" in message
    is_gloos = isinstance(error, RuntimeError) and names_gloo
    if not isinstance(error, dist.DistError) and not is_gloos:
        return None
    # NCCL says where it stood first, and what was wrong in the end.
    reason = message.rpartition("Last error:")[2].strip() or message
    return GMetaError(
        f"lost contact with the other ranks: {reason.splitlines()[0][:200].rstrip('.')}. "
        "See what the first rank that failed said; --resume goes on from the newest checkpoint"
    )


def stop_ranks() -> None:
    """Leave the process group."""
    dist.destroy_process_group()


def sum_over_ranks(values: list[float], ranks: Ranks) -> list[float]:
    """Return the element-wise sum of every rank's values. Collective."""
    # In float64: in float32 counts of rows beyond 2**24 would no longer be exact.
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, group=ranks.control)
    summed: list[float] = total.tolist()
    return summed


def add_arrays_over_ranks(arrays: Sequence[npt.NDArray[Any]], ranks: Ranks) -> None:
    """Replace arrays on the host by their element-wise sums over the ranks."""
    for array in arrays:
        dist.all_reduce(torch.from_numpy(array), group=ranks.control)


def add_over_ranks(value: Tensor) -> None:
    """Replace a tensor by its element-wise sum over the ranks, on its device, without waiting."""
    dist.all_reduce(value)


def start_any_rank(flag: Tensor, ranks: Ranks) -> Callable[[], bool]:
    """Start to ask whether any rank's flag is set; return a function that waits for the answer."""
    number = flag.to(torch.int32).view(1)
    if ranks.device.type == "cpu":
        work = ranks.transport.add(number)

        def answer() -> bool:
            work.wait()
            return bool(number.item())

        return answer
    # On CUDA among the devices, and to memory of the host that an event guards: reading `number`
    # itself would wait for all kernels in the queue, the next step's too.
    if ranks.world_size > 1:
        dist.all_reduce(number)
    # gloo notices a rank that is gone; the device would wait for it for ever.
    hosts = ranks.transport.add(torch.zeros(1))
    received = torch.empty(1, dtype=number.dtype, pin_memory=True)
    received.copy_(number, non_blocking=True)
    is_there = torch.cuda.Event()
    is_there.record()

    def answer_of_devices() -> bool:
        hosts.wait()
        is_there.synchronize()
        return bool(received.item())

    return answer_of_devices


def new_control_group() -> dist.ProcessGroup:
    """Return another gloo group, for one thread; every rank must make it in the same place."""
    # With torch's timeout (30 minutes), not that of a step: a disk may be slow.
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def barrier(ranks: Ranks) -> None:
    """Wait until every rank is here."""
    dist.barrier(group=ranks.control)


def wait_for_hosts(ranks: Ranks) -> None:
    """Wait for the hosts of all ranks, before a wait for a GPU."""
    if ranks.device.type == "cuda":
        barrier(ranks)


def broadcast_value(value: T, ranks: Ranks) -> T:
    """Return rank 0's value, which travels pickled, on every rank; also a barrier."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=ranks.control)
    return box[0]


def gather_values(value: T, ranks: Ranks) -> list[T] | None:
    """Return every rank's value by rank, on rank 0; None elsewhere. They travel pickled."""
    received: list[Any] | None = [None] * ranks.world_size if ranks.rank == 0 else None
    dist.gather_object(value, received, dst=0, group=ranks.control)
    return received
