"""Alerts and dashboard ask for metrics that the service has."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import torch
import yaml
from prometheus_client import CollectorRegistry

from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.pipeline.pipeline_metrics import PipelineMetrics
from gmeta.runs.logging.logger import RunInfo
from gmeta.runs.logging.rank_metrics import RankMetrics
from gmeta.serving.server.server_metrics import ServerMetrics
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb
from gmeta_protos.antdt.v1 import shard_service_pb2_grpc as pb_grpc
from tests.deploy.monitoring import ALERTS, DASHBOARDS, iterate_expressions
from tests.pipeline.days import write_loop
from tests.pipeline.following import loop_of


def test_alerts_and_dashboard_ask_for_metrics_that_the_service_has() -> None:
    server = ShardServer(ServiceConfig("127.0.0.1:0"))
    with grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.ShardServiceStub(channel)
        spec = pb.DatasetSpec(name="d", num_units=8, units_per_shard=4, num_epochs=1)
        stub.RegisterDataset(pb.RegisterDatasetRequest(spec=spec))
        reply = stub.Register(pb.RegisterRequest(worker_id="a", incarnation="p"))
        caller = pb.Caller(
            worker_id="a",
            incarnation="p",
            service_epoch=reply.service_epoch,
            run_generation=reply.run_generation,
        )
        report = pb.WorkerReport(step=1, tasks_done=4, compute_ms=1500, data_wait_ms=500)
        stub.Heartbeat(pb.HeartbeatRequest(caller=caller, report=report))
    registry = server.edge.metrics.registry
    labels = {"worker": "a", "spent": "data_wait"}
    assert registry.get_sample_value("antdt_worker_seconds_total", labels) == 0.5
    families = list(registry.collect())
    had = {sample.name for family in families for sample in family.samples}
    # A family without a sample yet: nobody is slow, nothing was decided.
    had |= {f"{family.name}{'_total' * (family.type == 'counter')}" for family in families}
    server.stop(0.0)
    asked = set(re.findall(r"antdt_\w+", "".join(p.read_text() for p in [ALERTS, *DASHBOARDS])))
    assert len(asked) > 8
    assert asked - had == set()


def names_of(registry: CollectorRegistry) -> set[str]:
    """The names of a registry's samples, also of those without a value yet."""
    ends = {
        "counter": ["_total"],
        "gauge": [""],
        "histogram": ["_bucket", "_sum", "_count"],
        "summary": ["_sum", "_count"],
    }
    return {f"{one.name}{end}" for one in registry.collect() for end in ends[one.type]}


def names_asked(prefix: str) -> set[str]:
    """Those that alerts and dashboards ask for, in expressions alone."""
    asked = [yaml.safe_load(ALERTS.read_text()), *(json.loads(p.read_text()) for p in DASHBOARDS)]
    texts = [expression for one in asked for expression in iterate_expressions(one)]
    return set(re.findall(rf"{prefix}_\w+", " ".join(texts)))


def test_alerts_and_dashboard_ask_for_metrics_that_a_server_has() -> None:
    had, asked = names_of(ServerMetrics().registry), names_asked("gmeta_serve")
    assert asked - had == set()
    # Of each family something is looked at.
    shown = {re.sub("_(bucket|sum|count|total)$", "", name) for name in asked}
    unseen = {re.sub("_(bucket|sum|count|total)$", "", name) for name in had} - shown
    assert unseen == {"gmeta_serve_cache_tasks", "gmeta_serve_cache_unshared"}


def test_alerts_and_dashboard_ask_for_metrics_that_a_rank_has(tmp_path: Path) -> None:
    info = RunInfo(tmp_path, {}, "auc", total_steps=3)
    ranks: Any = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    metrics = RankMetrics(info, ranks, lambda: 0.0)
    had = {name for name in names_of(metrics.registry) if name.startswith("gmeta_")}
    # There only with a GPU.
    assert names_asked("gmeta_train") == had | {"gmeta_train_device_memory_bytes"}


def test_alerts_and_dashboard_ask_for_metrics_that_a_loop_has(tmp_path: Path) -> None:
    families = list(PipelineMetrics(loop_of(write_loop(tmp_path))).registry.collect())
    had = {f"{family.name}{'_total' * (family.type == 'counter')}" for family in families}
    asked = set(
        re.findall(r"gmeta_follow_\w+", "".join(p.read_text() for p in [ALERTS, *DASHBOARDS]))
    )
    assert asked == had
