"""From verdicts to actions: runs a policy on a snapshot, applies budgets, logs its decisions.
`rule` is pure, so a logged snapshot gives the same rulings again: `gmeta sim replay`."""

import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple, final

from gmeta.access.errors import AntdtError
from gmeta.antdt.policies.interface import ControllerConfig, Decision, Policy, Snapshot, WorkerView
from gmeta.antdt.policies.task_split import proportional_split
from gmeta.antdt.reports import WorkerHealth
from gmeta.errors import UserError
from gmeta_keys.translate_errors import translate_errors

HOUR_S = 3600.0
SLOW_SHARE, USUAL_SHARE = 0.8, 0.9  # of the mean share: below, tasks were taken; above, given back
REGRET_WINDOWS = 12  # half a minute, as windows are by default
_GLOBAL = ("ADJUST_BS", "ADJUST_LR")
_OF_A_WORKER = ("BACKUP_WORKERS", "KILL_RESTART", "EXCLUDE")


class PolicyError(AntdtError, UserError):
    """A user's policy raised, or returned something that makes no sense."""


class Ruling(NamedTuple):
    """A decision, whether it is carried out, and if not, why."""

    decision: Decision
    allowed: bool
    note: str = ""


def rule(snapshot: Snapshot, config: ControllerConfig, policy: Policy) -> list[Ruling]:
    """Return the policy's decisions, each allowed or held back. Raise PolicyError."""
    # A policy may be the user's own code, and raise anything.
    with translate_errors(
        lambda error: PolicyError(
            f"policy {config.policy!r} failed: {error!r}. Mend it, or set controller.policy to "
            "nd, dd or none"
        )
    ):
        decisions = [_to_plain_values(decision) for decision in policy(snapshot, config)]
    rulings = []
    restarts = snapshot.restarts_last_hour
    backed_up = {worker.health.worker_id for worker in snapshot.workers if worker.backed_up}
    for decision in decisions:
        if decision.kind == "NONE":
            continue
        refusal = _refusal(decision, snapshot, config, restarts, backed_up)
        if config.dry_run and not refusal:
            refusal = "dry run"
        rulings.append(Ruling(decision, not refusal, refusal))
        # Decisions of one evaluation share the budgets.
        restarts += decision.kind == "KILL_RESTART" and not refusal
        if decision.kind == "BACKUP_WORKERS" and not refusal:
            backed_up.add(decision.worker_id)
    return rulings


def _to_plain_values(decision: Decision) -> Decision:
    """Return a decision of plain values. Raise ValueError for a number that is not finite."""
    # A policy may return another library's numbers, which cannot be logged or posted.
    parameters = {str(name): float(n) for name, n in decision.parameters.items()}
    if not all(map(math.isfinite, parameters.values())):
        raise ValueError(f"{decision.kind} has a parameter that is no finite number: {parameters}")
    kind, worker_id, reason = map(str, (decision.kind, decision.worker_id, decision.reason))
    return Decision(kind, worker_id, parameters, reason)  # type: ignore[arg-type]


def _refusal(
    decision: Decision,
    snapshot: Snapshot,
    config: ControllerConfig,
    restarts: int,
    backed_up: Set[str],
) -> str:
    """Return why the decision is held back; empty when it may go."""
    workers = {worker.health.worker_id: worker for worker in snapshot.workers}
    if decision.kind not in _GLOBAL + _OF_A_WORKER:
        return f"{decision.kind!r} is no action"
    if decision.kind in _OF_A_WORKER and decision.worker_id not in workers:
        return f"worker {decision.worker_id!r} is unknown"
    if decision.kind == "ADJUST_BS":
        return _shares_refusal(decision, snapshot, config, workers)
    if decision.kind == "ADJUST_LR" and not decision.parameters.get("factor", 0.0) > 0:
        return "ADJUST_LR needs a parameter 'factor' above 0"
    if decision.kind == "BACKUP_WORKERS":
        return _backup_refusal(workers[decision.worker_id], snapshot, config, backed_up)
    if decision.kind == "KILL_RESTART":
        allowed = config.restarts_per_hour(len(workers))
        if workers[decision.worker_id].restarts >= config.restarts_per_worker:
            return (
                "the worker may not be restarted again; restarts_per_worker is "
                f"{config.restarts_per_worker}"
            )
        if restarts >= allowed:
            return f"workers restarted within the hour: {restarts}; allowed: {allowed}"
    return ""


def _backup_refusal(
    worker: WorkerView, snapshot: Snapshot, config: ControllerConfig, backed_up: Set[str]
) -> str:
    if config.synchronous:
        return (
            "backup workers need a job in which the loser's work can be discarded; in a "
            "synchronous job both would be in the model"
        )
    if not worker.to_back_up:
        return (
            "the worker holds nothing that another may do too: only the last shards of a "
            "speculative dataset, each once"
        )
    others = len(backed_up - {worker.health.worker_id})
    allowed = max(1, int(config.backup_share * len(snapshot.workers)))
    if others >= allowed:
        return f"workers backed up now: {others}; allowed: {allowed}"
    return ""


def _shares_refusal(
    decision: Decision,
    snapshot: Snapshot,
    config: ControllerConfig,
    workers: Mapping[str, WorkerView],
) -> str:
    shares = decision.shares
    unknown = sorted(set(shares) - set(workers))
    if unknown:
        return f"worker {unknown[0]!r} is unknown"
    # A worker without tasks would keep the shards that it holds, and the epoch could not end.
    if any(n < 1 or n != int(n) for n in decision.parameters.values()):
        return "shares and micro-batches are whole numbers from 1"
    total = int(sum(shares.values()))
    if total != snapshot.tasks_per_step:
        return f"the shares add up to {total}, a step has {snapshot.tasks_per_step} tasks"
    held_s = snapshot.now_s - held_since_s(snapshot, decision)[1]
    if held_s < snapshot.hold_s:
        return (
            f"the same workers were to get fewer for {held_s:.1f} s; slowness passes quickly here, "
            f"so {snapshot.hold_s:.1f} s are asked for"
        )
    since_s = snapshot.now_s - snapshot.last_adjust_s
    if since_s < config.cooldown_s:
        return f"the shares were changed {since_s:.1f} s ago; cooldown_s is {config.cooldown_s:g}"
    return ""


def held_since_s(snapshot: Snapshot, decision: Decision) -> tuple[tuple[str, ...], float]:
    """Return whom all evaluations up to now wanted to give fewer tasks, and since when."""
    # On an even host noise slows now one worker, now another, each for a moment: balancing around
    # it is wrong by the time it takes effect. A straggler stays the same.
    now = {
        worker.health.worker_id
        for worker in snapshot.workers
        if decision.parameters.get(worker.health.worker_id, worker.tasks_per_step)
        < worker.tasks_per_step
    }
    same = now & set(snapshot.held)
    return (tuple(sorted(same or now)), snapshot.held_since_s if same else snapshot.now_s)


@final
class _Patience:
    """How long a change of batches is held back: longer, the more often one was soon taken back."""

    def __init__(self, window_s: float, most_windows: int) -> None:
        self._window_s, self._most_s = window_s, most_windows * window_s
        self.hold_s = 0.0
        self._lowered_s: dict[str, float] = {}  # when each worker was given fewer tasks

    def note_change(self, after: Mapping[str, int], now_s: float) -> None:
        """Take note of shares that were changed."""
        usual = sum(after.values()) / max(1, len(after))
        back = []
        for name, tasks in after.items():
            if tasks <= SLOW_SHARE * usual:
                self._lowered_s.setdefault(name, now_s)
            elif tasks >= USUAL_SHARE * usual and name in self._lowered_s:
                back.append(now_s - self._lowered_s.pop(name))
        # A worker that gets its tasks back this soon was slow for a moment: the change took effect
        # about when it became wrong. So an even host on which other work takes cores now and then
        # is left alone, and where slowness lasts no change waits.
        if back and min(back) < REGRET_WINDOWS * self._window_s:
            self.hold_s = min(max(2 * self.hold_s, self._window_s), self._most_s)
        elif back:
            self.hold_s = self.hold_s / 2 if self.hold_s > self._window_s else 0.0


@final
class Controller:
    """Remembers what was carried out; everything else comes from the monitor."""

    def __init__(
        self,
        config: ControllerConfig,
        policy: Policy,
        log: Callable[[str], object] | None = None,
        window_s: float = 0.0,
    ) -> None:
        """Begin with equal shares. `window_s` is the monitor's; 0: batches are changed at once."""
        self.config = config
        self.shares: dict[str, int] = {}
        self.excluded: set[str] = set()
        self._policy = policy
        # It gets one line for each evaluation with news: see `decide`.
        self._log = log
        self._restarts: dict[str, int] = {}
        self._restart_times_s: deque[float] = deque()
        self._patience = _Patience(window_s, config.hold_windows)
        self._last_adjust_s = float("-inf")
        self._held: tuple[tuple[str, ...], float] = ((), float("-inf"))
        self._verdicts: dict[str, str] = {}
        self._held_back: set[tuple[str, str]] = set()

    def snapshot(
        self,
        health: Mapping[str, WorkerHealth],
        step: int,
        tasks_per_step: int,
        remaining_s: float,
        now_s: float,
        backups: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> Snapshot:
        """Return what the policy will see; `backups` are (to back up, backed up) of workers."""
        while self._restart_times_s and self._restart_times_s[0] < now_s - HOUR_S:
            self._restart_times_s.popleft()
        names = sorted(health)
        # Somebody joined or left: the shares of other workers add up to another number of tasks.
        if set(self.shares) != set(names):
            self.shares = equal_shares(tasks_per_step, names)
        workers = tuple(
            WorkerView(
                health[name],
                self.shares[name],
                self._restarts.get(name, 0),
                name in self.excluded,
                *backups.get(name, (0, 0)),
            )
            for name in names
        )
        return Snapshot(
            now_s,
            step,
            workers,
            tasks_per_step,
            remaining_s,
            self._last_adjust_s,
            len(self._restart_times_s),
            *self._held,
            self._patience.hold_s,
        )

    def start_over(self) -> None:
        """Begin with equal shares again, as the ranks of a restarted job do."""
        self.shares = {}

    def decide(self, snapshot: Snapshot) -> list[Ruling]:
        """Rule on the snapshot, remember what is allowed, log news. Raise PolicyError."""
        rulings = rule(snapshot, self.config, self._policy)
        self._held = ((), float("-inf"))
        for decision, allowed, _ in rulings:
            if decision.kind == "ADJUST_BS" and not allowed:
                self._held = held_since_s(snapshot, decision)
            if allowed:
                self._note_allowed(decision, snapshot.now_s)
        verdicts = {worker.health.worker_id: worker.health.verdict for worker in snapshot.workers}
        held_back = {(str(d.kind), d.worker_id) for d, allowed, _ in rulings if not allowed}
        # All else replays to nothing, or to what was held back before, window after window: with
        # 1,000 workers, gigabytes a day.
        is_news = any(ruling.allowed for ruling in rulings) or verdicts != self._verdicts
        if self._log is not None and (is_news or held_back != self._held_back):
            self._log(log_line(snapshot, rulings))
        self._verdicts, self._held_back = dict(verdicts), held_back
        return rulings

    def _note_allowed(self, decision: Decision, now_s: float) -> None:
        if decision.kind == "ADJUST_BS":
            self._last_adjust_s = now_s
            shares = {name: int(n) for name, n in decision.shares.items()}
            self._patience.note_change(shares, now_s)
            self.shares.update(shares)
        elif decision.kind == "KILL_RESTART":
            self._restarts[decision.worker_id] = self._restarts.get(decision.worker_id, 0) + 1
            self._restart_times_s.append(now_s)
        elif decision.kind == "EXCLUDE":
            self.excluded.add(decision.worker_id)


def equal_shares(total: int, names: Sequence[str]) -> dict[str, int]:
    """Return the shares that every job begins with."""
    if not names:
        return {}
    shares = proportional_split(total, [1.0] * len(names), 0)
    return dict(zip(names, shares, strict=True))


def log_line(snapshot: Snapshot, rulings: Sequence[Ruling]) -> str:
    """Return one evaluation with its inputs, as JSON."""
    return json.dumps(
        {
            "snapshot": snapshot.to_json(),
            "rulings": [
                {**ruling.decision._asdict(), "allowed": ruling.allowed, "note": ruling.note}
                for ruling in rulings
            ],
        },
        separators=(",", ":"),
    )


def replay_line(line: str, config: ControllerConfig, policy: Policy) -> tuple[Any, Any]:
    """Return (logged rulings, rulings now) of one logged evaluation. Raise PolicyError."""
    with translate_errors(
        lambda error: PolicyError(
            f"{line[:60]!r} is no line of a decision log ({error!r}). Name the file that "
            "gmeta shard-service wrote with --decisions"
        ),
        PolicyError,
    ):
        record = json.loads(line)
        snapshot = Snapshot.from_json(record["snapshot"])
        logged = record["rulings"]
        if not all({"kind", "worker_id", "allowed", "note"} <= ruling.keys() for ruling in logged):
            raise KeyError("rulings")
        now = json.loads(log_line(snapshot, rule(snapshot, config, policy)))["rulings"]
    return logged, now
