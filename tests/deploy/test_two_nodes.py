"""The container entry points as processes on several hosts: a service with TLS, tokens and client
certificates, two training nodes, a cable that is pulled, and a node that comes later and goes.
Nodes are forked with everything imported, but for the one that goes: Linux tells its ranks, which
are children of its agent only there."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gmeta.antdt.manifests.audit import audit_manifest
from gmeta.antdt.manifests.shard_manifest import load_manifest
from gmeta.runs.checkpoints.progress_file import read_about
from gmeta.runs.run_folder import list_checkpoints
from tests.antdt.pki import Authority
from tests.deploy.network import INTERFACE, Host, NoNamespacesError, hosts
from tests.deploy.rendering import ROOT
from tests.support.commands import SMALL_MODEL, environment, metrics, write_config
from tests.support.forked import ForkedProcess, Task, forked
from tests.support.waiting import PATIENCE_S, wait_until

TOKEN = "worker-0123456789abcdef"
STEPS_UNDER_WAY = 20  # or not yet in the file; without the cable the others would be hundreds
# In the place of Python: notes what the entry point would start, and where.
NOTES = """#!/bin/sh
printf '%s\\0' "$@" > {folder}/arguments
env -0 > {folder}/variables
"""


@pytest.fixture
def network() -> Iterator[list[Host]]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(hosts(3))
        except NoNamespacesError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made


class Cluster:
    """A hub with the service, and nodes that can be started again, as a Job would."""

    def __init__(self, network: list[Host], folder: Path, config: Path) -> None:
        self.hub, *self.nodes = network
        self.config = config
        pki = Authority(folder / "pki")
        self.service_pair = pki.issue("service", address=self.hub.address)
        self.worker_pair = pki.issue("worker", "worker")
        self.ca, self.folder = pki.ca, folder
        (folder / "tokens").mkdir()
        (folder / "tokens" / "worker").write_text(TOKEN)

    def start_service(self) -> "subprocess.Popen[str]":
        cert, key = self.service_pair
        # A signal that ends it for hanging also prints where its threads are.
        arguments = ["-X", "faulthandler", "-m", "gmeta"]
        arguments += ["shard-service", "--listen", f"{self.hub.address}:7070"]
        arguments += ["--metrics-listen", f"{self.hub.address}:9100", "--lease-ttl", "5"]
        arguments += ["--store", f"sqlite:///{self.folder}/shards.db", "--tls-cert", str(cert)]
        arguments += ["--tls-key", str(key), "--tls-client-ca", str(self.ca)]
        arguments += ["--tokens", str(self.folder / "tokens")]
        return self._start(self.hub, "service", [sys.executable, *arguments], {})

    def start_node(self, rank: int, *arguments: str, nodes: str = "2") -> "subprocess.Popen[str]":
        """The entry point, as a container starts it."""
        variables = self._variables(rank, nodes, sys.executable)
        return self._start(self.nodes[rank], f"node{rank}", self._command(arguments), variables)

    @contextmanager
    def forked_node(self, rank: int, *arguments: str, nodes: str = "2") -> Iterator[ForkedProcess]:
        """What the entry point becomes, forked; it and its ranks are killed in the end."""
        folder = self.folder / f"node{rank}"
        folder.mkdir(exist_ok=True)
        python = folder / "python"
        python.write_text(NOTES.format(folder=folder))
        python.chmod(0o755)
        env = {**environment(), **self._variables(rank, nodes, str(python))}
        subprocess.run(self._command(arguments), env=env, check=True)
        flag, program, *rest = (folder / "arguments").read_text().split("\0")[:-1]
        assert flag == "-m"
        told = (folder / "variables").read_text().split("\0")[:-1]
        variables = dict(variable.split("=", 1) for variable in told)
        enter = self.nodes[rank].enter
        with forked(Task(program, tuple(rest), variables, folder, first=enter)) as node:
            yield node

    def _command(self, arguments: Sequence[str]) -> list[str]:
        script = str(ROOT / "deploy/docker/train-node")
        return [script, "train", str(self.config), *SMALL_MODEL, *arguments, "--resume"]

    def _variables(self, rank: int, nodes: str, python: str) -> dict[str, str]:
        cert, key = self.worker_pair
        return {
            "PYTHON": python, "NNODES": nodes, "NODE_RANK": str(rank),
            "RDZV_ENDPOINT": f"{self.nodes[0].address}:29400",
            "LOCAL_ADDR": self.nodes[rank].address, "GLOO_SOCKET_IFNAME": INTERFACE,
            "GMETA_SHARD_SERVICE": f"{self.hub.address}:7070", "GMETA_SHARD_TLS_CA": str(self.ca),
            "GMETA_SHARD_TLS_CERT": str(cert), "GMETA_SHARD_TLS_KEY": str(key),
            "GMETA_SHARD_TOKEN_FILE": str(self.folder / "tokens" / "worker"),
        }  # fmt: skip

    def _start(
        self, host: Host, name: str, command: list[str], variables: dict[str, str]
    ) -> "subprocess.Popen[str]":
        with (self.folder / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                host.command(*command), env={**environment(), **variables},
                stdout=log, stderr=log, text=True,
            )  # fmt: skip

    def said(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.folder.glob("node*/std*")]
        return "\n".join(f"--- {log}\n{log.read_text()}" for log in logs)


def ended(process: "subprocess.Popen[str] | ForkedProcess") -> int:
    """Ask it to end, and return its exit status; one that hangs is aborted."""
    os.kill(process.pid, signal.SIGTERM)
    try:
        return process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGABRT)
        return process.wait()


@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_a_node_that_is_cut_off_and_comes_back_costs_no_episode(
    network: list[Host], tmp_path: Path, click_logs: Path
) -> None:
    run = tmp_path / "run"
    cluster = Cluster(network, tmp_path, write_config(tmp_path / "t.toml", click_logs, run))
    arguments = ["data.source=service", "data.tasks_per_step=2", "run.max_steps=0"]
    arguments += ["run.epochs=2", "run.checkpoint_every_steps=25", "run.collective_timeout_s=12"]
    with ExitStack() as stack:
        service = stack.enter_context(cluster.start_service())
        stack.callback(service.terminate)
        nodes = [stack.enter_context(cluster.forked_node(rank, *arguments)) for rank in (0, 1)]
        try:
            wait_until(lambda: bool(list_checkpoints(run / "checkpoints")), "a checkpoint")
            said_before = cluster.said().count("lost contact")
            cluster.nodes[1].pull_cable()
            cut_at = len(metrics(run))
            assert all(node.poll() is None for node in nodes)
            # The rank that lost its peer ends, and its node waits for the other one.
            wait_until(
                lambda: cluster.said().count("lost contact") > said_before,
                "the timeout of a collective",
                pause_s=0.1,
            )
            assert len(metrics(run)) <= cut_at + STEPS_UNDER_WAY
            cluster.nodes[1].plug_cable()

            def both_ended() -> bool:
                for rank in (0, 1):
                    if nodes[rank].poll() not in (None, 0):  # as a Job replaces a failed pod
                        nodes[rank] = stack.enter_context(cluster.forked_node(rank, *arguments))
                return [node.poll() for node in nodes] == [0, 0]

            wait_until(both_ended, "the end of both nodes", 0.2, patience_s=4 * PATIENCE_S)
            assert ended(service) == 0
        except BaseException:
            print(cluster.said())
            raise
    steps = [line["step"] for line in metrics(run) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    report = audit_manifest(load_manifest(list_checkpoints(run / "checkpoints")[-1]))
    assert report.ok
    assert "  epoch finished" in report.lines
    assert TOKEN not in cluster.said()


@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_an_elastic_job_takes_a_node_that_comes_later_and_goes_on_without_it(
    network: list[Host], tmp_path: Path, click_logs: Path
) -> None:
    run = tmp_path / "run"
    cluster = Cluster(network, tmp_path, write_config(tmp_path / "t.toml", click_logs, run))
    arguments = ["data.source=service", "data.tasks_per_step=2", "run.max_steps=0"]
    arguments += ["run.epochs=1000", "run.checkpoint_every_steps=10", "run.collective_timeout_s=12"]

    def trains_on(ranks: int) -> bool:
        """Whether a checkpoint was written by a job of this size."""
        found = list_checkpoints(run / "checkpoints")
        return bool(found) and read_about(found[-1])["world_size"] == ranks

    with ExitStack() as stack:
        service = stack.enter_context(cluster.start_service())
        stack.callback(service.terminate)
        try:
            first = stack.enter_context(cluster.forked_node(0, *arguments, nodes="1:2"))
            wait_until(lambda: trains_on(1), "a checkpoint of one node", 0.1)
            second = stack.enter_context(cluster.start_node(1, *arguments, nodes="1:2"))
            stack.callback(second.kill)
            wait_until(lambda: trains_on(2), "a checkpoint of two nodes", 0.1)
            second.kill()
            wait_until(lambda: trains_on(1), "a checkpoint of the node that is left", 0.1)
            assert ended(first) == 128 + signal.SIGTERM
        except BaseException:
            print(cluster.said())
            raise
    steps = [line["step"] for line in metrics(run) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert audit_manifest(load_manifest(list_checkpoints(run / "checkpoints")[-1])).ok
