"""Policies, budgets and the decision log, from hand-made snapshots."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gmeta.antdt.policies import find_policy
from gmeta.antdt.policies.interface import ControllerConfig, Decision, Snapshot, WorkerView
from gmeta.antdt.policies.task_split import Speed, fastest_split, proportional_split
from gmeta.antdt.reports import Verdict, WorkerHealth
from gmeta.antdt.stragglers.controller import Controller, PolicyError, replay_line, rule
from gmeta.errors import ConfigError
from tests.support.refusals import catch_message

ND = ControllerConfig(policy="nd", restart_cost_s=60.0)
DD = replace(ND, policy="dd")


def worker(
    name: str, verdict: Verdict = "healthy", tasks_per_s: float = 100.0, share: int = 16,
    restarts: int = 0, overhead_ms: float = 0.0,
) -> WorkerView:  # fmt: skip
    health = WorkerHealth(
        name, verdict, "compute" if verdict not in ("healthy", "unknown") else "",
        100.0 / tasks_per_s, tasks_per_s, tasks_per_s, tasks_per_s, overhead_ms, 30.0, "evidence",
    )  # fmt: skip
    return WorkerView(health, share, restarts)


def snapshot(*workers: WorkerView, **fields: float) -> Snapshot:
    return Snapshot(1000.0, 50, workers, **{"tasks_per_step": 64, "remaining_s": 10.0, **fields})  # type: ignore[arg-type]


def healthy(count: int) -> list[WorkerView]:
    return [worker(f"w{i}") for i in range(count)]


def kinds(snap: Snapshot, config: ControllerConfig) -> list[str]:
    return [x.decision.kind for x in rule(snap, config, find_policy(config.policy)) if x.allowed]


@pytest.mark.parametrize("config", [ND, DD])
def test_healthy_workers_are_left_alone(config: ControllerConfig) -> None:
    assert rule(snapshot(*healthy(4)), config, find_policy(config.policy)) == []


def test_nd_moves_tasks_away_from_a_transient_straggler() -> None:
    snap = snapshot(*healthy(3), worker("w3", "transient", 25.0))
    (ruling,) = rule(snap, ND, find_policy("nd"))
    assert ruling.allowed
    assert ruling.decision.parameters == {"w0": 20.0, "w1": 20.0, "w2": 20.0, "w3": 4.0}
    assert ruling.decision.reason == (
        "the slowest share takes 640 ms, balanced 200 ms; slow: w3 (transient, compute) 16 to 4 "
        "tasks"
    )


def test_nd_gives_the_tasks_back_once_the_straggler_recovered() -> None:
    snap = snapshot(*(worker(f"w{i}", share=n) for i, n in enumerate((20, 20, 19, 5))))
    (ruling,) = rule(snap, ND, find_policy("nd"))
    assert set(ruling.decision.parameters.values()) == {16.0}


def waiting(view: WorkerView, peer_wait_ms: float, **fields: float) -> WorkerView:
    return replace(view, health=replace(view.health, peer_wait_ms=peer_wait_ms, **fields))


def nd_shares(*workers: WorkerView) -> list[float]:
    (ruling,) = rule(snapshot(*workers), ND, find_policy("nd"))
    return list(ruling.decision.parameters.values())


def test_nd_counts_what_a_step_takes_beyond_the_tasks_of_a_slow_worker() -> None:
    """It waits 120 ms in which it waits for nobody, at a quarter of the others' speed: 3 tasks of
    40 ms and 120 ms, 21 of 10 ms and 30 ms, end together, and 64 are 2 fewer."""
    slow = waiting(worker("w3", "transient", 25.0), 120.0)
    assert nd_shares(*(waiting(view, 590.0) for view in healthy(3)), slow) == [20, 21, 21, 2]


def test_nd_takes_no_wait_of_a_worker_that_is_not_last_for_its_overhead() -> None:
    """The others are waited for now: the straggler's wait is mostly for them."""
    others = [waiting(worker(f"w{i}", share=n), 10.0) for i, n in enumerate((22, 21, 20))]
    slow = waiting(worker("w3", "transient", 25.0, share=1), 180.0)
    assert nd_shares(*others, slow) == [20, 20, 20, 4]


def test_nd_takes_the_overhead_of_a_slow_reader_for_that_of_all_others() -> None:
    """It computes as fast as they do."""
    slow = worker("w3", "transient", 25.0)
    slow = waiting(replace(slow, health=replace(slow.health, cause="reader")), 120.0)
    assert nd_shares(*(waiting(view, 590.0) for view in healthy(3)), slow) == [20, 20, 20, 4]


def test_one_window_of_a_known_straggler_moves_no_task() -> None:
    """The windows in which the shares change hold some of both."""
    others = [worker(f"w{i}", share=20) for i in range(3)]
    slow = worker("w3", "transient", 25.0, share=4)
    once = replace(slow, health=replace(slow.health, tasks_per_s_newest=10.0))
    assert rule(snapshot(*others, once), ND, find_policy("nd")) == []


def test_nd_balances_also_where_the_newest_window_of_a_worker_has_no_work() -> None:
    """Kernels that are not through yet count in a later window: it is no slower for that."""
    unseen = worker("w0")
    unseen = replace(unseen, health=replace(unseen.health, tasks_per_s_newest=0.0))
    others = [worker("w1"), worker("w2"), worker("w3", "transient", 25.0)]
    assert nd_shares(unseen, *others) == [20, 20, 20, 4]


def test_nd_restarts_a_persistent_straggler_when_it_pays() -> None:
    stragglers = [*healthy(3), worker("w3", "persistent", 25.0)]
    assert kinds(snapshot(*stragglers, remaining_s=10_000.0), ND) == ["KILL_RESTART"]
    assert kinds(snapshot(*stragglers, remaining_s=100.0), ND) == ["ADJUST_BS"]


def test_tasks_are_not_moved_away_from_a_slow_link_but_it_is_left_behind() -> None:
    """Its work is as fast as the others': fewer tasks would not make its transfers shorter."""
    slow = worker("w3", "persistent")
    view = replace(slow, health=replace(slow.health, cause="network", ratio=4.0))
    assert kinds(snapshot(*healthy(3), view, remaining_s=100.0), ND) == []
    assert kinds(snapshot(*healthy(3), view, remaining_s=10_000.0), ND) == ["KILL_RESTART"]


def test_a_restart_of_one_worker_alone_pays_sooner_and_the_others_go_on() -> None:
    stragglers = [*healthy(3), worker("w3", "persistent", 25.0)]
    config = replace(ND, restart_stops_job=False)
    assert kinds(snapshot(*stragglers, remaining_s=100.0), config) == ["KILL_RESTART", "ADJUST_BS"]


def test_a_deterministic_straggler_is_never_restarted() -> None:
    old = [*healthy(3), worker("w3", "deterministic", 25.0)]
    assert kinds(snapshot(*old, remaining_s=1e6), ND) == ["ADJUST_BS"]


def test_a_worker_is_restarted_no_more_often_than_its_budget_allows() -> None:
    again = [*healthy(3), worker("w3", "persistent", 25.0, restarts=1)]
    assert kinds(snapshot(*again, remaining_s=1e6), ND) == ["ADJUST_BS"]
    (ruling,) = rule(snapshot(*again), ND, lambda s, c: [Decision("KILL_RESTART", "w3")])
    expected = (False, "the worker may not be restarted again; restarts_per_worker is 1")
    assert (ruling.allowed, ruling.note) == expected


def test_the_hourly_budget_holds_back_the_restarts_beyond_it() -> None:
    slow = [worker(f"s{i}", "persistent", 25.0) for i in range(3)]
    snap = snapshot(*healthy(17), *slow, remaining_s=1e6, tasks_per_step=0)
    rulings = rule(snap, ND, find_policy("nd"))
    assert [r.allowed for r in rulings] == [True, True, False]
    assert rulings[2].note == "workers restarted within the hour: 2; allowed: 2"


def test_batches_go_on_being_balanced_while_the_hours_restarts_are_used_up() -> None:
    slow = [*healthy(3), worker("w3", "persistent", 25.0)]
    rulings = rule(snapshot(*slow, remaining_s=1e6, restarts_last_hour=1), ND, find_policy("nd"))
    expected = [("KILL_RESTART", False), ("ADJUST_BS", True)]
    assert [(r.decision.kind, r.allowed) for r in rulings] == expected


def test_the_cooldown_holds_a_second_change_of_batches_back() -> None:
    snap = snapshot(*healthy(3), worker("w3", "transient", 25.0), last_adjust_s=999.5)
    (ruling,) = rule(snap, ND, find_policy("nd"))
    expected = (False, "the shares were changed 0.5 s ago; cooldown_s is 1")
    assert (ruling.allowed, ruling.note) == expected


def test_a_small_gain_changes_nothing() -> None:
    snap = snapshot(*healthy(3), worker("w3", "transient", 95.0))
    assert rule(snap, ND, find_policy("nd")) == []


def test_a_dry_run_rules_but_carries_nothing_out() -> None:
    controller = Controller(replace(ND, dry_run=True), find_policy("nd"))
    snap = snapshot(*healthy(3), worker("w3", "transient", 25.0))
    (ruling,) = controller.decide(snap)
    assert (ruling.allowed, ruling.note) == (False, "dry run")
    health = {view.health.worker_id: view.health for view in snap.workers}
    assert controller.snapshot(health, 51, 64, 10.0, 1001.0).last_adjust_s == float("-inf")


def test_a_synchronous_job_refuses_backup_workers() -> None:
    (ruling,) = rule(
        snapshot(*healthy(2)), ND, lambda s, c: [Decision("BACKUP_WORKERS", "w0", {}, "tail")]
    )
    assert (ruling.allowed, ruling.note) == (
        False,
        "backup workers need a job in which the loser's work can be discarded; in a synchronous "
        "job both would be in the model",
    )


ASYNC = replace(ND, synchronous=False, restart_stops_job=False)


def holding(view: WorkerView, to_back_up: int = 0, backed_up: int = 0) -> WorkerView:
    """With last shards of a speculative dataset in its hands."""
    return replace(view, to_back_up=to_back_up, backed_up=backed_up)


def test_nd_backs_up_whoever_is_slow_and_holds_last_shards_the_slowest_first() -> None:
    slow = [worker("s0", "transient", 50.0), worker("s1", "deterministic", 20.0)]
    snap = snapshot(*healthy(6), *(holding(view, 2) for view in slow), tasks_per_step=0)
    rulings = rule(snap, ASYNC, find_policy("nd"))
    expected = [("BACKUP_WORKERS", "s1", True), ("BACKUP_WORKERS", "s0", True)]
    assert [(r.decision.kind, r.decision.worker_id, r.allowed) for r in rulings] == expected
    found = rulings[0].decision.reason
    assert found == "deterministic straggler (compute) with 2 of the last shards: evidence"


def test_nd_backs_up_nobody_who_is_healthy_or_holds_nothing() -> None:
    views = (holding(worker("w0"), 1), worker("s0", "transient", 25.0), *healthy(4)[1:])
    assert rule(snapshot(*views, tasks_per_step=0), ASYNC, find_policy("nd")) == []


def test_nd_backs_up_nobody_whom_it_restarts() -> None:
    slow = holding(worker("s0", "persistent", 25.0), 1)
    snap = snapshot(*healthy(3), slow, remaining_s=1e6, tasks_per_step=0)
    assert kinds(snap, ASYNC) == ["KILL_RESTART"]


def test_a_worker_with_nothing_to_back_up_is_not_backed_up() -> None:
    (ruling,) = rule(
        snapshot(*healthy(2)), ASYNC, lambda s, c: [Decision("BACKUP_WORKERS", "w0", {}, "tail")]
    )
    assert (ruling.allowed, ruling.note) == (
        False,
        "the worker holds nothing that another may do too: only the last shards of a speculative "
        "dataset, each once",
    )


@pytest.mark.parametrize("backed_up", [0, 1], ids=["new", "already backed up"])
def test_a_quarter_of_the_workers_is_backed_up_at_a_time(backed_up: int) -> None:
    others = [holding(worker(f"s{i}", "transient", 25.0), 1) for i in range(2)]
    first = holding(worker("s2", "transient", 20.0), 1, backed_up)
    snap = snapshot(*healthy(5), first, *others, tasks_per_step=0)
    rulings = rule(snap, ASYNC, find_policy("nd"))
    assert [r.allowed for r in rulings] == [True, True, False]
    assert rulings[2].note == "workers backed up now: 2; allowed: 2"


def test_a_logged_backup_replays_and_logs_of_earlier_versions_still_do() -> None:
    lines: list[str] = []
    slow = holding(worker("s0", "transient", 25.0), 1)
    snap = snapshot(*healthy(3), slow, tasks_per_step=0)
    Controller(ASYNC, find_policy("nd"), lines.append).decide(snap)
    logged, now = replay_line(lines[0], ASYNC, find_policy("nd"))
    assert logged == now
    assert logged[0]["kind"] == "BACKUP_WORKERS"
    old = json.loads(lines[0])
    for view in old["snapshot"]["workers"]:
        del view["to_back_up"], view["backed_up"]
    _, now = replay_line(json.dumps(old), ASYNC, find_policy("nd"))
    assert now == []


@pytest.mark.parametrize(
    ("decision", "note"),
    [
        (Decision("EXCLUDE", "nobody"), "worker 'nobody' is unknown"),
        (Decision("ADJUST_BS", "", {"w0": 63.0}), "the shares add up to 63, a step has 64 tasks"),
        (Decision("ADJUST_BS", "", {"w0": 0.0, "w1": 64.0}), "shares and micro-batches are "
         "whole numbers from 1"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_the_reason(decision: Decision, note: str) -> None:
    (ruling,) = rule(snapshot(*healthy(2)), ND, lambda s, c: [decision])
    assert (ruling.allowed, ruling.note) == (False, note)


def test_dd_at_speeds_one_to_three_is_within_five_percent_of_the_optimum() -> None:
    """Against every split there is, at micro-batches of at most 16 tasks and 8 ms of overhead."""
    config = replace(DD, max_micro_batch=16, min_tasks=0)
    fast, slow = Speed(1.0, 8.0, 16), Speed(3.0, 24.0, 16)
    for total in (8, 64, 100, 257):
        best = min(
            max(2 * [fast.step_ms(a)] + [slow.step_ms(b), slow.step_ms(total - 2 * a - b)])
            for a, b in itertools.product(range(total // 2 + 1), range(total + 1))
            if 2 * a + b <= total
        )
        share = total // 4
        views = [
            worker("w0", tasks_per_s=_rate(fast, share), share=share, overhead_ms=8.0),
            worker("w1", tasks_per_s=_rate(fast, share), share=share, overhead_ms=8.0),
            worker("w2", tasks_per_s=_rate(slow, share), share=share, overhead_ms=24.0),
            worker("w3", tasks_per_s=_rate(slow, share), share=share, overhead_ms=24.0),
        ]
        (decision,) = find_policy("dd")(snapshot(*views, tasks_per_step=total), config)
        n = [int(decision.parameters[f"w{i}"]) for i in range(4)]
        assert sum(n) == total
        found = max(speed.step_ms(k) for speed, k in zip((fast, fast, slow, slow), n, strict=True))
        assert found <= 1.05 * best
        micro = [int(decision.parameters[f"micro:w{i}"]) for i in range(4)]
        assert micro == [max(1, -(-k // 16)) for k in n]


def _rate(speed: Speed, num_tasks: int) -> float:
    """Tasks per second that the monitor sees."""
    return 1000 * num_tasks / speed.step_ms(num_tasks)


def test_the_fastest_split_is_the_best_of_all() -> None:
    for total in (1, 7, 20):
        for speeds in (
            [Speed(1.0), Speed(3.0), Speed(2.0)],
            [Speed(1.0, 2.0, 3), Speed(1.5, 0.5, 2), Speed(4.0, 0.0, 1)],
        ):
            found = fastest_split(total, speeds)
            best = min(
                max(s.step_ms(k) for s, k in zip(speeds, (a, b, total - a - b), strict=True))
                for a, b in itertools.product(range(total + 1), repeat=2)
                if a + b <= total
            )
            assert sum(found) == total
            took = max(s.step_ms(k) for s, k in zip(speeds, found, strict=True))
            assert took == pytest.approx(best)


def test_a_proportional_split_adds_up_and_keeps_the_minimum() -> None:
    for total, speeds, minimum in (
        (10, [1.0, 1.0, 1.0], 1),
        (64, [5.0, 0.01, 3.0, 0.01], 2),
        (3, [1.0, 100.0, 1.0, 1.0], 1),
        (1000, [1.0 / (i + 1) for i in range(50)], 3),
    ):
        shares = proportional_split(total, speeds, minimum)
        assert sum(shares) == total
        assert min(shares) >= min(minimum, total // len(speeds))


def test_a_policy_of_ones_own_is_one_function_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from gmeta.antdt.policies.interface import Decision\n"
        "def decide(snapshot, config):\n"
        "    return [Decision('EXCLUDE', w.health.worker_id, {}, 'mine') "
        "for w in snapshot.stragglers]\n"
    )
    config = replace(ND, policy=f"{file}:decide")
    snap = snapshot(*healthy(3), worker("w3", "transient", 25.0))
    (ruling,) = rule(snap, config, find_policy(config.policy))
    assert ruling.decision == Decision("EXCLUDE", "w3", {}, "mine")
    assert ruling.allowed


def test_the_file_of_a_policy_may_define_dataclasses(tmp_path: Path) -> None:
    file = tmp_path / "with_limits.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Limits:\n"
        "    most: int = 3\n"
        "def decide(snapshot, config):\n"
        "    return [] if Limits().most else None\n"
    )
    assert find_policy(f"{file}:decide")(snapshot(*healthy(2)), ND) == []


def test_a_policy_that_cannot_be_found_is_named(tmp_path: Path) -> None:
    assert catch_message(ConfigError, find_policy, "nx") == (
        "controller.policy = 'nx' is no policy: choose one of none, nd, dd, or name your own as "
        "FILE.py:FUNCTION"
    )
    (tmp_path / "p.py").write_text("x = 1\n")
    expected = f"the policy file {tmp_path}/p.py has no function 'decide'. Name one that it has"
    assert catch_message(ConfigError, find_policy, f"{tmp_path}/p.py:decide") == expected
    assert catch_message(ConfigError, find_policy, f"{tmp_path}/none.py:decide") == (
        f"controller.policy names the file {tmp_path}/none.py, which does not exist. "
        "Correct the path"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    assert catch_message(ConfigError, find_policy, f"{tmp_path}/broken.py:decide") == (
        f"the policy file {tmp_path}/broken.py does not load: "
        "ZeroDivisionError('division by zero'). Mend it"
    )


def test_a_policy_that_fails_is_told_as_the_users_mistake() -> None:
    def broken(s: Snapshot, c: ControllerConfig) -> list[Decision]:
        raise KeyError("w7")

    with pytest.raises(PolicyError) as caught:
        rule(snapshot(*healthy(2)), replace(ND, policy="p.py:broken"), broken)
    assert str(caught.value) == (
        "policy 'p.py:broken' failed: KeyError('w7'). Mend it, or set controller.policy to nd, dd "
        "or none"
    )


def test_numbers_of_numpy_are_ruled_on_and_logged() -> None:
    lines: list[str] = []
    decision = Decision("ADJUST_BS", "", {"w0": np.int64(40), "w1": np.float32(24)})
    controller = Controller(ND, lambda s, c: [decision], lines.append)
    controller.shares = {"w0": 32, "w1": 32}
    (ruling,) = controller.decide(snapshot(*healthy(2)))
    assert (ruling.allowed, controller.shares) == (True, {"w0": 40, "w1": 24})
    assert json.loads(lines[0])["rulings"][0]["parameters"] == {"w0": 40.0, "w1": 24.0}


def test_what_is_held_back_window_after_window_is_logged_once() -> None:
    lines: list[str] = []
    controller = Controller(replace(ND, cooldown_s=60.0), find_policy("nd"), lines.append)
    now = snapshot(*healthy(3), worker("w3", "transient", 25.0))
    for _ in range(5):
        controller.decide(replace(now, last_adjust_s=now.now_s - 5.0))
    assert [json.loads(line)["rulings"][0]["allowed"] for line in lines] == [False]
    controller.decide(replace(now, last_adjust_s=now.now_s - 65.0))
    assert [json.loads(line)["rulings"][0]["allowed"] for line in lines] == [False, True]


def test_a_logged_decision_comes_out_the_same_when_it_is_replayed() -> None:
    lines: list[str] = []
    controller = Controller(ND, find_policy("nd"), lines.append)
    stragglers = snapshot(*healthy(3), worker("w3", "persistent", 25.0), remaining_s=float("inf"))
    controller.decide(stragglers)
    controller.decide(snapshot(*healthy(3), worker("w3", "transient", 25.0)))
    controller.decide(snapshot(*healthy(4)))
    controller.decide(snapshot(*healthy(4)))  # nothing decided, no verdict changed: not logged
    assert len(lines) == 3
    for line in lines:
        logged, again = replay_line(line, ND, find_policy("nd"))
        assert logged == again
    assert json.loads(lines[0])["rulings"][0]["kind"] == "KILL_RESTART"
    logged, again = replay_line(lines[0], replace(ND, policy="none"), find_policy("none"))
    assert (len(logged), again) == (1, [])
