"""The overlay local-cpu-follow: a pod follows a log, and another takes it up when it is killed."""

from pathlib import Path

import pytest

from gmeta.serving.channel.channel import Channel
from tests.deploy.cluster.cluster import KINDS, running
from tests.deploy.cluster.test_cluster import open_ports
from tests.deploy.network import NoNamespacesError
from tests.deploy.rendering import ROOT, Manifest, render
from tests.deploy.test_deploy_check import needs_kubectl
from tests.support.waiting import PATIENCE_S

# Of the overlay's workloads: its training job has a test of its own.
WANTED = {"gmeta-credentials", "gmeta-logs", "gmeta-follow"}


def manifests() -> list[Manifest]:
    """The loop with two small days."""
    found = [
        manifest
        for manifest in render(ROOT / "deploy/k8s/overlays/local-cpu-follow")
        if manifest["kind"] not in KINDS or manifest["metadata"]["name"] in WANTED
    ]
    (logs,) = (one for one in found if one["metadata"]["name"] == "gmeta-logs")
    command = logs["spec"]["template"]["spec"]["containers"][0]["command"]
    assert "--days 5 --tasks 2000" in command[-1]
    command[-1] = command[-1].replace("--days 5 --tasks 2000", "--days 2 --tasks 400")
    return found


@needs_kubectl
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_the_pod_makes_a_version_of_each_day_though_it_is_killed(tmp_path: Path) -> None:
    try:
        with running(manifests(), tmp_path) as cluster:
            follow = cluster.volume("gmeta-runs") / "follow"
            channel = Channel(follow / "channel")

            def promoted(count: int) -> bool:
                return len([one for one in channel.promotions() if one["number"]]) >= count

            cluster.run_until(lambda: promoted(1), "the first version", PATIENCE_S)
            pod = cluster.pod("gmeta-follow-0")
            pod.kill()
            page = follow / "stream.html"
            cluster.run_until(lambda: promoted(2), "the second version", PATIENCE_S)
            cluster.run_until(page.exists, "the page", PATIENCE_S)
            assert cluster.pod("gmeta-follow-0") is not pod
            assert open_ports(cluster.pod("gmeta-follow-0")) == {8090}
            assert channel.numbers() == [1, 2]
            assert channel.require_current().number == 2
            # Nobody but the one that made the Secrets has asked the API server for anything.
            assert set(cluster.api.accounts.values()) == {"gmeta-credentials"}
    except NoNamespacesError as error:
        pytest.skip(f"no network namespaces here: {error}")
