"""A worker's side of AntDT: totals for the monitor, and the newest plan for its batches."""

import logging
from collections.abc import Callable
from typing import NamedTuple, final

from gmeta.access.errors import RefusedError
from gmeta.antdt.client.client import ShardClient
from gmeta.antdt.reports import Report
from gmeta_protos.antdt.v1 import shard_service_pb2 as pb

_log = logging.getLogger("gmeta.antdt.agent")


# The agent has no clock and no collectives: the trainer passes in what it measured, and says when
# all ranks hold the same plan.
CHANGE_RATIO = 1.5  # of own time per task, up or down: worth a report at once
CHANGE_AFTER_S = 0.5  # time over which it is measured: one step may be a hiccup


class BatchPlan(NamedTuple):
    """Tasks and micro-batches of this worker in each step; a later version is newer."""

    version: int
    tasks: int
    micro_batches: int
    action_id: str = ""


@final
class WorkerAgent:
    """Reports steps and sorts the actions that heartbeats bring."""

    def __init__(
        self, client: ShardClient, share: int, restart: Callable[[], str], micro_batches: int = 1
    ) -> None:
        """Watch one client. `restart` has this process started again, or returns why it cannot."""
        self._client = client
        self._restart = restart
        self._seen: set[str] = set()
        self.totals = Report()
        self.plan = BatchPlan(0, share, micro_batches)  # in force
        self.newest = self.plan
        self._looked_at = Report()  # the totals when the speed was last looked at
        self._usual_ms = 0.0  # own time per task
        client.report(self.totals, share)

    def count_step(
        self,
        num_tasks: int,
        compute_ms: float,
        data_wait_ms: float,
        communication_ms: float,
        peer_wait_ms: float,
    ) -> bool:
        """Count one more step. Return whether this worker became much slower or faster."""
        step = Report(1, num_tasks, compute_ms, data_wait_ms, communication_ms, peer_wait_ms)
        self.totals = self.totals.plus(step)
        self._client.report(self.totals, self.plan.tasks)
        # Then the trainer hurries the report: nobody should wait for the next heartbeat.
        return self._has_changed_pace()

    def _has_changed_pace(self) -> bool:
        news = self.totals.since(self._looked_at)
        own_ms = sum(news.own_ms)
        if not news.tasks_done or own_ms + news.peer_wait_ms < 1000 * CHANGE_AFTER_S:
            return False
        now_ms, usual_ms = own_ms / news.tasks_done, self._usual_ms
        self._looked_at, self._usual_ms = self.totals, now_ms
        return usual_ms > 0 and not usual_ms / CHANGE_RATIO < now_ms < usual_ms * CHANGE_RATIO

    def take_actions(self) -> None:
        """Take in the actions since the last call; a plan waits in `newest` for all ranks."""
        for action in self._client.take_actions():
            # A heartbeat brings an open action again and again: it is taken in once.
            if action.action_id in self._seen:
                continue
            self._seen.add(action.action_id)
            if action.kind == pb.Action.KIND_ADJUST_BS:
                self._note_plan(action)
            elif action.kind == pb.Action.KIND_KILL_RESTART:
                refusal = self._restart()
                self._answer(action.action_id, "REFUSED" if refusal else "APPLIED", refusal)
            else:
                name = pb.Action.Kind.Name(action.kind).removeprefix("KIND_")
                refusal = f"this trainer does not do {name}: a step always has as many tasks"
                self._answer(action.action_id, "REFUSED", refusal)

    def adopt(self, plan: BatchPlan) -> None:
        """Put a plan that all ranks hold in force, from the step that they agreed on."""
        self.plan = plan
        self._answer(plan.action_id, "APPLIED", "")

    def _note_plan(self, action: pb.Action) -> None:
        plan = BatchPlan(
            _order_of_action(action.action_id),
            int(action.parameters["tasks"]),
            max(1, int(action.parameters["micro_batches"])),
            action.action_id,
        )
        if plan.version > self.newest.version:
            self.newest = plan

    def _answer(self, action_id: str, result: str, message: str) -> None:
        _log.info("action %s: %s %s", action_id, result.lower(), message)
        try:
            self._client.ack_action(action_id, result, message)
        except RefusedError as error:
            # A newer plan has replaced it since the heartbeat that brought it, or a restart of the
            # ranks has ended it. Training goes on with its present plan until the newer one comes.
            if error.reason != "UNKNOWN_ACTION":
                raise
            _log.info("action %s: %s", action_id, error)


def _order_of_action(action_id: str) -> int:
    """Return the order of "SERVICE_EPOCH.GENERATION.NUMBER": it rises with each plan."""
    service_epoch, _, number = (int(part) for part in action_id.split("."))
    # Plans of one service start are numbered from 1, so a later start comes above all of them.
    return (service_epoch << 32) | number
