"""Prometheus metrics of the service: calls, commits, and the shards in each state."""

from collections import Counter as Counter_
from collections.abc import Callable, Iterator
from typing import Any, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gmeta.access.http_edge import HttpRequest
from gmeta.antdt.phase import PHASES
from gmeta.antdt.reports import SHARD_STATES, SPENT
from gmeta.antdt.stragglers.governor import Governor

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@final
class ServiceMetrics:
    """One registry a service, so that several services can live in one process."""

    def __init__(self, read_status: Callable[[], Any], num_streams: Callable[[], int]) -> None:
        """Register the metrics; `read_status` returns None while the service cannot answer."""
        # Without auto_describe, which would scrape here, while the service is recovering.
        self.registry = CollectorRegistry()
        # Docs and alerts use these names.
        self.streams = Gauge("antdt_streams", "Open streams of calls.", registry=self.registry)
        self.streams.set_function(num_streams)
        self.calls = Counter(
            "antdt_calls", "Calls by RPC and gRPC status.", ["rpc", "code"], registry=self.registry
        )
        self.call_seconds = Histogram(
            "antdt_call_seconds",
            "Time from a call's arrival to its answer.",
            ["rpc"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.append_seconds = Histogram(
            "antdt_append_seconds",
            "Time to apply and append one group; the fsync after it is in antdt_call_seconds.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.group_size = Histogram(
            "antdt_group_size",
            "Calls in one group.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=self.registry,
        )
        self.expired = Counter(
            "antdt_leases_expired", "Leases that nobody renewed in time.", registry=self.registry
        )
        self.registry.register(_StateCollector(read_status))

    def observe_call(self, rpc: str, code: str, seconds: float) -> None:
        """Count one answered call."""
        self.calls.labels(rpc, code).inc()
        self.call_seconds.labels(rpc).observe(seconds)

    def add_governor(self, governor: Governor) -> None:
        """Add verdicts, speeds and decisions, read at each scrape."""
        self.registry.register(_GovernorCollector(governor))

    def answer(self, request: HttpRequest) -> None:
        """Answer GET /metrics in the format that the scraper asks for."""
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        request.send(200, encode(self.registry), content_type=content_type)


@final
class _StateCollector(Collector):
    """Gauges read from the ledger at each scrape, so that they cannot drift from it."""

    def __init__(self, read_status: Callable[[], Any]) -> None:
        self._read_status = read_status

    def collect(self) -> Iterator[Any]:
        """Yield shards by state, workers' seconds and the service's counts."""
        status = self._read_status()
        if status is None:
            return
        shards = GaugeMetricFamily("antdt_shards", "Shards by state.", labels=["dataset", "state"])
        epoch = GaugeMetricFamily(
            "antdt_epoch", "Epoch being handed out, from 0.", labels=["dataset"]
        )
        for dataset in status.datasets:
            epoch.add_metric([dataset.spec.name], dataset.epoch)
            for state in SHARD_STATES:
                shards.add_metric([dataset.spec.name, state], getattr(dataset, state))
        seconds = CounterMetricFamily(
            "antdt_worker_seconds",
            "Where a worker's time went since its process began.",
            labels=["worker", "spent"],
        )
        for worker in status.workers:
            # Workers that never reported are left out: 0 seconds would be a claim.
            if worker.HasField("report"):
                for spent in SPENT:
                    seconds.add_metric(
                        [worker.worker_id, spent], getattr(worker.report, f"{spent}_ms") / 1000
                    )
        yield from (shards, epoch, seconds)
        for name, help_text, value in (
            ("antdt_leases", "Live leases.", status.num_leases),
            ("antdt_workers", "Workers known.", status.num_workers),
            ("antdt_service_epoch", "Starts of the service on this store.", status.service_epoch),
            ("antdt_run_generation", "Restarts and roll-backs of the job.", status.run_generation),
            ("antdt_ledger_events", "Events in the ledger.", status.ledger_events),
            ("antdt_draining", "1 while the whole service is drained.", status.draining),
        ):
            yield GaugeMetricFamily(name, help_text, value=value)


@final
class _GovernorCollector(Collector):
    """What the monitor and the controller know now."""

    def __init__(self, governor: Governor) -> None:
        self._governor = governor

    def collect(self) -> Iterator[Any]:
        """Yield speeds, slowdowns, shares, stragglers and decisions."""
        governor = self._governor
        speed = GaugeMetricFamily(
            "antdt_worker_tasks_per_s", "By its own time alone.", labels=["worker"]
        )
        ratio = GaugeMetricFamily(
            "antdt_worker_slowdown", "Own time per task over the others'.", labels=["worker"]
        )
        share = GaugeMetricFamily("antdt_worker_share", "Tasks of each step.", labels=["worker"])
        stragglers = GaugeMetricFamily(
            "antdt_stragglers", "Slow workers by verdict and cause.", labels=["verdict", "cause"]
        )
        num_stragglers: Counter_[tuple[str, str]] = Counter_()
        for name, health in governor.health.items():
            # A silent worker's last speed is not what it does now.
            if name in governor.silent:
                continue
            speed.add_metric([name], health.tasks_per_s)
            ratio.add_metric([name], health.ratio)
            share.add_metric([name], governor.controller.shares.get(name, 0))
            if health.cause:
                num_stragglers[health.verdict, health.cause] += 1
        for key, count in num_stragglers.items():
            stragglers.add_metric(list(key), count)
        decisions = CounterMetricFamily(
            "antdt_decisions", "Rulings of the controller.", labels=["kind", "outcome"]
        )
        # Copied in one go: the governor's thread counts meanwhile.
        for key, count in list(governor.counts.items()):
            decisions.add_metric(list(key), count)
        phase = GaugeMetricFamily("antdt_phase", "1 for what the job is doing.", labels=["phase"])
        for name in PHASES:
            phase.add_metric([name], name == governor.phase)
        yield from (speed, ratio, share, stragglers, decisions, phase)
        yield GaugeMetricFamily(
            "antdt_workers_silent",
            "Workers not heard of for longer than a lease lives.",
            value=len(governor.silent),
        )
        yield GaugeMetricFamily(
            "antdt_job_tasks_per_s", "All workers together.", value=governor.tasks_per_s
        )
