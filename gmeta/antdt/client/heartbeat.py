"""The heartbeat of a client: a thread that renews the leases, sends reports and fetches actions."""

import logging
import threading
import time
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, final

from gmeta.access.errors import AntdtError
from gmeta.antdt.errors import FencedError
from gmeta.antdt.metric_readings import MAX_FOLDER_CHARS, MAX_READINGS_PER_CALL, MAX_VALUES
from gmeta.antdt.model import MAX_NAME_CHARS
from gmeta.antdt.reports import Report
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb

# For types alone: at run time it would lengthen the longest chain of imports.
if TYPE_CHECKING:
    from gmeta.antdt.client.held_leases import HeldLeases
    from gmeta.antdt.client.session import Session

_log = logging.getLogger("gmeta.antdt.client")

DECIDED_AFTER_S = 0.5  # the controller's answer to reports that all workers hurried


@final
class HeartbeatSender:
    """Beats until the session is closed, or the process is fenced."""

    def __init__(self, session: "Session", leases: "HeldLeases") -> None:
        self._session = session
        self._leases = leases
        self._report: Any = None
        self._readings: list[Any] = []  # that no heartbeat has delivered yet
        self._run: Any = None  # likewise
        self._beat_again_s = 0.0  # the pause after a hurried heartbeat
        self._actions: list[Any] = []
        self._lock = threading.Lock()
        # Held during a beat, and while a generation begins: a beat that left before that and
        # arrived after it would be of the past, and fence this process.
        self.beating = threading.Lock()
        self._due = threading.Event()  # the next one is due now
        self._thread = threading.Thread(
            target=self._beat_until_closed, name="antdt-heartbeat", daemon=True
        )
        self._thread.start()

    def set_report(self, report: Report, share: int) -> None:
        """Set the report of the next heartbeat."""
        is_first = self._report is None
        self._report = pb.WorkerReport(**report._asdict(), share=share)
        # Else it would wait for the next beat for the leases, up to a third of the ttl.
        if is_first:
            self._due.set()

    def add_reading(self, step: int, values: Mapping[str, float]) -> None:
        """Add a reading to the next heartbeat, which takes only the newest ones."""
        # For one name too long the service would refuse the whole call, which renews the leases.
        short_names = iter((name, x) for name, x in values.items() if len(name) <= MAX_NAME_CHARS)
        with self._lock:
            # The service puts the parts of a step together.
            while part := dict(islice(short_names, MAX_VALUES)):
                self._readings.append(pb.Reading(step=step, values=part, wall_s=time.time()))
            del self._readings[:-MAX_READINGS_PER_CALL]

    def set_run(self, status: str, folder: str, total_steps: int) -> None:
        """Set what the next heartbeat says of the run."""
        number = pb.RunReport.Status.Value(f"STATUS_{status}")
        # A path may hold bytes that are no text; for one too long the whole call would be refused.
        folder = folder.encode(errors="replace").decode()[:MAX_FOLDER_CHARS]
        with self._lock:
            self._run = pb.RunReport(
                status=number, folder=folder, total_steps=total_steps, wall_s=time.time()
            )

    def hurry(self) -> None:
        """Wake the thread, so that it beats now and again soon."""
        self._beat_again_s = DECIDED_AFTER_S
        self._due.set()

    def take_actions(self) -> list[Any]:
        """Return the actions that came since the last call."""
        with self._lock:
            actions, self._actions = self._actions, []
        return actions

    def join(self) -> None:
        """Wait for the thread to end; the session must be closed."""
        self._due.set()
        self._thread.join()

    def _beat_until_closed(self) -> None:
        is_last = False
        while not is_last:
            self._due.wait(self._pause_s())
            self._due.clear()
            # If it was closed during the last beat, that may have missed the newest readings.
            is_last = self._session.closed.is_set()
            if is_last and not self._readings and self._run is None:
                return
            try:
                self.beat()
            except FencedError:
                return  # the session has noted it: the next call raises it
            except AntdtError as error:
                _log.warning("heartbeat: %s", error)

    def _pause_s(self) -> float:
        if self._beat_again_s:
            pause_s, self._beat_again_s = self._beat_again_s, 0.0
            return pause_s
        session = self._session
        if self._report is None or not session.report_every_s:
            # One beat may fail altogether: the next comes at two thirds, a lease is used up to 0.8.
            return session.ttl_s / 3
        return min(session.ttl_s / 3, session.report_every_s)

    def beat(self) -> None:
        """Send one heartbeat. Raise FencedError, RefusedError or ServiceUnavailableError."""
        with self.beating:
            # Taken before the call: the service counts the ttl from a later moment.
            report, sent_s, tokens = self._report, time.monotonic(), self._leases.tokens()
            with self._lock:
                readings, run = list(self._readings), self._run
            # No longer than until the next beat is due.
            budget_s = None if self._session.closed.is_set() else self._session.ttl_s / 3
            fields = {"tokens": tokens, "report": report, "readings": readings, "run": run}
            response = self._session.call("Heartbeat", budget_s=budget_s, **fields)
            self._session.apply_renewal(sent_s, tokens, set(response.revoked_tokens))
            with self._lock:
                self._run = None if self._run is run else self._run
                self._readings = [reading for reading in self._readings if reading not in readings]
                # An action comes with every beat until it is answered.
                known_ids = {action.action_id for action in self._actions}
                self._actions += [a for a in response.actions if a.action_id not in known_ids]
