"""What Prometheus sees of the loop: freshness, lag by stage, what waits and what was refused."""

import time
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from gmeta.antdt.access.address import split_address
from gmeta.loop.loop import STAGES, Done, Loop
from metaio.stream.chain import increment_numbers, open_stream

_PER_S = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9, "day": 1 / 86_400}


@final
class LoopMetrics:
    """Gauges of one loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"gmeta_follow_{name}", text, registry=self.registry)

        self._prepared = gauge("prepared_increment", "newest increment of the stream")
        self._served = gauge("served_increment", "newest increment that the served model knows")
        self._version = gauge("served_version", "version that the channel serves")
        self._event_age = gauge("event_age_seconds", "now minus the event time the model knows")
        self._served_age = gauge("served_age_seconds", "since the served version was promoted")
        self._waiting = gauge("waiting_partitions", "closed partitions not yet in the stream")
        self._refused = gauge("refused_in_a_row", "candidates refused since the last promotion")
        self._quarantined = gauge("quarantined_files", "files that the screen refused")
        self._failing = gauge("failing", "1 while the next stage fails or is set aside")
        self._took = Gauge(
            "gmeta_follow_stage_seconds", "last run of a stage", ["stage"], registry=self.registry
        )
        self._stages = Counter(
            "gmeta_follow_stages", "stages done", ["stage"], registry=self.registry
        )
        for stage in STAGES:
            self._stages.labels(stage)

    def serve(self, address: str) -> None:
        """Answer /metrics at HOST:PORT from a thread. Raise AddressError for no address."""
        host, port = split_address("--metrics", address)
        start_http_server(port, host, self.registry)

    def done(self, done: Done) -> None:
        """Count a stage."""
        self._stages.labels(done.stage).inc()
        self._took.labels(done.stage).set(done.took_s)
        self._failing.set(0)

    def failed(self) -> None:
        """Say that the next stage does not come to its end."""
        self._failing.set(1)

    def look(self) -> None:
        """Set the gauges of what is now."""
        loop = self._loop
        numbers = increment_numbers(loop.config.follow.stream)
        self._waiting.set(len(loop.waiting()))
        self._quarantined.set(len(loop.quarantined()))
        current = loop.channel.current()
        if current is not None:
            self._version.set(current.number)
            self._served_age.set(max(0.0, time.time() - current.since_s))
        if not numbers:
            return
        self._prepared.set(numbers[-1])
        self._refused.set(len(loop.refused_before(numbers[-1] + 1)))
        served = [n for n in numbers if current and loop.promoted(n) == current.number]
        if served:
            stream = open_stream(loop.config.follow.stream)
            self._served.set(served[-1])
            per_s = _PER_S[str(stream.description["time_unit"])]
            end_s = stream.record(served[-1]).window[1] / per_s
            self._event_age.set(max(0.0, time.time() - end_s))
