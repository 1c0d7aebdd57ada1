"""Alerts and dashboard ask for metrics that the service has."""

import re
from pathlib import Path

import grpc

from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.pipeline.pipeline_metrics import PipelineMetrics
from gmeta.serving.server.server_metrics import ServerMetrics
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb
from gmeta_protos.antdt.v1 import shard_service_pb2_grpc as pb_grpc
from tests.deploy.monitoring import ALERTS, DASHBOARDS
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


def test_alerts_ask_for_metrics_that_a_server_has() -> None:
    families = list(ServerMetrics().registry.collect())
    had = {f"{family.name}{'_total' * (family.type == 'counter')}" for family in families}
    had |= {f"{family.name}_bucket" for family in families if family.type == "histogram"}
    # In the expressions alone: descriptions name the whole histogram.
    asked = set(re.findall(r"gmeta_serve_\w+(?=[{\[)])", ALERTS.read_text()))
    assert len(asked) == 3
    assert asked - had == set()


def test_alerts_and_dashboard_ask_for_metrics_that_a_loop_has(tmp_path: Path) -> None:
    families = list(PipelineMetrics(loop_of(write_loop(tmp_path))).registry.collect())
    had = {f"{family.name}{'_total' * (family.type == 'counter')}" for family in families}
    asked = set(
        re.findall(r"gmeta_follow_\w+", "".join(p.read_text() for p in [ALERTS, *DASHBOARDS]))
    )
    assert asked == had
