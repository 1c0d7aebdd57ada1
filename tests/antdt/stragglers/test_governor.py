"""Monitor and controller inside the service: heartbeats in, actions out, with a clock by hand."""

import json
import math
import os
import resource
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from gmeta.access.errors import RefusedError
from gmeta.access.log import DecisionLog
from gmeta.antdt.ledger import commands as cmd
from gmeta.antdt.metric_readings import MetricReading, RunReport
from gmeta.antdt.model import MAX_EPOCHS
from gmeta.antdt.policies.interface import ControllerConfig
from gmeta.antdt.reports import MonitorConfig, Report
from gmeta.antdt.service.shard_server import ServiceConfig, ShardServer
from gmeta.antdt.stragglers.governor import Governor, read_ledger
from gmeta.antdt.stragglers.straggler_config import StragglerConfig, load_straggler_config
from gmeta.config.settings import describe_settings
from gmeta.errors import ConfigError
from tests.antdt.driver import TTL_S, Process, Service
from tests.support.refusals import catch_message
from tests.support.waiting import wait_until

ADJUST_BS, BACKUP_WORKERS, KILL_RESTART = 2, 4, 5
CONFIG = StragglerConfig(
    MonitorConfig(window_s=5.0, long_windows=6, long_slow=5),
    ControllerConfig(policy="nd", cooldown_s=0.0, restart_cost_s=30.0),
)
ASYNC = replace(CONFIG.controller, synchronous=False, restart_stops_job=False)
STEPS = 10  # in a window


class Job:
    """Workers that report to a service whose governor is ticked by hand."""

    def __init__(
        self, config: StragglerConfig = CONFIG, num_units: int = 10_000_000,
        speculative: bool = False,
    ) -> None:  # fmt: skip
        self.service = Service()
        self.service.register_dataset(
            num_units=num_units, units_per_shard=1000, speculative=speculative
        )
        self.processes = {f"rank{i}": self.service.worker(f"rank{i}") for i in range(4)}
        self.ms_per_task = dict.fromkeys(self.processes, 10.0)
        self.totals = dict.fromkeys(self.processes, Report())
        self.shares = dict.fromkeys(self.processes, 16)
        self.lines: list[str] = []
        self.governor = Governor(config, self.ask, self.lines.append, self.service.clock)
        self.beat()
        self.governor.tick()

    def ask(self, request: object) -> object:
        (answer,) = self.service.committer.commit([request])  # type: ignore[list-item]
        if isinstance(answer, RefusedError):
            raise answer
        return answer

    def beat(self) -> dict[str, cmd.HeartbeatReply]:
        return {name: self.beat_of(name, process) for name, process in self.processes.items()}

    def beat_of(self, name: str, process: Process) -> cmd.HeartbeatReply:
        report = (*self.totals[name], self.shares[name])
        answer: cmd.HeartbeatReply = self.service.call(cmd.Heartbeat(process.caller, (), report))
        return answer

    def windows(self, number: int) -> dict[str, cmd.HeartbeatReply]:
        beats = {}
        for _ in range(number):
            for name, old in self.totals.items():
                tasks = STEPS * self.shares[name]
                self.totals[name] = Report(
                    old.step + STEPS,
                    old.tasks_done + tasks,
                    old.compute_ms + tasks * self.ms_per_task[name],
                )
            self.beat()
            self.service.clock.advance(CONFIG.monitor.window_s)
            self.governor.tick()
            beats = self.beat()
        return beats


def test_a_healthy_job_is_left_alone() -> None:
    job = Job()
    assert all(beat.actions == () for beat in job.windows(20).values())
    assert {health.verdict for health in job.governor.health.values()} == {"healthy"}


def test_every_rank_hears_its_own_part_of_one_plan() -> None:
    job = Job()
    job.windows(4)
    job.ms_per_task["rank3"] = 40.0
    beats = job.windows(2)
    (actions,) = {tuple(a.action_id for a in beat.actions) for beat in beats.values()}
    assert len(actions) == 1
    parts = {name: beat.actions[0] for name, beat in beats.items()}
    expected = {"rank0": 20.0, "rank1": 20.0, "rank2": 20.0, "rank3": 4.0}
    assert {name: part.parameters["tasks"] for name, part in parts.items()} == expected
    assert {(part.kind, part.apply_at_step) for part in parts.values()} == {(ADJUST_BS, 61)}


def test_a_newer_plan_replaces_the_older_one_and_acks_keep_it_open() -> None:
    job = Job()
    job.windows(4)
    job.ms_per_task["rank3"] = 40.0
    (first,) = job.windows(2)["rank0"].actions
    for name, process in job.processes.items():
        job.service.call(cmd.AckAction(process.caller, first.action_id, 1, ""))
        assert job.beat_of(name, process).actions[0].action_id == first.action_id
    job.shares = {"rank0": 20, "rank1": 20, "rank2": 20, "rank3": 4}
    job.ms_per_task["rank3"] = 10.0
    (second,) = job.windows(4)["rank3"].actions
    assert second.action_id != first.action_id
    assert second.parameters["tasks"] == 16.0


def test_a_persistent_straggler_is_asked_to_restart_once() -> None:
    job = Job()
    job.windows(6)
    job.ms_per_task["rank2"] = 40.0
    beats = job.windows(8)
    kills = [a for a in beats["rank2"].actions if a.kind == KILL_RESTART]
    assert len(kills) == 1
    assert all(a.kind != KILL_RESTART for a in beats["rank1"].actions)
    again = job.service.worker("rank2", incarnation="p1")
    assert [a for a in job.beat_of("rank2", again).actions if a.kind == KILL_RESTART] == []


def test_the_actions_of_a_restarted_job_are_gone() -> None:
    job = Job()
    job.windows(4)
    job.ms_per_task["rank3"] = 40.0
    assert job.windows(2)["rank3"].actions
    job.processes["rank0"].restore("", "round 2")
    assert job.beat_of("rank0", job.processes["rank0"]).actions == ()


def test_actions_survive_a_restart_of_the_service() -> None:
    job = Job()
    job.windows(4)
    job.ms_per_task["rank3"] = 40.0
    (action,) = job.windows(2)["rank3"].actions
    job.service.restart()
    process = job.processes["rank3"]
    process.register()
    assert job.beat_of("rank3", process).actions == (action,)


def test_a_restarted_job_is_watched_from_its_first_window_on() -> None:
    """What the processes before had reported says nothing about the new ones."""
    job = Job()
    job.windows(8)
    job.processes["rank0"].restore("", "round 2")
    job.processes = {name: job.service.worker(name, "p1") for name in job.processes}
    assert all(not seen.report for seen in job.service.committer.ledger.seen.values())
    job.governor.tick()  # before the new ones have said anything
    job.totals = dict.fromkeys(job.processes, Report())
    job.beat()
    job.governor.tick()
    job.ms_per_task["rank3"] = 40.0
    job.windows(3)
    assert job.governor.health["rank3"].verdict == "transient"


def test_an_action_that_the_store_could_not_take_is_posted_once_it_can() -> None:
    job = Job()
    job.windows(4)
    job.ms_per_task["rank3"] = 40.0
    ask, refused = job.governor._ask, []

    def on_a_full_disk(request: object) -> object:
        if isinstance(request, cmd.PostAction):
            refused.append(request)
            raise RefusedError("RESOURCE_EXHAUSTED", "STORE_FULL", "the disk is full")
        return ask(request)  # type: ignore[arg-type]

    job.governor._ask = on_a_full_disk
    with pytest.raises(RefusedError):
        job.windows(3)
    assert job.governor.controller.shares["rank3"] == 4
    job.governor._ask = ask
    job.governor.tick()
    (action,) = job.beat()["rank3"].actions
    assert [(action.kind, action.parameters["tasks"])] == [(ADJUST_BS, 4.0)]
    assert action.action_id == refused[0].action_id


def test_unequal_shares_of_the_service_before_are_made_equal_again() -> None:
    job = Job()
    job.shares = {"rank0": 20, "rank1": 20, "rank2": 20, "rank3": 4}
    (action,) = job.windows(4)["rank3"].actions
    assert action.parameters["tasks"] == 16.0


def test_a_decision_that_the_disk_does_not_take_stops_nothing_and_leaves_whole_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl")
    log.write("one")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, limits[1]))  # a disk with room for two bytes
    try:
        log.write("two")
        log.write("three")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.write("four")
    assert (tmp_path / "decisions.jsonl").read_text() == "one\nfour\n"
    assert [record.getMessage() for record in caplog.records] == ["decision_not_logged"] * 2


def test_a_decision_log_that_nobody_reads_any_more_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tmp_path / "decisions"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = DecisionLog(pipe)
    os.close(reader)
    log.write("one")
    assert [record.getMessage() for record in caplog.records] == ["decision_not_logged"]


def test_nothing_is_decided_about_a_job_whose_workers_are_silent() -> None:
    """Nobody knows how long such a job takes: a restart would seem to pay."""
    job = Job(num_units=1000)
    job.windows(6)
    job.ms_per_task["rank2"] = 40.0
    job.windows(8)  # persistent by now, and too late for a restart
    assert job.governor.health["rank2"].verdict == "persistent"
    counts = dict(job.governor.counts)
    job.service.clock.advance(2 * TTL_S)
    job.governor.tick()
    assert job.governor.phase == "gone"
    assert dict(job.governor.counts) == counts
    assert ("KILL_RESTART", "posted") not in counts


def test_a_silent_worker_of_an_asynchronous_job_is_not_restarted() -> None:
    job = Job(replace(CONFIG, controller=ASYNC))
    job.windows(6)
    job.ms_per_task["rank2"] = 40.0
    job.windows(4)
    del job.totals["rank2"]  # it dies before it is called persistent
    del job.processes["rank2"]
    job.windows(20)
    assert job.governor.silent == {"rank2"}
    assert job.governor.phase == "running"
    assert "rank2" not in job.governor.health
    assert [said.kind for said in job.governor.ruling_records if said.worker_id == "rank2"] == []


def test_the_tasks_of_later_epochs_are_left_too_where_somebody_said_how_many() -> None:
    for num_epochs, tasks_left in ((1, 96), (3, 296), (MAX_EPOCHS, 96)):
        service = Service()
        service.register_dataset(num_units=100, units_per_shard=5, num_epochs=num_epochs)
        worker = service.worker("a")
        worker.progress(worker.grant().token, 4)
        assert read_ledger(service.committer.ledger, 0.0).tasks_left == tasks_left


def test_nobody_is_held_against_workers_that_left() -> None:
    """All that are left do heavier tasks than those did: nobody is slow."""
    job = Job(replace(CONFIG, controller=ASYNC))
    job.windows(6)
    for name in ("rank1", "rank2"):
        del job.totals[name], job.processes[name]
    job.windows(8)
    job.ms_per_task = dict.fromkeys(job.ms_per_task, 40.0)
    job.windows(20)
    verdicts = {name: health.verdict for name, health in job.governor.health.items()}
    assert verdicts == {"rank0": "healthy", "rank3": "healthy"}
    assert not job.governor.ruling_records


def test_what_is_held_back_for_windows_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gmeta.antdt")
    job = Job(replace(CONFIG, controller=replace(CONFIG.controller, dry_run=True)))
    job.windows(4)
    job.ms_per_task["rank3"] = 40.0
    for number in range(4):
        job.ms_per_task["rank3"] += number  # another reason each time
        job.windows(1)
    expected = [("ADJUST_BS", "dry run")]
    assert [(said.kind, said.note) for said in job.governor.ruling_records] == expected
    assert [record.getMessage() for record in caplog.records].count("decision") == 1
    assert job.governor.counts["ADJUST_BS", "held_back"] > 1


def test_a_defect_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    job, asked = Job(), threading.Event()

    def ask(request: object) -> object:
        if asked.is_set():
            raise RefusedError("UNAVAILABLE", "SHUTTING_DOWN", "enough")
        asked.set()
        raise KeyError("a defect")

    job.governor._ask = ask
    job.governor.start()
    wait_until(asked.is_set)
    wait_until(lambda: "governor_failed" in caplog.text)
    assert job.governor._thread.is_alive()
    job.governor.stop()


def test_in_a_dry_run_nothing_is_posted_but_everything_is_said() -> None:
    job = Job(replace(CONFIG, controller=replace(CONFIG.controller, dry_run=True)))
    job.windows(4)
    job.ms_per_task["rank3"] = 40.0
    assert all(beat.actions == () for beat in job.windows(4).values())
    said = job.governor.ruling_records[0]
    assert (said.kind, said.allowed, said.note) == ("ADJUST_BS", False, "dry run")
    assert json.loads(job.lines[-1])["snapshot"]["tasks_per_step"] == 64


def test_batches_are_left_alone_while_a_worker_does_not_say_its_share() -> None:
    job = Job()
    job.shares["rank1"] = 0
    job.totals["rank1"] = Report()
    job.windows(4)
    job.ms_per_task["rank3"] = 40.0
    assert all(beat.actions == () for beat in job.windows(4).values())


def test_exclude_drains_the_worker(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from gmeta.antdt.policies.interface import Decision\n"
        "def decide(snapshot, config):\n"
        "    return [Decision('EXCLUDE', w.health.worker_id, {}, 'slow')"
        " for w in snapshot.stragglers if not w.excluded]\n"
    )
    job = Job(StragglerConfig(CONFIG.monitor, ControllerConfig(policy=f"{file}:decide")))
    job.windows(4)
    job.ms_per_task["rank3"] = 40.0
    job.windows(3)
    assert job.service.state.workers["rank3"].draining
    assert [said.kind for said in job.governor.ruling_records] == ["EXCLUDE"]


def test_a_slow_workers_last_shard_goes_to_an_idle_one_too() -> None:
    """Also beside a worker that never reported, which in a synchronous job could not be planned."""
    job = Job(replace(CONFIG, controller=ASYNC), num_units=1000, speculative=True)
    job.shares = dict.fromkeys(job.shares, 16)
    silent = job.service.worker("silent")
    slow, idle = job.processes["rank3"], job.processes["rank0"]
    held = slow.grant()
    job.windows(4)
    job.ms_per_task["rank3"] = 40.0
    beats = job.windows(2)
    assert all(action.kind != BACKUP_WORKERS for beat in beats.values() for action in beat.actions)
    assert ("BACKUP_WORKERS", "rank3", True) in {
        (said.kind, said.worker_id, said.allowed) for said in job.governor.ruling_records
    }
    assert idle.grant().shard_index == held.shard_index
    job.windows(4)
    said = [said for said in job.governor.ruling_records if said.kind == "BACKUP_WORKERS"]
    assert len(said) == 1  # once for each shard
    assert isinstance(silent.lease(), cmd.Wait)


def test_the_config_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "antdt.toml"
    file.write_text("[monitor]\nslow_rato = 2.0\n")
    with pytest.raises(ConfigError) as caught:
        load_straggler_config(file)
    assert str(caught.value) == "monitor.slow_rato is unknown; did you mean monitor.slow_ratio?"
    file.write_text("[monitor]\nwindow_s = 1\n[controller]\npolicy = 'dd'\n")
    found = load_straggler_config(file)
    file.write_text("[monitor]\nlong_windows = 100\n")
    assert catch_message(ConfigError, load_straggler_config, file) == (
        "monitor.long_slow = 200 is more than monitor.long_windows = 100; at most that much is "
        "allowed, or no verdict would hold. Lower the one, or raise the other"
    )
    assert (found.monitor.window_s, found.controller.policy) == (1.0, "dd")


def test_metrics_tell_verdicts_speeds_and_decisions() -> None:
    server = ShardServer(ServiceConfig("127.0.0.1:0", metrics_listen="127.0.0.1:0"))
    job = Job()
    job.windows(4)
    job.ms_per_task["rank3"] = 40.0
    job.windows(2)
    server.edge.metrics.add_governor(job.governor)
    try:
        url = f"http://127.0.0.1:{server.metrics_port}/metrics"
        with urllib.request.urlopen(url) as answer:
            text = answer.read().decode()
    finally:
        server.stop(0.0)
    assert 'antdt_worker_tasks_per_s{worker="rank0"} 100.0' in text
    assert 'antdt_stragglers{cause="compute",verdict="transient"} 1.0' in text
    assert 'antdt_decisions_total{kind="ADJUST_BS",outcome="posted"} 1.0' in text
    assert 'antdt_worker_share{worker="rank3"} 4.0' in text


def test_the_docs_list_every_key_with_its_default() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "stragglers.md").read_text()
    described = describe_settings(StragglerConfig)
    rows = [f"| `{key}` | `{value}` | {text} |" for key, value, text in described]
    assert [row for row in rows if row not in docs] == []


def test_a_job_waits_runs_falls_silent_and_ends() -> None:
    service = Service()
    lines: list[str] = []

    def ask(request: object) -> object:
        (answer,) = service.committer.commit([request])  # type: ignore[list-item]
        return answer

    governor = Governor(CONFIG, ask, lines.append, service.clock)
    governor.tick()
    assert (governor.phase, governor.silent) == ("waiting", frozenset())

    service.register_dataset(num_units=8, units_per_shard=4)
    first, second = service.worker("rank0"), service.worker("rank1")
    governor.tick()
    assert (governor.phase, governor.silent) == ("running", frozenset())

    service.clock.advance(0.6 * TTL_S)
    second.heartbeat()
    service.clock.advance(0.6 * TTL_S)
    governor.tick()
    assert (governor.phase, governor.silent) == ("running", frozenset({"rank0"}))

    service.clock.advance(TTL_S)
    governor.tick()
    assert (governor.phase, governor.silent) == ("gone", frozenset({"rank0", "rank1"}))

    first.heartbeat()
    governor.tick()
    assert (governor.phase, governor.silent) == ("running", frozenset({"rank1"}))
    first.complete(first.grant().token)
    first.complete(first.grant().token)
    service.clock.advance(2 * TTL_S)
    governor.tick()
    assert governor.phase == "ended"

    # Also after a restart of the service: nothing is left that anybody would call for.
    service.restart()
    governor.tick()
    assert (governor.phase, governor.silent) == ("ended", frozenset())
    # One that calls may begin the next epoch.
    first = service.worker("rank0")
    governor.tick()
    assert governor.phase == "running"
    service.clock.advance(2 * TTL_S)
    governor.tick()
    assert governor.phase == "ended"
    # Those left over from before a restart of the job with fewer ranks are not waited for.
    service.worker("rank0", "p1", rdzv_round=1)
    governor.tick()
    assert (governor.phase, governor.silent) == ("running", frozenset())


def test_the_speed_of_a_job_that_does_nothing_more_falls_to_nothing() -> None:
    job = Job()
    job.windows(4)
    at_work = job.governor.tasks_per_s
    assert at_work == pytest.approx(4 * STEPS * 16 / CONFIG.monitor.window_s)
    for number in range(1, 4):  # the ranks live, and are in a long step
        job.beat()
        job.service.clock.advance(CONFIG.monitor.window_s)
        job.governor.tick()
        assert job.governor.tasks_per_s == pytest.approx(at_work / number)
    job.service.clock.advance(2 * TTL_S)
    job.governor.tick()
    assert job.governor.tasks_per_s == 0.0
    # Back again, the first look has nothing to compare with; then a step's time is known.
    job.windows(2)
    assert job.governor.tasks_per_s == pytest.approx(at_work)


@pytest.mark.parametrize("num_before_snapshot", [1, 1000])
def test_what_the_trainer_says_of_its_run_outlives_the_service(num_before_snapshot: int) -> None:
    service = Service(snapshot_every_events=num_before_snapshot)

    def phase() -> str:
        governor = Governor(CONFIG, service.call, clock=service.clock)
        governor.tick()
        return governor.phase

    def report(status: str) -> None:
        run = RunReport(status, "/runs/a", 90, 1e9)
        readings = (MetricReading(4, {"loss": 0.5}, 1e9), MetricReading(8, {"loss": math.nan}))
        worker.service.call(cmd.Heartbeat(worker.caller, (), (), readings, run))

    service.register_dataset(num_units=4, num_epochs=MAX_EPOCHS)
    worker = service.worker("rank0")
    worker.complete(worker.grant().token)
    report("training")
    num_events = service.committer.ledger.num_events
    report("training")  # once more
    assert service.committer.ledger.num_events == num_events
    service.restart()
    # It said that it goes on, so an epoch that is trained is not the end.
    assert phase() == "running"
    service.clock.advance(2 * TTL_S)
    assert phase() == "gone"
    service.clock.advance(-2 * TTL_S)
    worker.register()
    report("finished")
    assert phase() == "ended"
    service.restart()
    assert (phase(), service.state.run.folder) == ("ended", "/runs/a")
    assert service.state.readings.curves()["loss"] == [(4, 0.5, 1e9), (8, None, None)]
    # Resumed, it is another generation's, until that one ends.
    worker.service.worker("rank0", "p1", rdzv_round=1)
    assert phase() == "running"


def test_shares_are_kept_where_they_changed() -> None:
    service = Service()
    service.register_dataset()
    worker = service.worker("rank0")
    governor = Governor(CONFIG, service.call, clock=service.clock)
    for step, share in enumerate((8, 8, 5)):
        service.call(cmd.Heartbeat(worker.caller, (), (step, 8 * step, 1.0, 0.0, 0.0, 0.0, share)))
        service.clock.advance(2 * CONFIG.monitor.window_s)
        governor.tick()
    assert [shares for _, shares in governor.share_changes] == [{"rank0": 8}, {"rank0": 5}]
