"""One overlay gives a finished training run, whatever is drained on the way."""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gmeta.antdt.manifests.audit import audit_manifest
from gmeta.antdt.manifests.shard_manifest import load_manifest
from gmeta.runs.run_folder import list_checkpoints
from tests.deploy.cluster.cluster import Cluster, WorkloadFailedError, running
from tests.deploy.cluster.pods import Pod
from tests.deploy.network import NoNamespacesError
from tests.deploy.rendering import ROOT, render
from tests.deploy.test_deploy_check import needs_kubectl, one
from tests.support.commands import metrics
from tests.support.waiting import PATIENCE_S, wait_until

# The overlay with less data, as a user would change it: by a kustomization of their own.
SMALLER = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: gmeta
resources: [{overlay}]
configMapGenerator:
  - {{name: gmeta-train, behavior: merge, files: [train.toml]}}
generatorOptions: {{disableNameSuffixHash: true}}
patches:
  - target: {{kind: Job, name: gmeta-prepare}}
    patch: |-
      - op: replace
        path: /spec/template/spec/containers/0/command
        value: [dumb-init, --, gmeta, prepare, --recipe, synthetic, --tasks, "1500", /data/demo]
"""
LESS = {
    "tasks_per_step = 128": "tasks_per_step = 16",
    "hidden = [128, 64]": "hidden = [16]",
    "checkpoint_every_steps = 50": "checkpoint_every_steps = 20",
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "overlay"
    folder.mkdir()
    config = (ROOT / "deploy/k8s/base/train.toml").read_text()
    for before, after in LESS.items():
        assert before in config
        config = config.replace(before, after)
    (folder / "train.toml").write_text(config)
    overlay = os.path.relpath(ROOT / "deploy/k8s/overlays/local-cpu", folder.resolve())
    (folder / "kustomization.yaml").write_text(SMALLER.format(overlay=overlay))
    with ExitStack() as stack:
        try:
            yield stack.enter_context(running(render(folder), tmp_path))
        except NoNamespacesError as error:
            pytest.skip(f"no network namespaces here: {error}")


def in_network(pod: Pod, *command: str) -> str:
    done = subprocess.run(pod.host.command(*command), capture_output=True, text=True, check=True)
    return done.stdout


def open_ports(pod: Pod) -> set[int]:
    """Ports that a pod listens on, its own loopback apart."""
    tables = in_network(pod, "cat", "/proc/net/tcp", "/proc/net/tcp6")
    lines = [line.split() for line in tables.splitlines() if "local_address" not in line]
    addresses = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {int(port, 16) for address, port in addresses if not address.endswith("7F")}


def commands(pod: Pod) -> dict[int, bytes]:
    """Command lines of a pod's processes by their number, words apart by NUL."""
    found = {}
    for pid in map(int, in_network(pod, "ip", "netns", "pids", pod.host.namespace).split()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
    return found


def users(pod: Pod) -> set[tuple[str, ...]]:
    """(users, effective capabilities, no new privileges) of a pod's processes."""
    runtime = pod.host.command("unshare")[-1].encode()
    found = set()
    for pid, command in commands(pod).items():
        if command.startswith(runtime):
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            found.add((status["Uid"], status["CapEff"], status["NoNewPrivs"]))
    return found


@needs_kubectl
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_an_overlay_becomes_a_finished_run_though_its_pods_are_drained(cluster: Cluster) -> None:
    run = cluster.volume("gmeta-runs") / "demo"
    train = cluster.workloads["gmeta-train"]
    checkpoints = run / "checkpoints"

    def steps() -> int:
        return len(metrics(run)) if (run / "metrics.jsonl").exists() else 0

    def advance() -> None:
        reached = steps()
        cluster.run_until(lambda: steps() > reached or train.complete, "progress", PATIENCE_S)

    prepare = cluster.pod("gmeta-prepare-0")

    def prepares() -> bool:
        # Not only its dumb-init, which forgets a signal that comes before its child is up.
        return prepare.runs and any(b"-m\0gmeta\0prepare" in c for c in commands(prepare).values())

    cluster.run_until(prepares, "prepare", PATIENCE_S)
    assert train.suspended
    assert train.pods == []  # they would hold what the data does not need yet
    prepare.delete()
    cluster.run_until(lambda: bool(list_checkpoints(checkpoints)), "a checkpoint", PATIENCE_S)
    assert prepare.returncode == 128 + signal.SIGTERM  # of dumb-init
    # Nobody but the one that made the Secrets and the one that starts training has asked the API
    # server for anything.
    assert cluster.api.refused == []
    assert set(cluster.api.accounts.values()) == {"gmeta-credentials", "gmeta-train-start"}
    starter = {each for each in cluster.api.asked if each[0] == "gmeta-train-start"}
    assert starter == {("gmeta-train-start", "patch", "jobs")}
    service = cluster.pod("gmeta-shard-service-0")
    assert open_ports(service) == {7070, 9100}
    assert 29400 in open_ports(cluster.pod("gmeta-train-0"))
    for name in ("gmeta-shard-service-0", "gmeta-train-0", "gmeta-train-1"):
        ids = "\t".join(["10001"] * 4)
        assert users(cluster.pod(name)) == {(ids, "0" * 16, "1")}
    for name in ("gmeta-shard-service-0", "gmeta-train-0"):
        drained = cluster.pod(name)
        drained.delete()
        cluster.run_until(
            lambda pod=drained: pod.returncode is not None, f"{name}'s end", PATIENCE_S
        )
        # torchrun says 1 whatever its ranks said; -9 would be the end of the grace period.
        assert drained.returncode == (0 if "service" in name else 128 + signal.SIGTERM), (
            drained.log()[-2000:]
        )
        advance()
    while not train.complete:
        advance()
    # Rank 0 says it, on whichever node the rendezvous put it.
    log = "".join(cluster.pod(f"gmeta-train-{node}").log() for node in (0, 1))
    stopped = re.search(r"stopped by SIGTERM behind step (\d+), and nothing of it is lost", log)
    assert stopped
    assert f"goes on from /runs/demo/checkpoints/step-{int(stopped[1]):08d}" in log
    assert json.loads((cluster.volume("gmeta-data") / "demo/manifest.json").read_text())["splits"]
    report = audit_manifest(load_manifest(list_checkpoints(checkpoints)[-1]))
    assert report.ok
    assert "  epoch finished" in report.lines


@needs_kubectl
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_training_whose_data_cannot_be_prepared_has_no_pods(tmp_path: Path) -> None:
    manifests = render(ROOT / "deploy/k8s/overlays/local-cpu")
    spec = one(manifests, "Job", "gmeta-prepare")["spec"]
    spec["backoffLimit"] = 0
    spec["template"]["spec"]["containers"][0]["command"] = ["dumb-init", "--", "false"]
    try:
        with running(manifests, tmp_path) as cluster:
            start = cluster.pod("gmeta-train-start-0")
            with pytest.raises(WorkloadFailedError, match="gmeta-prepare-0"):
                cluster.run_until(lambda: False, "a failure", PATIENCE_S)
            wait_until(lambda: start.log().endswith("\n"), "the start's wait")
            assert cluster.workloads["gmeta-train"].pods == []
            assert cluster.workloads["gmeta-train"].suspended
            assert start.log() == "waiting for /data/demo/manifest.json\n"
    except NoNamespacesError as error:
        pytest.skip(f"no network namespaces here: {error}")
