"""Starting ranks on this machine: what torchrun's agent is told, and how its ends are told on."""

import os
import signal
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
from torch.distributed.launcher import api

from gmeta.distributed.launch import launch, run_agent, under_torchrun
from gmeta.distributed.reachability import check_reachable
from gmeta.errors import GMetaError, UserError


class Agent:
    """In torchrun's place: notes what it was given, and ends as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end: BaseException | None = None) -> None:
        self.config: Any = None
        self.command: tuple[str, ...] = ()
        self.end = end
        self.left_behind = Path()
        # What launch sets in the environment goes when the test ends.
        monkeypatch.setattr(os, "environ", dict(os.environ))
        monkeypatch.setattr(api, "elastic_launch", self.launched)

    def launched(self, config: Any, program: str) -> Any:
        self.config = config

        def run(*arguments: str) -> None:
            self.left_behind = Path(config.logs_specs.root_log_dir)
            (self.left_behind / "error.json").touch()
            self.command = (program, *arguments)
            if self.end is not None:
                raise self.end

        return run


def failure(exit_code: int, second: int) -> ProcessFailure:
    """A rank's, without the file that torchrun reads the time of a failure from."""
    found: Any = SimpleNamespace(
        exitcode=exit_code, timestamp=second, local_rank=0, pid=1, message="", error_file=""
    )
    found.timestamp_isoformat = found.signal_name = lambda: ""
    return found  # type: ignore[no-any-return]


def test_ranks_run_this_command_line_and_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(monkeypatch)
    os.environ.pop("OMP_NUM_THREADS", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert launch(["train", "a.toml"], nproc_per_node=3, port=0, max_restarts=2) == 0
    assert agent.command == (sys.executable, "-m", "gmeta", "train", "a.toml")
    assert (agent.config.nproc_per_node, agent.config.max_restarts) == (3, 2)
    assert os.environ["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("end", [None, SignalException("stopped", sigval=signal.SIGTERM)])
def test_nothing_of_the_agent_stays_in_tmpdir(
    monkeypatch: pytest.MonkeyPatch, end: BaseException | None
) -> None:
    agent = Agent(monkeypatch, end)
    launch([], nproc_per_node=2, port=0, max_restarts=0)
    assert not agent.left_behind.exists()


def test_a_rank_that_has_ended_already_need_not_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SubprocessHandler(sys.executable, ("-c", ""), {}, None, None, 0, None)
    ended.proc.wait()

    def end_all(config: Any, program: str) -> Any:
        return lambda *_: ended.close(signal.SIGTERM)

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(api, "elastic_launch", end_all)
    assert launch([], nproc_per_node=2, port=0, max_restarts=0) == 0
    # torch alone does mind. Where it does not any more, launch need not.
    with pytest.raises(ProcessLookupError):
        ended.close(signal.SIGTERM)


def test_more_ranks_than_cores_have_a_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    Agent(monkeypatch)
    os.environ.pop("OMP_NUM_THREADS", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    launch([], nproc_per_node=4, port=0, max_restarts=0)
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_threads_that_the_user_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    Agent(monkeypatch)
    os.environ["OMP_NUM_THREADS"] = "5"
    launch([], nproc_per_node=2, port=0, max_restarts=0)
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_nodes_that_do_not_meet_are_told_of_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_in_vain() -> None:
        raise RendezvousTimeoutError

    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(
        GMetaError, match=r"did not meet \(RendezvousTimeoutError\): see whether all"
    ):
        run_agent(wait_in_vain)


@pytest.mark.parametrize(
    ("variables", "refusal"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth9"}, "= 'eth9': this host has no interface 'eth9', but "),
        ({"LOCAL_WORLD_SIZE": "1"}, "name, 'a', stands for the loopback's address, by which no"),
        ({"LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}, ""),  # whatever that is for
        ({"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a"}, ""),  # all are here
        ({"LOCAL_WORLD_SIZE": "2"}, ""),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, "torchrun, which started this rank, no longer"),
    ],
)
def test_a_rank_that_would_wait_in_vain_says_so(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], refusal: str
) -> None:
    addresses = {"a": "127.0.1.1", "b": "192.0.2.7"}
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *_, **__: [(0, 0, 0, "", (addresses[host], 0))]
    )
    monkeypatch.setattr(socket, "create_connection", refuse_connection)
    monkeypatch.setattr(
        os, "environ", {"WORLD_SIZE": "2", "MASTER_ADDR": "b", "MASTER_PORT": "1"} | variables
    )
    with pytest.raises(GMetaError, match=refusal) if refusal else nullcontext():
        check_reachable()


def refuse_connection(*_: object) -> None:
    raise ConnectionRefusedError


def test_a_stopped_job_ends_as_its_signal_says(monkeypatch: pytest.MonkeyPatch) -> None:
    Agent(monkeypatch, SignalException("stopped", sigval=signal.SIGTERM))
    assert launch([], nproc_per_node=2, port=0, max_restarts=0) == 128 + signal.SIGTERM


def test_a_rank_that_told_its_error_decides_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    Agent(monkeypatch, ChildFailedError("gmeta", {1: failure(2, 9), 0: failure(1, 12)}))
    assert launch([], nproc_per_node=2, port=0, max_restarts=0) == 2


def test_a_killed_rank_is_named_before_a_survivor(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = {0: failure(1, 5), 2: failure(-9, 7), 3: failure(-15, 8)}
    Agent(monkeypatch, ChildFailedError("gmeta", failures))
    with pytest.raises(GMetaError, match=r"rank 2 was ended by signal 9.*--resume"):
        launch([], nproc_per_node=4, port=0, max_restarts=0)


def test_ranks_the_agent_ended_do_not_hide_anothers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that no rank can run with: the first to say so takes the others with it."""
    failures = {0: failure(-15, 5), 1: failure(-15, 6), 2: failure(2, 7)}
    Agent(monkeypatch, ChildFailedError("gmeta", failures))
    assert launch([], nproc_per_node=3, port=0, max_restarts=0) == 2


def test_a_rank_that_alone_was_ended_by_sigterm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Agent(monkeypatch, ChildFailedError("gmeta", {1: failure(-15, 5)}))
    with pytest.raises(GMetaError, match=r"rank 1 was ended by signal 15"):
        launch([], nproc_per_node=2, port=0, max_restarts=0)


def test_a_port_in_use_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(monkeypatch)
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--master-port {port} cannot be used"):
            launch([], nproc_per_node=2, port=port, max_restarts=0)
    assert agent.config is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False), ({"RANK": "0"}, False), ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"TORCHELASTIC_RUN_ID": "a"}, True),
    ],
)  # fmt: skip
def test_a_rank_knows_that_torchrun_started_it(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    assert under_torchrun() is expected
