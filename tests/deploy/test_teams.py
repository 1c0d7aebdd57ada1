"""Two teams, and two jobs of a team, share a cluster: nothing of one is anything of another's."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.check import manifest_problems
from tests.deploy.rendering import Manifest, name_of, render
from tests.deploy.teams import TEAM_JOB, copy_of_team_job
from tests.deploy.test_deploy_check import needs_kubectl

KINDS_OF_START = ("ServiceAccount", "Role", "RoleBinding", "Job", "NetworkPolicy")
_PARTS = ("gpu-multi-node", "gpu-nodes", "serve", "serve-channel", "serve-scale-by-queue")
KINDS = ["", ", ".join(f"../../components/{part}" for part in _PARTS)]


@needs_kubectl
@pytest.mark.parametrize("components", KINDS, ids=["cpu", "gpus-and-server"])
def test_objects_of_two_jobs_have_nothing_in_common(components: str, tmp_path: Path) -> None:
    jobs = {}
    for job in ("first", "second"):
        jobs[job] = render(copy_of_team_job(tmp_path / job, "ads", job, components))
        assert manifest_problems(jobs[job]) == []
        assert {each["metadata"]["namespace"] for each in jobs[job]} == {"ads"}
    first, second = ({name_of(each) for each in objects} for objects in jobs.values())
    assert not first & second
    # Only the names, and the label, tell them apart: no word of the one is left as it was.
    assert _renamed(jobs["first"], "first", "second") == jobs["second"]
    for each in jobs["first"]:
        text = yaml.safe_dump(_without_texts(each))
        left = [one for one in text.splitlines() if "gmeta-" in one and "first-gmeta-" not in one]
        assert [line for line in left if not _is_shared(line)] == []


def _renamed(objects: list[Manifest], before: str, after: str) -> list[Manifest]:
    return list(yaml.safe_load_all(yaml.safe_dump_all(objects).replace(before, after)))


def _without_texts(manifest: Manifest) -> Manifest:
    """Dashboards and alerts, which know all jobs of a cluster, and files apart."""
    if manifest["kind"] in ("ConfigMap", "PrometheusRule"):
        return {**manifest, "data": {}, "spec": {}}
    return manifest


def _is_shared(line: str) -> bool:
    """Images, the cluster's priorities, the commands of an image, and names that alerts know."""
    return any(
        word in line
        for word in (
            "image:", "priorityClassName:", "- gmeta-credentials", "- gmeta-resume",
            "replacement:",
        )
    )  # fmt: skip


@needs_kubectl
def test_a_jobset_is_its_jobs_in_order(tmp_path: Path) -> None:
    folder = copy_of_team_job(
        tmp_path / "job", "ads", "ctr", "../../components/jobset, ../../components/queue"
    )
    plain = {name_of(each): each for each in render(TEAM_JOB)}
    _add_transformer(folder, "jobset")
    made = {name_of(each): each for each in render(folder)}
    assert manifest_problems(list(made.values())) == []
    assert plain.keys() - made.keys() == {
        "Job/ctr-gmeta-prepare", "Job/ctr-gmeta-train", "Service/ctr-gmeta-train",
        *(f"{kind}/ctr-gmeta-train-start" for kind in KINDS_OF_START),
    }  # fmt: skip
    jobset = made["JobSet/ctr-gmeta-train"]
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gmeta"
    assert jobset["spec"]["network"]["subdomain"] == "ctr-gmeta-train"
    prepare, node = jobset["spec"]["replicatedJobs"]
    assert prepare["template"]["spec"] == plain["Job/ctr-gmeta-prepare"]["spec"]
    assert node["dependsOn"] == [{"name": "prepare", "status": "Complete"}]
    job = plain["Job/ctr-gmeta-train"]["spec"]
    assert job.pop("suspend") is True  # the order of the JobSet's Jobs takes its place
    (place,) = [e for e in _environment(job) if e["name"] == "RDZV_ENDPOINT"]
    place["value"] = "$(TRAIN)-node-0-0.$(TRAIN):29400"
    assert node["template"]["spec"] == job


@needs_kubectl
@pytest.mark.parametrize(("nodes", "gang"), [("2", "2"), ("1:2", "1")])
def test_volcano_places_all_nodes_or_none(nodes: str, gang: str, tmp_path: Path) -> None:
    folder = copy_of_team_job(tmp_path / "job", "ads", "ctr")
    size = folder / "size.yaml"
    size.write_text(size.read_text().replace('NNODES, value: "2"', f'NNODES, value: "{nodes}"'))
    plain = {name_of(each): each for each in render(folder)}
    _add_transformer(folder, "volcano")
    made = {name_of(each): each for each in render(folder)}
    assert manifest_problems(list(made.values())) == []
    train = made["Job/ctr-gmeta-train"]
    template = train["spec"]["template"]
    assert train["metadata"]["annotations"].pop("scheduling.volcano.sh/group-min-member") == gang
    assert template["metadata"]["annotations"].pop("scheduling.volcano.sh/queue-name") == "default"
    assert template["spec"].pop("schedulerName") == "volcano"
    for holder in (train, template):
        if not holder["metadata"]["annotations"]:
            del holder["metadata"]["annotations"]
    assert made == plain  # nothing else is another


def _add_transformer(folder: Path, name: str) -> None:
    """Name one more in the overlay, behind the others."""
    path = folder / "kustomization.yaml"
    back = re.search(r"transformers: \[(.*)/names\]", path.read_text())
    assert back is not None
    text = path.read_text().replace(back[0], f"transformers: [{back[1]}/names, {back[1]}/{name}]")
    path.write_text(text)


def _environment(job: Manifest) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = job["template"]["spec"]["containers"][0]["env"]
    return env
