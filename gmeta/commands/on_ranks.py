"""How a subcommand runs on ranks: alone in this process, under torchrun, or as its starter."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gmeta.errors import GMetaError
from gmeta.launch import launch, under_torchrun

if TYPE_CHECKING:
    from gmeta.parallel import Ranks


def starts_ranks(nproc_per_node: int) -> bool:
    """Whether this process is to start ranks rather than to be one."""
    return nproc_per_node > 1 and not under_torchrun()


def start(
    arguments: Sequence[str], nproc_per_node: int, master_port: int, max_restarts: int
) -> None:
    """Start ranks that run `gmeta ARGUMENTS`, wait for them, and end with their exit code if it is
    not 0.
    """
    code = launch(arguments, nproc_per_node, master_port, max_restarts)
    if code:
        sys.exit(code)


def be_rank(
    device: str,
    timeout_s: int,
    work: "Callable[[Ranks], None]",
    *,
    shared_memory: bool = False,
) -> None:
    """Join the other ranks, do the work, leave; see start_ranks."""
    try:
        from gmeta.commands.told_once import told_once
        from gmeta.parallel import lost_peers_explained, start_ranks, stop_ranks
    except OSError as error:
        # The CUDA build of fbgemm loads the driver's libraries when it is imported.
        raise GMetaError(
            f"fbgemm-gpu cannot be loaded: {error}. On a machine without an NVIDIA driver install "
            "deploy/requirements/cpu.txt into a fresh environment; see docs/install.md"
        ) from error

    with lost_peers_explained():
        ranks = start_ranks(device, timeout_s, shared_memory=shared_memory)
        with told_once(ranks):
            work(ranks)
        stop_ranks()
