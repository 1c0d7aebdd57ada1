"""Two teams at once, one of them with two jobs: each ends with its own run and no other's."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from gmeta.antdt.manifests.audit import audit_manifest
from gmeta.antdt.manifests.shard_manifest import load_manifest
from gmeta.runs.run_folder import list_checkpoints
from tests.deploy.cluster.cluster import Cluster, running_together
from tests.deploy.cluster.test_cluster import LESS
from tests.deploy.network import NoNamespacesError
from tests.deploy.rendering import Manifest, render
from tests.deploy.teams import copy_of_team_job
from tests.deploy.test_deploy_check import needs_kubectl
from tests.support.waiting import wait_until

JOBS = {"ads": ["ctr", "cvr"], "search": ["ctr"]}
SMALLER_SIZE = {
    "completions: 2": "completions: 1", "parallelism: 2": "parallelism: 1",
    'NNODES, value: "2"': 'NNODES, value: "1"', "minAvailable: 1": "minAvailable: 0",
}  # fmt: skip
FEWER_TASKS = """
  - target: {kind: Job, name: gmeta-prepare}
    patch: |-
      - op: replace
        path: /spec/template/spec/containers/0/command
        value: [dumb-init, --, gmeta, prepare, --recipe, synthetic, --tasks, "200", /data/demo]
"""


def team(folder: Path, name: str) -> list[Manifest]:
    """What the team applies: all of its jobs."""
    for job in JOBS[name]:
        overlay = copy_of_team_job(folder / job, name, job)
        for file, changes in (("size.yaml", SMALLER_SIZE), ("train.toml", LESS)):
            text = (overlay / file).read_text()
            for before, after in changes.items():
                assert before in text
                text = text.replace(before, after)
            (overlay / file).write_text(text)
        path = overlay / "kustomization.yaml"
        path.write_text(
            path.read_text().replace("  - path: size.yaml\n", f"  - path: size.yaml{FEWER_TASKS}")
        )
    return [each for job in JOBS[name] for each in render(folder / job)]


@needs_kubectl
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_three_jobs_of_two_teams_run_at_once(tmp_path: Path) -> None:
    teams = {tmp_path / name: team(tmp_path / "overlays" / name, name) for name in JOBS}
    with ExitStack() as stack:
        try:
            clusters = stack.enter_context(running_together(teams))
        except NoNamespacesError as error:
            pytest.skip(f"no network namespaces here: {error}")

        def complete(cluster: Cluster) -> bool:
            return all(cluster.workloads[name].complete for name in trainers(cluster))

        def trainers(cluster: Cluster) -> list[str]:
            return [name for name in cluster.workloads if name.endswith("-gmeta-train")]

        def all_complete() -> bool:
            for cluster in clusters:
                cluster.poll()
            return all(map(complete, clusters))

        wait_until(all_complete, "the end of all training")
        tokens = set()
        for cluster, (name, jobs) in zip(clusters, JOBS.items(), strict=True):
            assert trainers(cluster) == [f"{job}-gmeta-train" for job in jobs]
            assert cluster.api.refused == []
            for job in jobs:
                run = cluster.volume(f"{job}-gmeta-runs") / "demo"
                last = list_checkpoints(run / "checkpoints")[-1]
                assert audit_manifest(load_manifest(last)).ok, name
                worker = cluster.api.objects["secrets", f"{job}-gmeta-worker"]
                tokens.add(worker["data"]["token"])
                # Each job asked its own service, and that one nobody else.
                service = cluster.pod(f"{job}-gmeta-shard-service-0").log()
                assert "refused" not in service, service
        assert len(tokens) == 3
