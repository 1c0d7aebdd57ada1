"""The live page of the service: one file without outside requests, fed by server-sent events."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any, final

from gmeta.access.errors import RefusedError
from gmeta.access.http_edge import HttpRequest
from gmeta.antdt.ledger.ledger import Ledger
from gmeta.antdt.manifests.audit import audit_manifest
from gmeta.antdt.manifests.shard_manifest import parse_manifest
from gmeta.antdt.metric_readings import Curves, RunReport
from gmeta.antdt.model import MAX_EPOCHS, Checkpoint
from gmeta.antdt.phase import present_workers
from gmeta.antdt.reports import SHARD_STATES, SPENT, STRAGGLERS, WorkerHealth
from gmeta.antdt.rpc import operator_views as views
from gmeta.antdt.storage.request import LedgerView, Request
from gmeta.antdt.stragglers.governor import Governor, RulingRecord
from gmeta.platform.pages.page_kit import read_scripted_page

EVERY_S = 1.0
MAX_WATCHERS = 16  # each holds a thread
# The slowest first; a page of a thousand rows helps nobody.
MAX_WORKERS = 60
MAX_DECISIONS = 40
SPARK_POINTS = 60
MAX_SHARE_LINES = 8  # more lines than colours and dashes tell apart
# The page is one file of ours: nothing else may run in it or be fetched by it.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@final
class Dashboard:
    """`page` and `events` are routes of the service's HTTP address."""

    def __init__(self, ask: Callable[[Request], Any], governor: Governor) -> None:
        self._ask = ask
        self._governor = governor
        self._page = read_scripted_page(__package__).encode()
        self._places = threading.Semaphore(MAX_WATCHERS)
        self._closing = threading.Event()
        self._auditing = threading.Lock()
        self._audited: tuple[str, dict[str, Any] | None] = ("", None)  # by digest

    def close(self) -> None:
        """End the streams."""
        self._closing.set()

    def page(self, request: HttpRequest) -> None:
        """Answer GET / with the page and the present state."""
        # In the page itself, so that it can be read before the first event.
        now = json.dumps(self.document()).replace("<", "\\u003c")  # as it stands inside <script>
        request.send(
            200,
            self._page.replace(b"NOW", now.encode(), 1),
            {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"},
            "text/html; charset=utf-8",
        )

    def events(self, request: HttpRequest) -> None:
        """Answer GET /events with the present state, again and again, once a second."""
        # Each open page holds a thread for as long as it is open.
        if not self._places.acquire(blocking=False):
            return request.send(503, f"{MAX_WATCHERS} pages are open; close one\n")
        try:
            request.send_response(200)
            request.send_header("Content-Type", "text/event-stream")
            request.send_header("Cache-Control", "no-store")
            request.end_headers()
            # Asked before each event: a token may have been withdrawn meanwhile.
            while request.command == "GET" and not self._closing.is_set() and request.may_look():
                request.wfile.write(f"data: {json.dumps(self.document())}\n\n".encode())
                self._closing.wait(EVERY_S)
        except OSError:
            pass  # the page was closed
        finally:
            self._places.release()
        return None

    def document(self) -> dict[str, Any]:
        """Return all that the page shows, or why the service cannot answer."""
        governor = self._governor
        health = governor.health
        slow = {name for name, found in health.items() if found.verdict in STRAGGLERS}
        try:
            status, num_workers, newest, curves, elapsed_s, run = self._ask(
                LedgerView(partial(_read_ledger, slow | governor.silent))
            )
        except RefusedError as error:
            return {"trouble": str(error)}
        left = sum(d.spec.units_per_shard * (d.todo + d.doing) for d in status.datasets)
        # A service that was started again knows the steps from what was reported before.
        step = max([governor.step, *(points[-1][0] for points in curves.values())])
        rows = self._workers(status, health)
        monitor = governor.config.monitor
        return {
            "time_s": time.time(),
            "job": status.job,
            "generation": status.run_generation,
            "service_epoch": status.service_epoch,
            "draining": status.draining,
            "policy": governor.config.controller.policy,
            "dry_run": governor.config.controller.dry_run,
            "step": step,
            "run": run and run._asdict(),
            "tasks_per_s": governor.tasks_per_s,
            "elapsed_s": elapsed_s,
            "left_s": left / governor.tasks_per_s if governor.tasks_per_s else None,
            "job_left_s": self._job_left_s(status.datasets, left, run, step),
            "slow_ratio": monitor.slow_ratio,
            "recovered_ratio": monitor.recovered_ratio,
            "floor_ms": monitor.floor_ms,
            "short_windows": [monitor.short_slow, monitor.short_windows],
            "phase": governor.phase,
            "num_workers": num_workers,
            "num_silent": len(governor.silent),
            "num_stragglers": len(slow - governor.silent),
            "datasets": [_dataset(dataset) for dataset in status.datasets],
            "workers": rows,
            "shares": self._shares([row["name"] for row in rows[:MAX_SHARE_LINES]]),
            "decisions": _newest_decisions(governor.ruling_records),
            "checkpoints": [
                {"id": c.checkpoint_id, "step": c.step, "committed": c.committed}
                for c in reversed(status.checkpoints)
            ],
            "audit": self._audit(newest),
            "curves": curves,
        }

    def _job_left_s(
        self, datasets: Iterable[Any], left: int, run: RunReport | None, step: int
    ) -> float | None:
        """Return the time left of all epochs; None where nobody said how many there are."""
        governor = self._governor
        if not governor.tasks_per_s:
            return None
        if run is not None and run.total_steps and governor.tasks_per_step:
            return max(0, run.total_steps - step) * governor.tasks_per_step / governor.tasks_per_s
        if any(d.spec.num_epochs >= MAX_EPOCHS for d in datasets):
            return None
        for d in datasets:
            left += d.spec.units_per_shard * d.num_shards * (d.spec.num_epochs - d.epoch - 1)
        return left / governor.tasks_per_s

    def _shares(self, names: list[str]) -> dict[str, Any]:
        """Return the times of changes, and each worker's tasks a step from then on."""
        # Copied in one go: the governor's thread adds to them meanwhile.
        changes = list(self._governor.share_changes)
        return {
            "times_s": [round(wall_s, 1) for wall_s, _ in changes],
            "tasks": {name: [shares.get(name, 0) for _, shares in changes] for name in names},
        }

    def _audit(self, newest: Checkpoint | None) -> dict[str, Any] | None:
        """Return the audit of the newest checkpoint."""
        if newest is None:
            return None
        # Once for each checkpoint, and not in the writer's thread: a large manifest takes long.
        with self._auditing:
            if self._audited[0] != newest.digest:
                report = audit_manifest(parse_manifest(newest.manifest_json))
                audit = {"id": newest.checkpoint_id, "ok": report.ok, "lines": report.lines}
                self._audited = (newest.digest, audit)
            return self._audited[1]

    def _workers(self, status: Any, health: dict[str, WorkerHealth]) -> list[dict[str, Any]]:
        shares = self._governor.controller.shares
        rows = []
        for worker in status.workers:
            name = worker.worker_id
            # The state of a worker before it fell silent says nothing about now.
            is_silent = name in self._governor.silent
            unknown = WorkerHealth(name, "unknown")
            worker_health = unknown if is_silent else health.get(name, unknown)
            report = worker.report
            rows.append(
                {
                    "name": name,
                    "verdict": "silent" if is_silent else worker_health.verdict,
                    "cause": worker_health.cause,
                    "ratio": worker_health.ratio,
                    "tasks_per_s": worker_health.tasks_per_s,
                    "evidence": worker_health.evidence,
                    "slow_for_s": worker_health.slow_for_s,
                    "share": report.share or shares.get(name, 0),
                    "step": report.step,
                    "leases": worker.num_leases,
                    "silent_s": worker.silent_ms / 1000 if worker.HasField("silent_ms") else None,
                    "draining": worker.draining,
                    "split_ms": [getattr(report, f"{spent}_ms") for spent in SPENT],
                    "speeds": [
                        round(speed, 1)
                        for speed in list(self._governor.speeds.get(name, ()))[-SPARK_POINTS:]
                    ],
                }
            )
        # Sorted before it is cut: the slow ones are what the page is for.
        first = (*STRAGGLERS, "silent")
        rows.sort(key=lambda row: (row["verdict"] not in first, -row["ratio"], row["name"]))
        return rows[:MAX_WORKERS]


def _read_ledger(
    slow: Set[str], ledger: Ledger, now_s: float
) -> tuple[Any, int, Checkpoint | None, Curves, float, RunReport | None]:
    newest = next(reversed(ledger.state.checkpoints.values()), None)
    # Sorted before they are cut: of thousands, the page is for the slow and the silent.
    names = sorted(present_workers(ledger), key=lambda name: (name not in slow, name))
    status, elapsed_s = views.status(ledger, now_s, names), now_s - ledger.started_s
    state = ledger.state
    return status, len(names), newest, state.readings.curves(), elapsed_s, state.run


def _newest_decisions(spoken: Iterable[RulingRecord]) -> list[dict[str, Any]]:
    """Return the newest decisions, the newest first."""
    # Copied in one go: the governor's thread adds to them meanwhile.
    return [decision._asdict() for decision in list(spoken)[: -MAX_DECISIONS - 1 : -1]]


def _dataset(dataset: Any) -> dict[str, Any]:
    return {
        "name": dataset.spec.name,
        "epoch": dataset.epoch,
        "num_shards": dataset.num_shards,
        "finished": dataset.finished,
        "backed_up": [
            [shard.shard_index, shard.worker_id, shard.backup_worker_id]
            for shard in dataset.backed_up
        ],
        **{state: getattr(dataset, state) for state in SHARD_STATES},
    }
