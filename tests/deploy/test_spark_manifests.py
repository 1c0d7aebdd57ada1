"""prepare on Spark: the pods that Spark makes, and what an account may ask the API server."""

import copy
import shutil
from pathlib import Path

import pytest

from tests.deploy.check import manifest_problems
from tests.deploy.rbac import can_i
from tests.deploy.rendering import ROOT, Manifest, embedded_pods, pod_specs, render
from tests.deploy.test_deploy_check import needs_kubectl, one


@pytest.fixture(scope="module")
def spark() -> list[Manifest]:
    return render(ROOT / "deploy/k8s/overlays/gpu-multi-node-spark")


@needs_kubectl
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (("runAsNonRoot: true", "runAsNonRoot: false"), "runAsNonRoot is not set"),
        (("containerPort: 7079", "containerPort: 4040"), "port 4040 is not in docs/deploy.md"),
        (("claimName: gmeta-raw", "claimName: raw"), "there is no PersistentVolumeClaim raw"),
        (("volumeMounts", "volumeMount"), "'volumeMount' was unexpected"),
        (("24Gi, ephemeral-storage: 128Gi", "24Gi"), "ephemeral-storage has request 16Gi"),
    ],
)
def test_a_mistake_in_the_pods_that_spark_makes_is_noticed(
    spark: list[Manifest], wrong: tuple[str, str], expected: str
) -> None:
    manifests = copy.deepcopy(spark)
    data = one(manifests, "ConfigMap", "gmeta-spark")["data"]
    assert wrong[0] in data["executor.yaml"]
    data["executor.yaml"] = data["executor.yaml"].replace(*wrong)
    assert any(expected in problem for problem in manifest_problems(manifests))


@needs_kubectl
def test_executors_run_the_image_and_the_amounts_that_the_overlay_names(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    overlay = tmp_path / "deploy/k8s/overlays/gpu-multi-node-spark/kustomization.yaml"
    images = "images:\n  - {name: gmeta-prepare-spark, newName: registry/gmeta-prepare-spark}\n"
    overlay.write_text(overlay.read_text() + images)
    manifests = render(overlay.parent)
    (container,) = pod_specs(one(manifests, "Job", "gmeta-prepare-spark"))[0][1]["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert container["image"] == "registry/gmeta-prepare-spark:0.1.0"
    assert env["EXECUTOR_IMAGE"] == container["image"]
    (pod,) = embedded_pods(manifests)
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    lines = one(manifests, "ConfigMap", "gmeta-spark")["data"]["spark-defaults.conf"].splitlines()
    conf = dict(line.split() for line in lines if not line.startswith("#"))
    memory = [
        int(conf[f"spark.executor.{k}"].removesuffix("g")) for k in ("memory", "memoryOverhead")
    ]
    assert f"{sum(memory)}Gi" == limits["memory"]
    assert conf["spark.executor.cores"] == conf["spark.kubernetes.executor.limit.cores"]
    assert conf["spark.executor.cores"] == limits["cpu"]


@needs_kubectl
def test_only_the_pods_that_need_the_api_server_may_ask_it_anything(spark: list[Manifest]) -> None:
    for account in ("default", "gmeta-trainer", "gmeta-shard-service"):
        for verb in ("get", "list", "create", "delete"):
            assert not any(can_i(spark, account, verb, what) for what in ("pods", "secrets"))
    assert can_i(spark, "gmeta-credentials", "get", "secrets", "gmeta-worker")
    assert not can_i(spark, "gmeta-credentials", "get", "secrets", "somebodys")
    assert not can_i(spark, "gmeta-credentials", "list", "secrets")
    assert can_i(spark, "gmeta-prepare", "create", "pods")
    assert not can_i(spark, "gmeta-prepare", "get", "secrets", "gmeta-worker")
    assert not can_i(spark, "gmeta-prepare", "create", "pods/exec")
