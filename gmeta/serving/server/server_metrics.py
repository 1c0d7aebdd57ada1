"""Prometheus metrics of a server; those of all its workers together where it has several."""

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, values
from prometheus_client.exposition import choose_encoder
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from gmeta.access.log import event
from gmeta.errors import GMetaError
from gmeta.platform.files.storage_errors import translate_storage_errors
from gmeta.serving.server.shared_support import NO_ROOM
from gmeta.serving.server.traffic import Traffic

# The folder in which prometheus_client keeps the metrics of several processes.
MULTIPROCESS_DIR = "PROMETHEUS_MULTIPROC_DIR"
_VERSION = "gmeta_serve_model_info"
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TASKS = (1, 2, 4, 8, 16, 32, 64)
_ROWS = (1, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000)
# What prometheus_client begins a file with.
_FILE_BYTES = 1 << 16
# More than any sample's name, labels and help take: reserved before each new one.
_SAMPLE_BYTES = 1 << 12


@final
class ServerMetrics:
    """One registry a server, so that several can live in one process (tests)."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        text = "Inference requests by protocol and HTTP status (gRPC: that of the same meaning)."
        self.requests = counter("gmeta_serve_requests", text, ["protocol", "status"])
        text = "From a request's head to its answer, with the time that its body took to come."
        name = "gmeta_serve_request_seconds"
        self.seconds = histogram(name, text, ["protocol"], buckets=_SECONDS)
        name, text = (
            "gmeta_serve_stage_seconds",
            "Where the time goes: parse and queue of a request; encode, adapt, predict of a batch.",
        )
        self.stage_seconds = histogram(name, text, ["stage"], buckets=_SECONDS)
        name, text = "gmeta_serve_batch_tasks", "Requests of a batch."
        self.batch_tasks = histogram(name, text, buckets=_TASKS)
        self.batch_rows = histogram("gmeta_serve_batch_rows", "Rows of a batch.", buckets=_ROWS)
        text = (
            "Requests with a task key: hit, stored, restored from its rows, too_large or miss; "
            "with a state: kept, or renewed from its rows."
        )
        self.cache = counter("gmeta_serve_cache", text, ["result"])
        text = "Newer versions found, by result."
        self.reloads = counter("gmeta_serve_reloads", text, ["result"])
        # At 0 from the start: an alert on an increase needs a value before the first.
        for result in ("loaded", "refused"):
            self.reloads.labels(result)
        # Over all workers that live: sizes add up, and an alert is on the oldest model or on any
        # refusal.
        total = partial(Gauge, registry=registry, multiprocess_mode="livesum")
        least = partial(Gauge, registry=registry, multiprocess_mode="livemin")
        most = partial(Gauge, registry=registry, multiprocess_mode="livemax")
        self.cache_bytes = total("gmeta_serve_cache_bytes", "Bytes of adapted tasks.")
        self.cache_tasks = total("gmeta_serve_cache_tasks", "Adapted tasks that are kept.")
        text = "Times that the workers' shared file failed."
        self.cache_unshared = total("gmeta_serve_cache_unshared", text)
        self.waiting = total("gmeta_serve_waiting", "Requests that wait for a batch.")
        text = "When the model was exported."
        self.exported = least("gmeta_serve_model_exported_timestamp_seconds", text)
        text = "When the model was loaded."
        self.loaded = most("gmeta_serve_model_loaded_timestamp_seconds", text)
        text = "1 while the folder holds a version that was refused."
        self.refused = most("gmeta_serve_model_refused", text)
        self.version = most(_VERSION, "1 for the version that answers.", ["model", "version"])
        self.traffic = Traffic(registry)
        self._answering: tuple[str, str] | None = None

    def observe_stage(self, stage: str, seconds: float) -> None:
        """Count the seconds of one stage."""
        self.stage_seconds.labels(stage).observe(seconds)

    def observe_batch(self, what: str, value: float) -> None:
        """Count what a batcher measures."""
        if what == "queue":
            self.observe_stage(what, value)
        else:
            (self.batch_tasks if what == "tasks" else self.batch_rows).observe(value)

    def count_answer(self, protocol: str, status: int, began_s: float) -> None:
        """Count one answered request that began at this time of time.perf_counter."""
        self.requests.labels(protocol, str(status)).inc()
        self.seconds.labels(protocol).observe(time.perf_counter() - began_s)

    def set_version(
        self, model: str, version: str, exported_at_s: float, loaded_at_s: float
    ) -> None:
        """Set which version answers from now on."""
        if self._answering is not None:
            self.version.labels(*self._answering).set(0)
            self._answering = None
        self.exported.set(exported_at_s)
        self.loaded.set(loaded_at_s)
        self.refused.set(0)
        try:
            self.version.labels(model, version).set(1)
        except GMetaError as error:  # it serves all the same
            event(logging.ERROR, "version_not_measured", version=version, message=str(error))
        else:
            self._answering = (model, version)

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics and their content type, in the format that the scraper asks for."""
        encode, content_type = choose_encoder(accept)
        counted: Any = self.registry
        # This worker answers for all: a scraper reaches any of them.
        if MULTIPROCESS_DIR in os.environ:
            counted = MultiProcessCollector(None)
        return encode(_CurrentMetrics(counted)), content_type


@dataclass
class _CurrentMetrics:
    """Metrics without the versions that serve no more."""

    counted: Any

    def collect(self) -> Iterator[Metric]:
        for metric in self.counted.collect():
            # prometheus_client forgets no label, and a server may serve thousands of versions.
            metric.samples = [one for one in metric.samples if one.value or one.name != _VERSION]
            yield metric


def share_metrics() -> None:
    """Keep the metrics made from now on in the folder MULTIPROCESS_DIR, if it is set."""
    # prometheus_client itself looks at the variable only when it is imported.
    values.MmapedDict = _ReservedFile  # type: ignore[attr-defined]
    values.ValueClass = values.get_value_class()


@final
class _ReservedFile(MmapedDict):  # type: ignore[misc]
    """A file of metrics whose disk space is reserved. Raise GMetaError where there is none."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        try:
            with open(filename, "ab") as file:
                # prometheus_client leaves holes, and writing into one on a full disk kills the
                # process.
                _reserve(file.fileno(), filename, _FILE_BYTES)
        except GMetaError:  # this worker never serves, and half a file cannot be read
            for left in Path(filename).parent.glob(f"*_{os.getpid()}.db"):
                left.unlink()
            raise
        super().__init__(filename, read_mode)

    def _init_value(self, key: str) -> None:
        if self._used + _SAMPLE_BYTES > self._capacity:
            # prometheus_client is about to double the file.
            _reserve(self._f.fileno(), self._fname, 2 * self._capacity)
        super()._init_value(key)


def _reserve(descriptor: int, name: str, num_bytes: int) -> None:
    with translate_storage_errors(f"cannot keep metrics in {name}", NO_ROOM):
        os.posix_fallocate(descriptor, 0, num_bytes)
