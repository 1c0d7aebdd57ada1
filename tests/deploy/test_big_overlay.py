"""The overlay of 32 GPUs trains tables that need them, and its data is prepared as it says."""

import json
import shlex
from pathlib import Path

import pytest

from tests.deploy.policy import amount
from tests.deploy.rendering import ROOT, Manifest, pod_specs, render
from tests.deploy.test_deploy_check import needs_kubectl, one, train
from tests.support.commands import gmeta, succeed

GPU_MEMORY = 80 * 10**9
FREE = 0.15  # kept for activations


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(ROOT / "deploy/k8s/overlays/gpu-multi-node")


@needs_kubectl
def test_its_tables_fit_on_its_gpus_and_on_no_quarter_of_them(
    manifests: list[Manifest], tmp_path: Path
) -> None:
    files = one(manifests, "ConfigMap", "gmeta-train")["data"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    prepare = pod_specs(one(manifests, "Job", "gmeta-prepare"))[0][1]["containers"][0]
    # The commands of the pod, with less data.
    script = prepare["command"][-1].replace("--tasks 1000000 --items 5000000", "--tasks 60")
    script = script.replace("/data/", f"{tmp_path}/").replace("/etc/gmeta", str(tmp_path))
    first, second = (
        shlex.split(part)[shlex.split(part).index("gmeta") + 1 :]
        for part in script.split("||")[1].split("&&")
    )
    for command in (first, second):
        succeed(*command)
    env = {each["name"]: each.get("value") for each in train(manifests)["containers"][0]["env"]}
    assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"]  # ids travel by gloo
    gpus = int(env["NNODES"]) * int(env["NPROC_PER_NODE"])
    assert gpus == 32

    def plan(count: int) -> tuple[int, dict[str, dict[str, int]], str]:
        done = gmeta(
            "plan", tmp_path / "train.toml", f"data.path={tmp_path}/demo", "--gpus", str(count),
            "--json",
        )  # fmt: skip
        return done.returncode, json.loads(done.stdout or "{}").get("tables", {}), done.stderr

    code, tables, said = plan(gpus)
    assert code == 0, said
    assert sum(table["rows"] for table in tables.values()) > 3 * 10**9
    held = sum(table["bytes"] for table in tables.values())
    room = GPU_MEMORY * (1 - FREE)
    assert gpus / 4 * room < held < gpus * room
    assert "the tables do not fit on 8 GPUs" in plan(gpus // 4)[2]  # one node is too few
    # Three checkpoints are kept, and one is being written.
    claim = one(manifests, "PersistentVolumeClaim", "gmeta-runs")
    assert amount(claim["spec"]["resources"]["requests"]["storage"]) > 4 * held
    # The copy of a node's share that is written in the background.
    memory = amount(train(manifests)["containers"][0]["resources"]["requests"]["memory"])
    assert memory > held / int(env["NNODES"])
