"""Manifests, images and alerts are what a cluster takes, and a mistake in them is noticed."""

import copy
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.deploy.check import manifest_problems, overlay_problems
from tests.deploy.images import COMPOSE_FILE, DOCKERFILES, compose_problems, dockerfile_problems
from tests.deploy.monitoring import (
    ALERTS,
    DASHBOARDS,
    OPERATOR_ALERTS,
    dashboard_problems,
    monitoring_problems,
)
from tests.deploy.rendering import OVERLAYS, ROOT, Manifest, find_kubectl, pod_specs, render
from tests.deploy.schema_check import schema_problems

needs_kubectl = pytest.mark.skipif(find_kubectl() is None, reason="no kubectl: make deploy-tools")


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_an_overlay_is_what_a_cluster_takes(overlay: Path) -> None:
    assert overlay_problems(overlay) == []


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_keeps_the_rules(path: Path) -> None:
    assert dockerfile_problems(path) == []


def test_the_compose_file_keeps_the_rules() -> None:
    assert compose_problems(COMPOSE_FILE) == []


def test_alerts_are_explained_and_the_same_in_both_forms() -> None:
    assert monitoring_problems() == []


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (("[10m]))", "[10m])"), "GmetaNoProgress: (sum by (instance)"),
        (("#gmetajobrestarts", "#gmetarestarts"), "GmetaJobRestarts: its runbook docs/"),
        (("GmetaLeasesExpire\n", "GmetaLeasesGo\n"), "GmetaLeasesGo has no section in docs/"),
    ],
)
def test_an_alerts_mistake_is_found(tmp_path: Path, wrong: tuple[str, str], expected: str) -> None:
    # In both forms, as a person would make it.
    shutil.copy(ALERTS.with_name("alerts_test.yml"), tmp_path)
    alerts, operator = tmp_path / ALERTS.name, tmp_path / OPERATOR_ALERTS.name
    alerts.write_text(ALERTS.read_text().replace(*wrong, 1))
    operator.write_text(OPERATOR_ALERTS.read_text().replace(*wrong, 1))
    assert monitoring_problems(alerts, operator)[0].startswith(expected)
    alerts.write_text(ALERTS.read_text())
    assert any("differ" in problem for problem in monitoring_problems(alerts, operator))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_every_expression_of_a_dashboard_is_promql(path: Path, tmp_path: Path) -> None:
    assert dashboard_problems(path) == []
    broken = tmp_path / path.name
    broken.write_text(path.read_text().replace("sum by (", "sum by ((", 1))
    assert dashboard_problems(broken)


def test_the_dashboards_in_the_cluster_are_the_files(rendered: list[Manifest]) -> None:
    held = one(rendered, "ConfigMap", "gmeta-dashboard")["data"]
    assert held == {path.name: path.read_text() for path in DASHBOARDS}


@pytest.fixture(scope="module")
def rendered() -> list[Manifest]:
    if find_kubectl() is None:
        pytest.skip("no kubectl: make deploy-tools")
    return render(ROOT / "deploy/k8s/overlays/gpu-multi-node")


def train(manifests: list[Manifest]) -> Any:
    """The pod of the training job."""
    (job,) = [m for m in manifests if m["kind"] == "Job" and m["metadata"]["name"] == "gmeta-train"]
    return pod_specs(job)[0][1]


def one(manifests: list[Manifest], kind: str, name: str) -> Any:
    (found,) = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


Mistake = Callable[[list[Manifest]], Any]
MISTAKES: dict[str, tuple[Mistake, str]] = {
    "a typo in a field": (
        lambda m: one(m, "StatefulSet", "gmeta-shard-service")["spec"].update(replcias=1),
        "'replcias' was unexpected",
    ),
    "a typo in a ServiceMonitor": (
        lambda m: one(m, "ServiceMonitor", "gmeta-shard-service")["spec"]["endpoints"][0].update(
            intervall="15s"
        ),
        "'intervall' was unexpected",
    ),
    "a kind that is none": (
        lambda m: one(m, "Job", "gmeta-train").update(apiVersion="batch/v3"),
        "has no batch/v3 Job",
    ),
    "a missing limit": (
        lambda m: train(m)["containers"][0]["resources"]["limits"].pop("memory"),
        "memory has request 384Gi and limit None: both are needed",
    ),
    "a request above its limit": (
        lambda m: train(m)["containers"][0]["resources"]["requests"].update(cpu="65"),
        "cpu: the request 65 is above the limit 64",
    ),
    "the tag latest": (
        lambda m: train(m)["containers"][0].update(image="gmeta-trainer-cuda:latest"),
        "is a moving target",
    ),
    "no tag": (
        lambda m: train(m)["initContainers"][0].update(image="registry:5000/gmeta"),
        "image 'registry:5000/gmeta' has no tag",
    ),
    "root": (
        lambda m: train(m)["securityContext"].update(runAsNonRoot=False),
        "runAsNonRoot is not set",
    ),
    "a root that can be written": (
        lambda m: train(m)["containers"][0]["securityContext"].pop("readOnlyRootFilesystem"),
        "its root file system can be written",
    ),
    "a token of the API server": (
        lambda m: train(m).update(automountServiceAccountToken=True),
        "account gmeta-trainer gets a token",
    ),
    "a secret in a variable": (
        lambda m: train(m)["containers"][0]["env"].append({"name": "API_TOKEN", "value": "abc"}),
        "API_TOKEN holds a secret; name a file under /run",
    ),
    "a volume that is not there": (
        lambda m: train(m)["containers"][0]["volumeMounts"].append(
            {"name": "cache", "mountPath": "/cache"}
        ),
        "mounts cache, which is no volume of the pod",
    ),
    "a Secret that nobody makes": (
        lambda m: train(m)["volumes"].append({"name": "x", "secret": {"secretName": "gmeta-root"}}),
        "there is no Secret gmeta-root",
    ),
    "a selector that chooses nothing": (
        lambda m: one(m, "Service", "gmeta-train")["spec"]["selector"].update(
            {"app.kubernetes.io/component": "trainers"}
        ),
        "chooses no pod",
    ),
    "a port that no pod has": (
        lambda m: one(m, "Service", "gmeta-shard-service")["spec"]["ports"][0].update(
            targetPort="grcp"
        ),
        "the pods have no port grcp",
    ),
    "a port that is not documented": (
        lambda m: train(m)["containers"][0]["ports"].append({"containerPort": 6006}),
        "port 6006 is not in docs/deploy.md",
    ),
    "the image of somebody else without a digest": (
        lambda m: train(m)["initContainers"][0].update(image="busybox:1.37"),
        "image 'busybox:1.37' has no digest",
    ),
    "a shell as process 1": (
        lambda m: train(m)["containers"][0].update(command=["sh", "-c", "train-node"]),
        "its process 1 ignores SIGTERM: begin the command with dumb-init",
    ),
    "a path of the host": (
        lambda m: train(m)["volumes"].append({"name": "h", "hostPath": {"path": "/"}}),
        "it mounts what Pod Security `restricted` refuses",
    ),
    "a port of the host": (
        lambda m: train(m)["containers"][0]["ports"][0].update(hostPort=29400),
        "takes a port of its host",
    ),
    "a right to everything": (
        lambda m: one(m, "Role", "gmeta-credentials")["rules"][0].update(resources=["*"]),
        "a wildcard grants what a later version adds",
    ),
    "a right to every Secret": (
        lambda m: one(m, "Role", "gmeta-credentials")["rules"][0].pop("resourceNames"),
        "reads every Secret of the namespace",
    ),
    "a right beyond the namespace": (
        lambda m: one(m, "Role", "gmeta-credentials").update(kind="ClusterRole"),
        "rights beyond the namespace",
    ),
    "a volume whose files change their owner at each start": (
        lambda m: train(m)["securityContext"].pop("fsGroupChangePolicy"),
        "each start changes the owner of every file of a volume: set fsGroupChangePolicy",
    ),
    "a probe of a second over a shared volume": (
        lambda m: train(m)["containers"][0]["startupProbe"].pop("timeoutSeconds"),
        "its startupProbe has a second, which a slow volume takes longer than: set timeoutSeconds",
    ),
    "a job without an end": (
        lambda m: one(m, "Job", "gmeta-prepare")["spec"].pop("activeDeadlineSeconds"),
        "Job/gmeta-prepare: it has no activeDeadlineSeconds",
    ),
    "a drain that waits for pods that are not ready": (
        lambda m: one(m, "PodDisruptionBudget", "gmeta-train")["spec"].pop(
            "unhealthyPodEvictionPolicy"
        ),
        "PodDisruptionBudget/gmeta-train: pods that are not ready hold up drains",
    ),
    "an operator's pod that reaches nothing": (
        lambda m: one(m, "NetworkPolicy", "gmeta-shard-service-callers")["spec"]["podSelector"][
            "matchExpressions"
        ][0]["values"].remove("operator"),
        "component': 'operator', 'app.kubernetes.io/part-of': 'gmeta'}, which no policy lets out",
    ),
    "pods that no policy closes": (
        lambda m: one(m, "NetworkPolicy", "gmeta-default-deny")["spec"].update(
            policyTypes=["Ingress"]
        ),
        "Job/gmeta-prepare: no NetworkPolicy closes its pods",
    ),
}


@needs_kubectl
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_manifest_is_noticed(mistake: str, rendered: list[Manifest]) -> None:
    make, expected = MISTAKES[mistake]
    manifests = copy.deepcopy(rendered)
    make(manifests)
    assert any(expected in problem for problem in manifest_problems(manifests))


@needs_kubectl
def test_a_typo_in_a_file_fails_the_whole_check(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    for name, wrong, expected in (
        ("base/train.yaml", ("completionMode", "completionMod"), "'completionMod' was unexpected"),
        ("base/kustomization.yaml", ("volumes.yaml", "volume.yaml"), "volume.yaml"),
    ):
        file = tmp_path / "deploy/k8s" / name
        before = file.read_text()
        file.write_text(before.replace(*wrong))
        (problem, *_) = overlay_problems(tmp_path / "deploy/k8s/overlays/local-cpu")
        assert expected in problem
        file.write_text(before)


@needs_kubectl
def test_a_trainjob_with_an_unknown_field_is_refused() -> None:
    manifests = render(ROOT / "deploy/k8s/overlays/gpu-multi-node-kubeflow")
    one(manifests, "TrainJob", "gmeta-train")["spec"]["trainer"]["numNode"] = 2
    runtime = one(manifests, "TrainingRuntime", "gmeta")
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    node["template"]["spec"]["backoffLimits"] = 3
    problems = manifest_problems(manifests)
    assert "TrainJob/gmeta-train: spec.trainer.numNode is unknown" in problems
    assert any("'backoffLimits' was unexpected" in problem for problem in problems)


@pytest.mark.parametrize("folder", ["base", "overlays/team-job"])
def test_what_a_cluster_trains_is_the_demo(folder: str) -> None:
    demo = tomllib.loads((ROOT / "examples/demo.toml").read_text())
    demo["data"] |= {"path": "/data/demo", "source": "service"}
    demo["run"] |= {"dir": "/runs/demo", "checkpoint_every_steps": 50}
    assert tomllib.loads((ROOT / f"deploy/k8s/{folder}/train.toml").read_text()) == demo


@needs_kubectl
def test_an_operators_pod_is_let_in_and_let_out() -> None:
    pod = yaml.safe_load((ROOT / "deploy/k8s/operator.yaml").read_text())
    manifests = render(ROOT / "deploy/k8s/overlays/local-cpu")
    assert manifest_problems([*manifests, pod]) == []
    policy = one(manifests, "NetworkPolicy", "gmeta-shard-service")
    let_in = [peer["podSelector"]["matchLabels"] for peer in policy["spec"]["ingress"][0]["from"]]
    assert pod["metadata"]["labels"] in let_in


@needs_kubectl
def test_a_trainjob_trains_in_the_pods_that_the_job_would_have(rendered: list[Manifest]) -> None:
    manifests = render(ROOT / "deploy/k8s/overlays/gpu-multi-node-kubeflow")
    (runtime,) = [m for m in manifests if m["kind"] == "TrainingRuntime"]
    ours, theirs = copy.deepcopy(train(rendered)), pod_specs(runtime)[0][1]
    del ours["subdomain"]  # the operator's own Service names the pods
    (container,), (node,) = ours.pop("containers"), theirs.pop("containers")
    for spec in (ours, theirs):
        spec["volumes"].sort(key=lambda volume: volume["name"])
    assert theirs == ours
    rendezvous = {"NNODES", "TRAIN", "RDZV_ENDPOINT", "RDZV_ID"}  # told by the operator
    container["env"] = [each for each in container["env"] if each["name"] not in rendezvous]
    for each in (container, node):
        each["env"].sort(key=lambda variable: variable["name"])
    for name in ("name", "command", "args", "ports"):
        container.pop(name), node.pop(name, None)
    assert node == container


def test_both_trainer_images_serve() -> None:
    """An overlay with GPUs runs its servers on the image of its training nodes."""
    for name, hardware in (("trainer-cpu", "cpu"), ("trainer-cuda", "cuda")):
        text = (ROOT / f"deploy/docker/{name}.Dockerfile").read_text()
        # The extra of CUDA has its kernels; on a CPU fbgemm is named beside torch.
        extras = "cuda kafka s3 serve" if hardware == "cuda" else "kafka s3 serve"
        assert f"dependencies.py {extras} >" in text


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (("USER 10001:10001", "USER root"), "the image runs as root"),
        (("@sha256:", "@sha512:"), "has no digest"),
        (("HEALTHCHECK", "# HEALTHCHECK"), "there is no HEALTHCHECK"),
        (("RUN groupadd", "RUN cd /tmp && groupadd"), "DL3003"),
    ],
)
def test_a_dockerfiles_error_is_seen(tmp_path: Path, wrong: tuple[str, str], expected: str) -> None:
    file = tmp_path / "broken.Dockerfile"
    (service,) = [path for path in DOCKERFILES if path.name == "service.Dockerfile"]
    file.write_text(service.read_text().replace(*wrong))
    assert any(expected in problem for problem in dockerfile_problems(file))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (("mem_limit", "mem_limt"), "mem_limt"),
        (("service_healthy", "service_heathy"), "service_heathy"),
        (("  read_only: true\n", ""), "its root file system can be written"),
        (("127.0.0.1:9090", "9090"), "prometheus: opens a port to other machines"),
        (("grafana:12.1.0@sha256:", "grafana:12.1.0-"), "has no digest"),
        (('["credentials:/run/gmeta"]', '["credential:/run/gmeta"]'), "which is no volume"),
    ],
)
def test_a_compose_mistake_is_found(tmp_path: Path, wrong: tuple[str, str], expected: str) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(COMPOSE_FILE.read_text().replace(*wrong, 1))
    assert any(expected in problem for problem in compose_problems(file))


def pinned() -> set[str]:
    lines = (ROOT / "deploy/requirements/constraints.txt").read_text().splitlines()
    return {normal(line.partition("==")[0]) for line in lines if "==" in line}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_of_the_images_has_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["s3"]]
    needed += project["optional-dependencies"]["serve"] + project["optional-dependencies"]["kafka"]
    # torch, torchrec and fbgemm are one triple, of the Dockerfiles; the project asks for torch.
    assert {normal(Requirement(line).name) for line in needed} - pinned() == {"torch"}


def test_the_service_image_has_what_the_service_imports_and_no_torch() -> None:
    code = """
import sys
from importlib.metadata import packages_distributions
import gmeta.cli.commands.shard_service, gmeta.cli.commands.shards, gmeta.cli.main
loaded = {name.partition(".")[0] for name in sys.modules}
known = packages_distributions()
print(*{dist for name in loaded for dist in known.get(name, [])})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Three distributions own parts of `google`; only protobuf's is loaded.
    others = {"grpcio-tools", "googleapis-common-protos"}
    loaded = {normal(name) for name in done.stdout.split()} - {"gmeta", *others}
    lines = (ROOT / "deploy/requirements/service.txt").read_text().splitlines()
    asked = {normal(line) for line in lines if line and not line.startswith("#")}
    assert asked <= loaded
    assert loaded <= pinned(), "pin it in constraints.txt, and ask for it in service.txt"
    assert not loaded & {"torch", "torchrec", "numpy", "pyarrow", "duckdb"}


@pytest.mark.parametrize(
    ("where", "value", "expected"),
    [
        (("predictor", "scaleTarget"), "60", "spec.predictor.scaleTarget: '60' is not of type"),
        (("predictor", "minReplica"), 2, "Additional properties are not allowed ('minReplica'"),
        (("transformer",), {}, "Additional properties are not allowed ('transformer'"),
    ],
)
def test_what_kserve_refuses_is_found(where: tuple[str, ...], value: object, expected: str) -> None:
    manifests = render(ROOT / "deploy/k8s/overlays/local-cpu-kserve")
    (service,) = (each for each in manifests if each["kind"] == "InferenceService")
    assert schema_problems(service) == []
    *path, last = where
    holder = service["spec"]
    for name in path:
        holder = holder[name]
    holder[last] = value
    assert any(expected in problem for problem in schema_problems(service))
