"""Starting ranks: torchrun's agent with one process a rank on this machine."""

import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory

from gmeta.distributed.forked_ranks import AGENT_PID_VARIABLE, fork_ranks
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


def launch(
    arguments: Sequence[str],
    nproc_per_node: int,
    port: int,
    max_restarts: int,
    preload: Sequence[str] = (),
) -> int:
    """Run `gmeta ARGUMENTS` as `nproc_per_node` ranks, forked with the modules `preload` imported;
    return the job's exit code. Raises GMetaError: a rank was killed."""
    # Not os.cpu_count(): a container may have fewer.
    cores = len(os.sched_getaffinity(0))
    # Imported here: a single rank, and --help, need no agent.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
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

    def start_agent() -> None:
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
            elastic_launch(config, sys.executable)("-m", "gmeta", *arguments)

    return run_agent(start_agent, preload)


def run_agent(start_agent: Callable[[], object], preload: Sequence[str] = ()) -> int:
    """Run torchrun's agent, whose ranks are forked with `preload` imported; return the job's exit
    code. Raises GMetaError: a rank was killed, or the job's nodes did not meet."""
    from torch.distributed import DistError  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    os.environ[AGENT_PID_VARIABLE] = str(os.getpid())
    try:
        with fork_ranks(preload):
            start_agent()
    except SignalException as stopped:
        return 128 + stopped.sigval  # the ranks have said what they kept
    except (RendezvousError, DistError) as error:
        raise GMetaError(
            f"the nodes of this job did not meet ({type(error).__name__}): see whether all of them "
            "run, and whether each reaches the endpoint of the rendezvous"
        ) from error
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
