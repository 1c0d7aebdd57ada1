"""What HTTP and gRPC share: a request's way to its answer, and the exchange of the version."""

import asyncio
import gc
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

from gmeta.access.log import event
from gmeta.errors import GMetaError, UserError
from gmeta.platform.files.local_paths import is_url
from gmeta.platform.files.tensor_files import ChangedFileError
from gmeta.runs.environment import package_versions
from gmeta.serving.channel.current_version import translate_access_errors
from gmeta.serving.channel.load_failure import LoadFailure
from gmeta.serving.server.access import ServerAccess
from gmeta.serving.server.batcher import Batcher
from gmeta.serving.server.compute import answer_all
from gmeta.serving.server.inference_protocol import (
    EXTENSIONS,
    InferenceAnswer,
    InferenceRequest,
    Outcome,
    Stage,
    model_metadata,
)
from gmeta.serving.server.model_trial import failure_error, try_model
from gmeta.serving.server.request_errors import CallerLeftError, RequestError, defect_error
from gmeta.serving.server.serve_config import ServeConfig
from gmeta.serving.server.server_limits import LARGE_BYTES, HeldBytes
from gmeta.serving.server.server_metrics import ServerMetrics
from gmeta.serving.server.task_cache import TaskCache
from gmeta.serving.server.tracing import Tracing
from gmeta.serving.server.versions import LoadedModel, check_successor, version_in
from gmeta_keys.translate_errors import translate_errors
from metaio.errors import MetaIOError

_STUCK_AFTER_S = 60.0
CALLER_LEFT = 499  # before the answer: nginx's number, since HTTP has none


@final
class InferenceService:
    """One model that answers requests, read by `load`; `ready` is false while it drains."""

    def __init__(
        self,
        config: ServeConfig,
        load: Callable[[Path | str, bool], LoadedModel],
        cache: TaskCache,
        metrics: Callable[[], ServerMetrics],
        access: ServerAccess,
        tracing: Tracing,
    ) -> None:
        self.config = config
        self.access = access
        self.tracing = tracing
        self.ready = True
        self.loaded = load(config.folder, config.verify)
        # Made last: each worker has metrics files of its own, which would stay if loading failed.
        self.metrics = metrics()
        self._load_failure = LoadFailure()
        self._is_away = False  # no version could be seen at the last look
        self._load = load
        self._cache = cache
        self.turned_s = math.inf  # when the event loop was seen to turn
        self._held = HeldBytes(config.limits)
        self._parser = ThreadPoolExecutor(1, "serve-parse")  # objects take many times the bytes
        self._batcher = Batcher(self._run, config.batch, self.metrics.observe_batch)
        self._report_version()

    @property
    def refused(self) -> tuple[str, str] | None:
        """Return a version that does not serve, and why; None where the newest does."""
        return self._load_failure.failure

    @property
    def is_stuck(self) -> bool:
        """Return whether a batch or a turn of the loop takes far longer than any caller waits."""
        longest_s = max(self._batcher.busy_s, time.perf_counter() - self.turned_s)
        return longest_s > _STUCK_AFTER_S + self.config.batch.timeout_s

    def warm_up(self) -> None:
        """Compute once: the first request must not pay for what torch does once. Raise GMetaError
        for a model that does not answer."""
        try_model(self.loaded.model, self.config.batch.timeout_s)
        _freeze_garbage()

    def stop(self) -> None:
        """Take no more requests."""
        self._batcher.stop()
        self._parser.shutdown(wait=False)
        self.tracing.stop()

    def _run(self, requests: Sequence[InferenceRequest]) -> list[Outcome]:
        # Taken once: a batch is answered by one version, whatever comes meanwhile.
        loaded = self.loaded
        stages, traffic = list[Stage](), self.metrics.traffic

        def observe(stage: str, seconds: float) -> None:
            self.metrics.observe_stage(stage, seconds)
            ended_s = time.perf_counter()
            stages.append(Stage(stage, ended_s - seconds, ended_s))

        try:
            outcomes = answer_all(
                loaded.model, loaded.version, self._cache, requests, observe, traffic
            )
        except ChangedFileError as error:  # until a whole version is there
            return [RequestError(503, str(error), retry_after_s=1) for _ in requests]
        for request, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, InferenceAnswer):
                outcome.stages.extend(stages)
            if request.task_key is not None or request.state is not None:
                if isinstance(outcome, InferenceAnswer):
                    self.metrics.cache.labels(outcome.cache).inc()
                elif outcome.status == 404:
                    self.metrics.cache.labels("miss").inc()
        return outcomes

    async def infer(
        self,
        protocol: str,
        model: str,
        version: str,
        carrier: dict[str, str],
        peer: str,
        check: Callable[[], None],
        read: Callable[[Callable[[int], None]], Awaitable[InferenceRequest]],
    ) -> tuple[InferenceRequest, InferenceAnswer]:
        """Return a request and its answer, counted, logged and traced. `read` tells how many bytes
        it holds. Raise RequestError."""
        # 500 unless something better is known: a defect counts too.
        began_s, status, num_rows, message = time.perf_counter(), 500, 0, ""
        try:
            check()
            with self.tracing.span(protocol, carrier) as span, self._held.share() as hold:
                self.check_model(model, version)
                with (
                    self._batcher.reading(),
                    translate_errors(defect_error, RequestError, CallerLeftError),
                ):
                    request = await read(hold)
                num_rows = request.num_rows
                parsed_s = time.perf_counter()
                self.metrics.observe_stage("parse", parsed_s - began_s)
                answer = await self._batcher.answer(request)
                # A newer one may have come while the request waited.
                if version and version != answer.version:
                    self.check_model(model, version)
                span.set_attributes(rows=num_rows, version=answer.version, cache=answer.cache)
                queue = Stage("queue", parsed_s, answer.stages[0].began_s)
                span.add_stages([Stage("parse", began_s, parsed_s), queue, *answer.stages])
                status = 200
                return request, answer
        except RequestError as error:
            status, message = error.status, str(error)
            raise
        except (asyncio.CancelledError, CallerLeftError):
            status = CALLER_LEFT
            raise
        finally:
            # Also what was refused or left: an error rate needs every request.
            self.note_answer(protocol, status, began_s, num_rows, peer, message)

    def note_answer(
        self, protocol: str, status: int, began_s: float, num_rows: int, peer: str, message: str
    ) -> None:
        """Count and log an answer, or a refusal with its message."""
        self.metrics.count_answer(protocol, status, began_s)
        if self.config.access_log:
            ms = round((time.perf_counter() - began_s) * 1000, 2)
            fields = {"protocol": protocol, "status": status, "ms": ms, "rows": num_rows}
            why = {"message": message} if message else {}
            event(logging.INFO, "infer", **fields, peer=peer, **why)

    async def parse(
        self, num_bytes: int, parse: Callable[[], InferenceRequest]
    ) -> InferenceRequest:
        """Return what `parse` does; of large requests one at a time, while others are answered."""
        if num_bytes <= LARGE_BYTES:
            return parse()
        return await asyncio.get_running_loop().run_in_executor(self._parser, parse)

    def check_model(self, name: str, version: str) -> None:
        """Raise RequestError unless this is the model and the version that answers."""
        if name != self.config.name:
            raise RequestError(
                404, f"model {name[:80]!r} is not served here; {self.config.name} is. Correct it"
            )
        # An empty version is whichever answers.
        if version and version != self.loaded.version:
            raise RequestError(
                404,
                f"version {version[:40]!r} of {name} is not served; {self.loaded.version} is. "
                "Leave the version out for the one that is",
            )

    def server_metadata(self) -> dict[str, Any]:
        """Return the server's metadata as the protocol's JSON has it."""
        return {"name": "gmeta", "version": package_versions()["gmeta"], "extensions": EXTENSIONS}

    def model_metadata(self) -> dict[str, Any]:
        """Return the model's metadata as the protocol's JSON has it."""
        return model_metadata(self.config.name, self.loaded.version, self.loaded.columns)

    def status(self) -> dict[str, Any]:
        """Return what goes on in this process."""
        refused = self.refused and dict(zip(("version", "reason"), self.refused, strict=True))
        return {
            "model": self.config.name,
            "version": self.loaded.version,
            "exported_at_s": self.loaded.exported_at_s,
            "loaded_at_s": self.loaded.loaded_at_s,
            "refused": refused,
            "ready": self.ready,
            "waiting": self._batcher.num_waiting,
            "cached_tasks": len(self._cache),
            "cached_bytes": self._cache.num_bytes,
        }

    def measure(self) -> None:
        """Set the gauges of what is now."""
        self.metrics.waiting.set(self._batcher.num_waiting)
        self.metrics.cache_tasks.set(len(self._cache))
        self.metrics.cache_bytes.set(self._cache.num_bytes)
        self.metrics.cache_unshared.set(self._cache.num_unshared)

    async def watch(self) -> None:
        """Serve newer versions as they come, until cancelled."""
        while True:
            await asyncio.sleep(self.config.reload_every_s)
            # Reading and checking tables takes seconds, in which requests are answered.
            await asyncio.to_thread(self.reload)

    def reload(self) -> bool:
        """Serve the version that is in the folder now; return whether it is a new one."""
        folder, before = self.config.folder, self.loaded
        try:
            with translate_access_errors(folder):
                version = version_in(folder)
        except (GMetaError, MetaIOError) as error:
            # While an export is replaced its folder may be missing for a moment: reported only if
            # two looks in a row miss it.
            if is_url(folder) or not isinstance(error, UserError) or self._is_away:
                self._refuse("", error)
            self._is_away = True
            return False
        self._is_away = False
        # It may be whole again under the same name, and be mapped half changed.
        is_changed = before.model.files.find_changed() is not None
        if version == before.version and not is_changed:
            self._load_failure.clear()  # the old one was put back
            self.metrics.refused.set(0)
            return False
        # Nothing answers meanwhile where files were changed: it is looked at again and again.
        if not is_changed and self._load_failure.is_backing_off(version):
            return False
        try:
            # Any error: a look that ends by one would be the last.
            passing = GMetaError, MetaIOError
            with translate_errors(failure_error, *passing), translate_access_errors(folder):
                loaded = self._load(folder, self.config.verify)
                check_successor(before, loaded.model.config, loaded.version)
                # What fails here fails before anybody asks.
                try_model(loaded.model, self.config.batch.timeout_s)
        except (GMetaError, MetaIOError) as error:
            self._refuse(version, error)
            return False
        self.loaded = loaded
        self._load_failure.clear()
        # Support rows stay: a task adapts anew with its next request.
        self._cache.forget_states(loaded.version)
        self.metrics.reloads.labels("loaded").inc()
        self._report_version()
        event(logging.INFO, "model_reloaded", version=loaded.version, before=before.version)
        # Modules and their hooks are cycles: uncollected, they keep the old tables mapped.
        del before
        gc.unfreeze()
        _freeze_garbage()
        return True

    def _refuse(self, version: str, error: Exception) -> None:
        self.metrics.refused.set(1)
        if not self._load_failure.note_failure(version, error):
            return
        self.metrics.reloads.labels("refused").inc()
        kept = {"serving": self.loaded.version, "folder": str(self.config.folder)}
        event(logging.ERROR, "model_refused", version=version, **kept, message=str(error))

    def _report_version(self) -> None:
        now, name = self.loaded, self.config.name
        self.metrics.set_version(name, now.version, now.exported_at_s, now.loaded_at_s)


def _freeze_garbage() -> None:
    """Collect garbage, and keep what is left out of later collections."""
    gc.collect()
    # A full collection would stop all requests for 0.2 s, mostly to walk over torch.
    gc.freeze()
