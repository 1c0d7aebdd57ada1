"""Runs a function on several gloo ranks, each a fresh process, and brings back the results. The
processes are forked from one that has the imports ready: they cost seconds a rank."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from gmeta.distributed.ranks import Ranks, start_ranks, stop_ranks
from gmeta.distributed.steps import StepTotals, batch_without_tasks, iterate_steps
from metaio.format.features import Features
from metaio.read.batch import TaskBatch
from tests.deploy.network import INTERFACE, Host
from tests.support.processes import with_imports_ready
from tests.support.waiting import PATIENCE_S


def on_ranks(
    world_size: int, work: Callable[..., Any], *arguments: Any, hosts: Sequence[Host] = ()
) -> list[Any]:
    """`work(ranks, *arguments)` on every rank; the results in the order of ranks.

    Args:
        hosts: where the ranks are, one on each; all on this machine without."""
    with tempfile.TemporaryDirectory() as folder:
        with_imports_ready()
        mp.start_processes(
            _rank,
            (world_size, folder, work, arguments, tuple(hosts)),
            world_size,
            start_method="forkserver",
        )
        return [
            torch.load(Path(folder) / f"{rank}.pt", weights_only=False)
            for rank in range(world_size)
        ]


def steps_of(
    batches: Iterable[TaskBatch], arrange: Callable[[TaskBatch], Any], features: Features,
    ranks: Ranks, **rest: Any,
) -> Iterator[tuple[Any, StepTotals]]:  # fmt: skip
    """The steps of these batches, each arranged so, as `in_step` yields them."""
    return iterate_steps(
        map(arrange, batches), arrange(batch_without_tasks(features)), ranks, **rest
    )


def _rank(
    rank: int, world_size: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...],
    hosts: tuple[Host, ...],
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    if hosts:
        hosts[rank].enter()
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    import torch.distributed as dist

    # A file store needs no port: suites that run side by side do not meet.
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    ranks: Ranks = start_ranks("cpu", timeout_s=PATIENCE_S, store=store)
    torch.save(work(ranks, *arguments), Path(folder) / f"{rank}.pt")
    stop_ranks()
    os._exit(0)  # gloo's threads may abort the interpreter at exit
