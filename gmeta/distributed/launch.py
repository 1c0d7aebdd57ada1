"""Starting ranks: torchrun's agent with one process a rank on this machine."""

import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory

from gmeta.errors import GMetaError, UserError


def has_agent() -> bool:
    """Return whether an agent of torchrun (`launch` is one) looks after this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def under_torchrun() -> bool:
    """Return whether this process already is one rank of a job that torchrun started."""
    return has_agent() or {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def restarts() -> tuple[int, int]:
    """Return how often torchrun's agent has started all ranks again, and how often it may."""
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    used, allowed = (int(os.environ.get(name, "0")) for name in names)
    return used, allowed


def launch(arguments: Sequence[str], nproc_per_node: int, port: int, max_restarts: int) -> int:
    """Run `python -m gmeta ARGUMENTS` as `nproc_per_node` ranks; return the job's exit code. Raises
    GMetaError: a rank was killed."""
    # Not os.cpu_count(): a container may have fewer.
    cores = len(os.sched_getaffinity(0))
    # Imported here: a single rank, and --help, need no agent.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _check_port(port)
    # The ranks share the cores: without this every rank starts as many threads as there are cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc_per_node)))
    # With the shared store, gloo's keys of a dead generation survive a restart, and the next hangs.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # The agent hands SIGTERM on, then waits so long for the ranks' checkpoint before it kills them.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    # The ranks report errors: torch would print a C++ stack where Ctrl-C meets one that joins.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in [*logging.root.manager.loggerDict]:
        # Each has a level of its own.
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        # For what ranks redirect and for their errors; by itself the agent would leave its folder.
        with TemporaryDirectory(prefix="gmeta-ranks-") as folder:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=nproc_per_node,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint=f"localhost:{port}",
                max_restarts=max_restarts,
                monitor_interval=0.2,
                logs_specs=DefaultLogsSpecs(folder),
            )
            with _pass_over_ended_ranks():
                elastic_launch(config, sys.executable)("-m", "gmeta", *arguments)
    except SignalException as stopped:
        return 128 + stopped.sigval  # the ranks have said what they kept
    except ChildFailedError as error:
        failures = error.failures
        # A killed rank is the cause even where a survivor that lost contact with it was seen first.
        # SIGTERM is none: once a rank has failed, the agent ends the others by it.
        killed = {
            rank: one
            for rank, one in failures.items()
            if one.exitcode < 0 and one.exitcode != -signal.SIGTERM
        }
        message = [one for one in failures.values() if one.exitcode > 0]
        if message and not killed:
            return int(min(message, key=lambda one: one.timestamp).exitcode)
        rank, failure = min((killed or failures).items(), key=lambda item: item[1].timestamp)
        raise GMetaError(
            f"rank {rank} was ended by signal {-failure.exitcode}: the other ranks were stopped. "
            "Run the same command with --resume: it goes on from the newest checkpoint"
        ) from error
    return 0


@contextmanager
def _pass_over_ended_ranks() -> Iterator[None]:
    # The agent signals the process group of each rank as it ends the job. If a group is gone
    # already, the job would report that failure in place of its first rank's.
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    close = SubprocessHandler.close

    def close_quietly(handler: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
        with suppress(ProcessLookupError):
            close(handler, death_sig)

    SubprocessHandler.close = close_quietly  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SubprocessHandler.close = close  # type: ignore[method-assign]


def _check_port(port: int) -> None:
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except OSError as error:
            raise UserError(
                f"--master-port {port} cannot be used: {error.strerror}. "
                "Choose another, or 0 for any"
            ) from error
