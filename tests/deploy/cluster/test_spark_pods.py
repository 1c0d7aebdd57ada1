"""prepare on Spark as the overlay has it: executors by the API server within its Role's rights."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from metaio.prepare.engines.local import prepare
from metaio.prepare.job import PrepareOptions
from metaio.prepare.schema.schema_file import load_schema
from tests.deploy.cluster.cluster import Cluster, running
from tests.deploy.network import NoNamespacesError
from tests.deploy.rendering import ROOT, Manifest, render
from tests.deploy.test_deploy_check import needs_kubectl, one
from tests.metaio.prepare.test_local import raw_table
from tests.metaio.prepare.test_spark_command import SCHEMA, files, needs_spark
from tests.support.waiting import PATIENCE_S

# What this machine has room for; the rest of the settings is the overlay's.
LESS = {
    "spark.executor.instances": "2", "spark.executor.cores": "1",
    "spark.kubernetes.executor.limit.cores": "1", "spark.executor.memory": "600m",
    "spark.driver.memory": "600m",
}  # fmt: skip


def smaller(conf: str) -> str:
    lines = [line.split(None, 1) for line in conf.splitlines() if not line.startswith("#")]
    settings = {key: value.strip() for key, value in lines}
    assert settings.keys() >= LESS.keys()
    return "\n".join(f"{key} {value}" for key, value in {**settings, **LESS}.items())


@pytest.fixture
def manifests() -> list[Manifest]:
    """The overlay without its training and its shard service."""
    rendered = render(ROOT / "deploy/k8s/overlays/gpu-multi-node-spark")
    gone = ("gmeta-train", "gmeta-train-start", "gmeta-shard-service")
    workloads = ("Job", "StatefulSet")
    kept = [m for m in rendered if m["kind"] not in workloads or m["metadata"]["name"] not in gone]
    data = one(kept, "ConfigMap", "gmeta-spark")["data"]
    data["spark-defaults.conf"] = smaller(data["spark-defaults.conf"])
    data["schema.toml"] = SCHEMA
    one(kept, "Job", "gmeta-prepare-spark")["spec"]["backoffLimit"] = 0
    return kept


@pytest.fixture
def cluster(manifests: list[Manifest], tmp_path: Path) -> Iterator[Cluster]:
    raw = tmp_path / "volumes/gmeta-raw"
    raw.mkdir(parents=True)
    pq.write_table(raw_table(6_000), raw / "raw.parquet", row_group_size=900)
    with ExitStack() as stack:
        try:
            yield stack.enter_context(running(manifests, tmp_path, more=2))
        except NoNamespacesError as error:
            pytest.skip(f"no network namespaces here: {error}")


@needs_spark
@needs_kubectl
@pytest.mark.timeout(1800)
def test_the_driver_makes_its_executors_and_they_write_the_files_of_one_machine(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = cluster.workloads["gmeta-prepare-spark"]
    cluster.run_until(lambda: job.complete, "the Job's completion", 4 * PATIENCE_S)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    raw = str(cluster.volume("gmeta-raw") / "raw.parquet")
    schema = load_schema(tmp_path / "schema.toml")
    prepare([raw], str(tmp_path / "one"), schema, PrepareOptions(threads=1))
    assert files(cluster.volume("gmeta-data") / "demo") == files(tmp_path / "one")
    assert sorted(cluster.asked_for) == ["gmeta-prepare-exec-1", "gmeta-prepare-exec-2"]
    assert cluster.api.refused == []
    assert cluster.api.select("pods", "spark-role=executor") == []
