"""Metrics of the loop for Prometheus: freshness, time by stage, what waits and what was refused."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge

from gmeta.errors import GMetaError
from gmeta.pipeline.pipeline import Pipeline
from gmeta.pipeline.pipeline_status import PipelineStatus, read_status
from gmeta.pipeline.stage_outcome import STAGES, StageOutcome
from metaio.errors import MetaIOError

_GAUGES: tuple[tuple[str, str, Callable[[PipelineStatus], float | None]], ...] = (
    ("prepared_increment", "newest increment of the stream", lambda now: now.prepared),
    (
        "served_increment",
        "newest increment that the served model knows",
        lambda now: now.served_increment,
    ),
    (
        "served_version",
        "version that the channel serves",
        lambda now: now.current.number if now.current else None,
    ),
    ("event_age_seconds", "now minus the event time the model knows", PipelineStatus.event_age_s),
    ("event_age_limit_seconds", "follow.fresh_s", lambda now: now.fresh_s),
    ("served_age_seconds", "since the served version was promoted", PipelineStatus.served_age_s),
    ("waiting_partitions", "closed partitions not yet in the stream", lambda now: now.waiting),
    ("held_files", "late or too few: part of the next increment", lambda now: now.held),
    ("refused_in_a_row", "candidates refused since the last promotion", lambda now: now.refused),
    ("increment_rows", "training rows of the newest increment", lambda now: now.rows),
    (
        "calibration",
        "mean prediction over mean label of the newest candidate, on rows it was judged by",
        lambda now: now.calibration,
    ),
    ("quarantined_files", "files that the screen refused", lambda now: now.quarantined),
    (
        "failing",
        "1 while the next stage fails or is set aside, or all that comes is late",
        lambda now: bool(now.failure or now.stuck),
    ),
)


@final
class PipelineMetrics:
    """Gauges of one loop."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.status = PipelineStatus(fresh_s=pipeline.config.follow.fresh_s)
        self.registry = CollectorRegistry()
        for name, text, value in _GAUGES:
            gauge = Gauge(f"gmeta_follow_{name}", text, registry=self.registry)
            # A function: an age is that of the moment of the request, however long a stage takes
            # meanwhile.
            gauge.set_function(partial(self._gauge_value, value))
        self._running = Gauge(
            "gmeta_follow_stage_running_seconds",
            "since the stage under way began; 0 of others",
            ["stage"],
            registry=self.registry,
        )
        self._took = Gauge(
            "gmeta_follow_stage_seconds", "last run of a stage", ["stage"], registry=self.registry
        )
        self._stages = Counter(
            "gmeta_follow_stages", "stages done", ["stage"], registry=self.registry
        )
        self._failures = Counter(
            "gmeta_follow_failures", "stages that failed", ["stage"], registry=self.registry
        )
        text = "scores of the newest increment by the model before it was trained on its labels"
        self._forecast = Gauge("gmeta_follow_forecast", text, ["metric"], registry=self.registry)
        for stage in STAGES:
            # A series that is there from the start, at 0: a rate over it sees the first stage.
            self._stages.labels(stage)
            self._failures.labels(stage)
            self._running.labels(stage).set_function(partial(self._running_s, stage))

    def count_stage(self, outcome: StageOutcome) -> None:
        """Count a stage that ended."""
        self._stages.labels(outcome.stage).inc()
        self._took.labels(outcome.stage).set(outcome.took_s)

    def refresh(self) -> None:
        """Read the status of the loop, which the gauges show from then on."""
        self.status = read_status(self._pipeline)
        for metric, score in self.status.forecast.items():
            self._forecast.labels(metric).set(score)

    def note_failure(self, why: str) -> None:
        """Set why the next stage fails; what waits is still counted."""
        stage, self._pipeline.failed_stage = self._pipeline.failed_stage, ""
        if stage:
            self._failures.labels(stage).inc()
        # The status is read from what may be failing.
        with suppress(GMetaError, MetaIOError, OSError):
            self.refresh()
        self.status = replace(self.status, failure=why)

    def _gauge_value(self, value: Callable[[PipelineStatus], float | None]) -> float:
        """Return a gauge's value, NaN if there is none yet."""
        # An alert's comparison with NaN does not hold.
        reading = value(self.status)
        return float("nan") if reading is None else float(reading)

    def _running_s(self, stage: str) -> float:
        now = self._pipeline.under_way
        return time.monotonic() - now.since_s if now and now.stage == stage else 0.0
