"""The simulated cluster against what can be worked out by hand."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gmeta.antdt.model import ShardState
from gmeta.antdt.policies.interface import ControllerConfig
from gmeta.antdt.simulation.job_config import JobConfig
from gmeta.antdt.simulation.scenario_study import METHODS, find_methods, run_study
from gmeta.antdt.simulation.simulated_data import DATASET, SimulatedData
from gmeta.antdt.simulation.synchronous_jobs import run_antdt, run_static
from gmeta.antdt.simulation.traces import (
    SCENARIOS,
    SpeedChange,
    Trace,
    TraceError,
    recorded_trace,
    synthetic_trace,
)
from gmeta.errors import UserError
from tests.support.commands import gmeta
from tests.support.refusals import catch_message

EXACT = JobConfig(num_workers=4, num_steps=200, jitter=0.0, overhead_ms=0.0, steps_per_shard=1)


def slow_from(start_s: float, factor: float = 4.0, num_workers: int = 4) -> Trace:
    changes = [SpeedChange(start_s, num_workers - 1, factor, "node")]
    return Trace(np.ones(num_workers), changes, 0.0, seed=0)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "backup workers"])
def test_a_healthy_cluster_ends_in_the_healthy_time(method: str) -> None:
    outcome = METHODS[method](EXACT, slow_from(0.0, factor=1.0))
    assert outcome.completion_s == pytest.approx(EXACT.healthy_s)
    assert (outcome.num_adjustments, outcome.num_restarts) == (0, 0)


def test_bsp_is_as_slow_as_its_slowest_worker() -> None:
    outcome = METHODS["BSP"](EXACT, slow_from(0.0))
    assert outcome.completion_s == pytest.approx(4 * EXACT.healthy_s)


def test_pulling_uses_the_speed_of_all() -> None:
    outcome = METHODS["ASP-like pulling"](EXACT, slow_from(0.0))
    assert outcome.completion_s == pytest.approx(EXACT.healthy_s * 4 / 3.25, rel=0.02)


def test_an_idle_worker_ends_a_job_of_pulling_sooner_than_a_slow_one() -> None:
    """10 shards of 19.2 s: the slow worker holds its only one for 192 s, the others end at 57.6 s
    and one of them does its shard again."""
    config = replace(EXACT, num_steps=50, steps_per_shard=20)
    alone = METHODS["ASP-like pulling"](config, slow_from(0.0, 10.0))
    helped = METHODS["pulling with backups"](config, slow_from(0.0, 10.0))
    assert alone.completion_s == pytest.approx(192.0)
    assert helped.completion_s == pytest.approx(76.8, abs=0.3)  # an idle worker asks every 0.2 s


@pytest.mark.parametrize(
    ("method", "ideal"),
    [("LB-BSP", 4 / 3.25), ("LB-BSP at once", 4 / 3.25), ("AntDT-ND", 4 / 3.25)],
)
def test_balancing_comes_close_to_the_ideal(method: str, ideal: float) -> None:
    """3.25 workers' worth of speed is left: 3 healthy ones and a quarter."""
    outcome = METHODS[method](replace(EXACT, num_steps=800), slow_from(0.0))
    assert outcome.completion_s == pytest.approx(ideal * 800 * 0.96, rel=0.08)


def test_nd_restarts_what_stays_slow_and_is_then_as_fast_as_new() -> None:
    config = replace(EXACT, num_steps=4000)
    outcome = run_antdt("nd", config, slow_from(120.0))
    assert outcome.num_restarts == 1
    assert outcome.completion_s < 1.1 * config.healthy_s


def test_noise_and_hiccups_of_a_healthy_cluster_move_hardly_a_batch() -> None:
    """Steps vary by 10 %, and each of 20 workers is three times slower for a second every 200 s."""
    noise = random.Random(1)
    changes = []
    for worker in range(20):
        now_s = noise.expovariate(1 / 200)
        while now_s < 1000.0:
            changes += [
                SpeedChange(now_s, worker, 3.0, "moment"),
                SpeedChange(now_s + 1.0, worker, 1.0, "moment"),
            ]
            now_s += 1.0 + noise.expovariate(1 / 200)
    config = replace(EXACT, num_workers=20, num_steps=600, jitter=0.1)
    outcome = run_antdt("nd", config, Trace(np.ones(20), changes, 0.0, seed=0))
    assert outcome.num_restarts == 0
    assert outcome.num_adjustments <= 8  # in 800 windows: no oscillation


def busy_host(seed: int, *changes: SpeedChange) -> tuple[JobConfig, Trace]:
    """Four equal workers, each of which loses its core now and then, and a trace of both."""
    config = JobConfig(num_workers=4, num_steps=600, seed=seed)
    noise = synthetic_trace(SCENARIOS["busy"], 4, 5 * config.healthy_s, seed)
    return config, Trace(np.ones(4), [*noise._changes, *changes], 0.0, seed)


@pytest.mark.parametrize(("hold_windows", "most_a_minute"), [(0, 20.0), (6, 1.0)])
def test_a_busy_but_even_host_is_left_alone(hold_windows: int, most_a_minute: float) -> None:
    """Changed at most once a minute; without the hold ten times, and steps are no shorter."""
    changes = minutes = held_s = 0.0
    for seed in range(2):
        config, trace = busy_host(seed)
        outcome = run_antdt("nd", replace(config, hold_windows=hold_windows), trace)
        changes += outcome.num_adjustments
        minutes += outcome.completion_s / 60
        held_s += outcome.completion_s
    equal_s = sum(run_static(*busy_host(seed)).completion_s for seed in range(2))
    assert changes / minutes <= most_a_minute
    if hold_windows:
        assert held_s < 1.03 * equal_s
    else:
        assert changes / minutes > 7.0


def test_a_straggler_of_a_busy_host_is_balanced_around_within_its_windows() -> None:
    """It becomes twice as slow at 400 s, once the host is known for slowness that passes."""
    lines: list[str] = []
    config, trace = busy_host(0, SpeedChange(400.0, 2, 2.0, "node"))
    run_antdt("nd", config, trace, lines.append)
    lowered_s = [
        record["snapshot"]["now_s"]
        for record in map(json.loads, lines)
        for ruling in record["rulings"]
        if ruling["kind"] == "ADJUST_BS" and ruling["allowed"] and ruling["parameters"]["w2"] < 25
    ]
    # For the verdict, for the hold, and the one that was under way.
    windows = config.monitor.short_windows + config.hold_windows + 1
    first_s = next(now_s for now_s in lowered_s if now_s > 400.0)
    assert first_s - 400.0 <= windows * config.monitor.window_s
    assert "slowness passes quickly here" in "".join(lines)


def test_every_task_is_trained_once_also_over_a_restart() -> None:
    data = SimulatedData(num_tasks=100, tasks_per_shard=8, num_workers=2)
    trained = np.zeros(2, dtype=np.int64)
    for step in range(40):
        tasks = data.take_step(np.array([3, 2]), 0.0)
        data.finish_step(tasks, 0.0)
        trained += tasks
        if step == 5:
            data.restart(0, 1, 0.0)
    assert trained.sum() == 100
    assert data.finished
    assert data.ledger.state.tables[DATASET].counts[ShardState.DONE] == 13


def test_the_same_seed_gives_the_same_stragglers() -> None:
    first, second = (synthetic_trace(SCENARIOS["mixed"], 50, 5000.0, seed=3) for _ in range(2))
    other = synthetic_trace(SCENARIOS["mixed"], 50, 5000.0, seed=4)
    for trace in (first, second, other):
        trace.advance(2000.0)
    assert (first.factors == second.factors).all()
    assert (first.factors != other.factors).any()
    assert set(np.unique(first.factors)) > {1.0, 1.5}


def test_a_recording_says_who_is_slow_and_when(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("time_s,worker,slowdown\n0,a,1\n0,b,2.5\n10,b,1\n")
    trace, num_workers = recorded_trace(file, seed=0)
    assert num_workers == 2
    trace.advance(5.0)
    assert trace.factors.tolist() == [1.0, 2.5]
    trace.advance(10.0)
    assert trace.factors.tolist() == [1.0, 1.0]


def test_the_decision_log_of_a_job_is_a_recording_of_it(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    config = replace(EXACT, num_steps=300)
    with log.open("w") as file:
        ran = run_antdt("nd", config, slow_from(60.0), lambda line: file.write(line + "\n"))
    trace, num_workers = recorded_trace(log, seed=0)
    assert num_workers == 4
    trace.advance(50.0)
    assert trace.factors.tolist() == [1.0] * 4
    trace.advance(70.0)
    assert trace.factors == pytest.approx([1.0, 1.0, 1.0, 4.0], rel=0.1)
    again = run_antdt("nd", config, recorded_trace(log, seed=0)[0])
    assert again.completion_s == pytest.approx(ran.completion_s, rel=0.05)


def test_a_log_that_is_none_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    log.write_text('{"x": 1}\n')
    assert catch_message(TraceError, recorded_trace, log, seed=0) == (
        f"line 1 of {log} is none of a decision log (KeyError('snapshot')). Name the file that "
        "gmeta shard-service wrote with --decisions"
    )


def test_a_slow_reader_costs_what_the_computation_does_not_hide() -> None:
    def slow_reader() -> Trace:
        return Trace(np.ones(4), [SpeedChange(0.0, 3, 4.0, "reader")], 0.0, 0)

    config = replace(EXACT, read_ms=EXACT.task_ms, num_steps=800)
    bsp = METHODS["BSP"](config, slow_reader())
    assert bsp.completion_s == pytest.approx(4 * config.healthy_s)
    lines: list[str] = []
    nd = run_antdt("nd", config, slow_reader(), lines.append)
    assert nd.completion_s == pytest.approx(4 / 3.25 * config.healthy_s, rel=0.08)
    causes = {w["health"]["cause"] for one in lines for w in json.loads(one)["snapshot"]["workers"]}
    assert causes == {"", "reader"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "time_s,worker\n0,a\n",
            "{file} has the columns ['time_s', 'worker']; slowdown is missing. Write "
            "time_s,worker,slowdown in the first line",
        ),
        (
            "time_s,worker,slowdown\n0,a\n",
            "line 2 of {file} says time_s = 0 and slowdown = None; both are numbers, slowdown "
            "above 0 and at most 1,000,000. Correct the line",
        ),
    ],
)
def test_a_recording_without_its_needs_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    assert catch_message(TraceError, recorded_trace, file, seed=0) == message.format(file=file)


def test_an_unknown_method_or_scenario_is_named() -> None:
    with pytest.raises(UserError, match=r"^method 'BPS' is unknown; choose from BSP, "):
        find_methods(["BPS"])
    with pytest.raises(UserError, match=r"^scenario 'bad' is unknown; choose from transient, "):
        list(run_study(EXACT, ["bad"], [], None))


def test_the_command_writes_its_table_and_picture(tmp_path: Path) -> None:
    result = gmeta(
        "sim", "run", "--workers", 20, "--steps", 60, "--scenario", "persistent",
        "--method", "BSP", "--method", "AntDT-ND", "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "AntDT-ND" in result.stdout
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["method"] for row in written["results"]] == ["BSP", "AntDT-ND"]
    assert (tmp_path / "out" / "completion.png").read_bytes().startswith(b"\x89PNG")


def test_the_simulated_controller_keeps_to_the_config_of_the_service(tmp_path: Path) -> None:
    settings = tmp_path / "antdt.toml"
    settings.write_text("[controller]\nmin_gain = 0.9\nrestarts_per_worker = 0\ndry_run = true\n")
    ran = {}
    for name, given in (("default", ()), ("config", ("--config", settings))):
        out = tmp_path / name
        result = gmeta(
            "sim", "run", "--workers", 8, "--steps", 60, "--scenario", "deterministic",
            "--method", "AntDT-ND", "--out", out, *given,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        (ran[name],) = json.loads((out / "results.json").read_text())["results"]
    assert ran["default"]["num_adjustments"] > 0
    assert ran["config"]["num_adjustments"] == 0
    keeping = replace(EXACT, num_steps=4000, controller=ControllerConfig(restarts_per_worker=0))
    assert run_antdt("nd", keeping, slow_from(120.0)).num_restarts == 0


def test_a_replay_tells_where_another_policy_decides_otherwise(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    settings = tmp_path / "antdt.toml"
    settings.write_text('[controller]\npolicy = "nd"\nrestart_stops_job = false\n')
    with log.open("w") as file:
        config = replace(EXACT, num_steps=40, restart_cost_s=90.0)
        run_antdt("nd", config, slow_from(0.0), lambda line: file.write(line + "\n"))
    same = gmeta("sim", "replay", log, "--config", settings)
    assert (same.returncode, same.stdout.splitlines()[-1]) == (
        0,
        f"{len(log.read_text().splitlines())} evaluations replayed, 0 different",
    )
    other = gmeta("sim", "replay", log, "--config", settings, "--policy", "none")
    assert other.returncode == 1
    assert "  logged: ADJUST_BS\n  now:    nothing" in other.stdout
