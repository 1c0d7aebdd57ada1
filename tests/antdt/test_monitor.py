"""Verdicts from reports alone: no service, no clock, no sleeps."""

import random
from collections.abc import Callable, Mapping
from statistics import median

import pytest

from gmeta.antdt.monitor import Monitor
from gmeta.antdt.reports import STRAGGLERS, MonitorConfig, Report, WorkerHealth
from gmeta.antdt.windows import _medians_of_others

CONFIG = MonitorConfig(long_windows=24, long_slow=20)
STEPS_PER_WINDOW = 10
TASKS = 8


class Cluster:
    """Workers whose ms per task (compute, data wait, own transfers) a function of time decides."""

    def __init__(self, times_ms: Mapping[str, Callable[[int], tuple[float, float, float]]]) -> None:
        self.times_ms = times_ms
        self.monitor = Monitor(CONFIG, now_s=0.0)
        self.reports = {name: Report() for name in times_ms}
        self.incarnations = dict.fromkeys(times_ms, "p0")
        self.window = 0
        for name in times_ms:
            self.monitor.observe(name, "p0", Report())

    def run(self, num_windows: int, *idle: str) -> dict[str, WorkerHealth]:
        for _ in range(num_windows):
            for name, times_ms in self.times_ms.items():
                if name in idle:
                    continue
                old = self.reports[name]
                parts = [ms * TASKS * STEPS_PER_WINDOW for ms in times_ms(self.window)]
                self.reports[name] = Report(
                    old.step + STEPS_PER_WINDOW, old.tasks_done + TASKS * STEPS_PER_WINDOW,
                    old.compute_ms + parts[0], old.data_wait_ms + parts[1],
                    old.communication_ms + parts[2], old.peer_wait_ms + 1000.0,
                )  # fmt: skip
                self.monitor.observe(name, self.incarnations[name], self.reports[name])
            self.window += 1
            assert self.monitor.close_window(self.window * CONFIG.window_s)
        return self.monitor.health

    def restart(self, name: str) -> None:
        self.incarnations[name] += "+"
        self.reports[name] = Report()
        self.monitor.observe(name, self.incarnations[name], Report())


def steady(
    compute: float = 1.0, wait: float = 0.1, own: float = 0.1
) -> Callable[[int], tuple[float, float, float]]:
    return lambda window: (compute, wait, own)


def slow_between(
    first: int, last: int, factor: float = 4.0
) -> Callable[[int], tuple[float, float, float]]:
    return lambda window: (factor if first <= window < last else 1.0, 0.1, 0.1)


def healthy(count: int = 3) -> dict[str, Callable[[int], tuple[float, float, float]]]:
    return {f"w{i}": steady() for i in range(count)}


def test_a_worker_that_is_slow_for_two_windows_is_a_transient_straggler() -> None:
    cluster = Cluster({**healthy(), "slow": slow_between(4, 7)})
    assert cluster.run(5)["slow"].verdict == "healthy"
    found = cluster.run(1)["slow"]
    assert (found.verdict, found.cause) == ("transient", "compute")
    assert found.slow_for_s == pytest.approx(2 * CONFIG.window_s)
    assert cluster.run(4)["slow"].verdict == "healthy"


def test_one_slow_window_is_no_verdict() -> None:
    cluster = Cluster({**healthy(), "spiky": slow_between(10, 11, factor=20.0)})
    assert all(cluster.run(1)["spiky"].verdict not in STRAGGLERS for _ in range(30))


def test_a_worker_that_stays_slow_becomes_a_persistent_straggler() -> None:
    cluster = Cluster({**healthy(), "slow": slow_between(6, 10_000)})
    verdicts = [cluster.run(1)["slow"].verdict for _ in range(40)]
    assert verdicts[:7] == ["unknown", *["healthy"] * 6]
    assert verdicts[7:25] == ["transient"] * 18
    assert verdicts[-1] == "persistent"


def test_a_worker_that_was_steadily_slow_from_its_start_is_a_deterministic_straggler() -> None:
    cluster = Cluster({**healthy(), "old": steady(compute=3.0)})
    assert cluster.run(CONFIG.long_windows)["old"].verdict == "deterministic"


def test_slow_from_the_start_but_unsteady_is_persistent() -> None:
    noise = random.Random(0)
    cluster = Cluster({**healthy(), "shared": lambda window: (noise.uniform(2.0, 6.0), 0.1, 0.1)})
    assert cluster.run(CONFIG.long_windows)["shared"].verdict == "persistent"


@pytest.mark.parametrize(
    ("times_ms", "cause"),
    [
        ((4.0, 0.1, 0.1), "compute"), ((1.0, 4.0, 0.1), "reader"), ((1.0, 0.1, 4.0), "network"),
        ((1.2, 3.0, 0.5), "reader"),
    ],
)  # fmt: skip
def test_the_verdict_names_what_is_slow(times_ms: tuple[float, float, float], cause: str) -> None:
    found = Cluster({**healthy(), "slow": steady(*times_ms)}).run(4)["slow"]
    assert found.cause == cause
    assert found.verdict == "transient"


def test_a_slow_reader_is_told_with_its_evidence() -> None:
    found = Cluster({**healthy(), "slow": steady(1.0, 3.7, 0.1)}).run(4)["slow"]
    assert found.evidence == (
        "4.00 times the others' time per task over the last 3 windows, slow in 4 of 4; ms per "
        "task against the others: compute +0.00, reader +3.60, network +0.00"
    )


def test_a_straggler_below_the_ratio_that_it_began_at_is_told_as_one() -> None:
    cluster = Cluster({**healthy(), "slow": lambda window: (4.0 if window < 4 else 1.4, 0.1, 0.1)})
    assert "it was above" not in cluster.run(4)["slow"].evidence
    found = cluster.run(3)["slow"]
    assert (found.verdict, round(found.ratio, 2)) == ("transient", 1.33)
    assert found.evidence.startswith(
        "1.33 times the others' time per task over the last 3 windows (it was above 1.5, and "
        "counts as slow until 2 of 3 windows are below 1.25), slow in 7 of 7; "
    )


def test_waiting_for_a_slow_peer_does_not_make_a_worker_slow() -> None:
    found = Cluster({**healthy(), "slow": steady(4.0)}).run(10)
    assert [found[f"w{i}"].verdict for i in range(3)] == ["healthy"] * 3


def test_of_two_workers_the_slower_is_found() -> None:
    found = Cluster({"fast": steady(), "slow": steady(3.0)}).run(4)
    assert (found["fast"].verdict, found["slow"].verdict) == ("healthy", "transient")


def test_speed_is_tasks_per_second_of_the_time_that_depends_on_tasks() -> None:
    found = Cluster({**healthy(), "slow": steady(4.8, 0.1, 0.1)}).run(4)
    assert found["w0"].tasks_per_s == pytest.approx(1000 / 1.1)
    assert found["slow"].tasks_per_s == pytest.approx(1000 / 4.9)


def test_the_speed_of_the_short_windows_is_no_outliers() -> None:
    cluster = Cluster({**healthy(), "once": slow_between(5, 6, 10.0)})
    found = cluster.run(6)["once"]
    assert found.tasks_per_s == pytest.approx(1000 / 1.1)
    assert found.tasks_per_s_newest == pytest.approx(1000 / 10.1)


def test_of_the_first_two_windows_the_faster_is_the_speed() -> None:
    cluster = Cluster({**healthy(), "starting": slow_between(0, 1, 10.0)})
    assert cluster.run(2)["starting"].tasks_per_s == pytest.approx(1000 / 1.1)


def test_a_pause_of_the_whole_job_is_nobodys_wait_of_every_step() -> None:
    cluster = Cluster(healthy())
    cluster.run(3)
    for name, report in cluster.reports.items():
        cluster.reports[name] = report._replace(peer_wait_ms=report.peer_wait_ms + 60_000.0)
    waits_ms = {health.peer_wait_ms for health in cluster.run(1).values()}
    assert waits_ms == {1000.0 / STEPS_PER_WINDOW}


def test_another_process_of_a_worker_begins_a_new_history() -> None:
    cluster = Cluster({**healthy(), "slow": slow_between(0, 30)})
    cluster.run(30)
    cluster.restart("slow")
    assert cluster.run(1)["slow"].verdict == "unknown"
    assert cluster.run(5)["slow"].verdict == "healthy"


def test_a_report_that_comes_twice_or_late_changes_nothing() -> None:
    monitor = Monitor(CONFIG, 0.0)
    for name in ("a", "b"):
        monitor.observe(name, "p", Report())
        monitor.observe(name, "p", Report(20, 160, 160.0, 0.0, 0.0))
        monitor.observe(name, "p", Report(20, 160, 160.0, 0.0, 0.0))
        monitor.observe(name, "p", Report(10, 80, 8000.0, 0.0, 0.0))
    monitor.close_window(CONFIG.window_s)
    assert monitor.health["a"].tasks_per_s == pytest.approx(1000.0)


def test_a_window_without_reports_says_nothing_new() -> None:
    cluster = Cluster(healthy())
    before = dict(cluster.run(5))
    assert cluster.monitor.close_window(1000.0)
    assert cluster.monitor.health == before


def test_a_window_is_cut_short_once_everybody_reports_that_somebody_became_slow() -> None:
    cluster = Cluster({**healthy(), "slow": slow_between(5, 10_000)})
    cluster.run(5)
    began_s = cluster.window * CONFIG.window_s
    for name, times_ms in cluster.times_ms.items():
        assert not cluster.monitor.close_window(began_s + 0.5 * CONFIG.window_s)
        old, parts = cluster.reports[name], [ms * TASKS for ms in times_ms(5)]
        cluster.reports[name] = Report(
            old.step + 1, old.tasks_done + TASKS, old.compute_ms + parts[0],
            old.data_wait_ms + parts[1], old.communication_ms + parts[2],
        )  # fmt: skip
        cluster.monitor.observe(name, "p0", cluster.reports[name])
    assert not cluster.monitor.close_window(began_s + 0.1 * CONFIG.window_s)
    assert cluster.monitor.close_window(began_s + 0.5 * CONFIG.window_s)
    slow = cluster.monitor.health["slow"]
    assert slow.verdict == "healthy"
    assert slow.tasks_per_s_newest == pytest.approx(1000 / 4.1)
    # What a window tells of hardware and of ten minutes, only whole windows do.
    assert "slow in 1 of 6" in cluster.run(1)["slow"].evidence


def test_a_new_process_has_a_speed_also_before_its_first_whole_window() -> None:
    cluster = Cluster({**healthy(), "slow": slow_between(5, 10_000)})
    cluster.run(5)
    cluster.restart("w0")
    now_s = cluster.window * CONFIG.window_s + 0.5 * CONFIG.window_s
    for name, times_ms in cluster.times_ms.items():
        old, parts = cluster.reports[name], [ms * TASKS for ms in times_ms(5)]
        added = (1, TASKS, *parts, 0.0)
        report = Report(*(a + b for a, b in zip(old, added, strict=True)))  # type: ignore[arg-type]
        cluster.monitor.observe(name, cluster.incarnations[name], report)
    assert cluster.monitor.close_window(now_s)
    assert cluster.monitor.health["w0"].tasks_per_s_long == pytest.approx(1000 / 1.1)


def test_a_healthy_cluster_cuts_no_window_short() -> None:
    cluster = Cluster(healthy(4))
    cluster.run(5)
    for name, old in cluster.reports.items():
        report = old._replace(
            tasks_done=old.tasks_done + TASKS, compute_ms=old.compute_ms + 1.4 * TASKS
        )
        cluster.monitor.observe(name, "p0", report)
    assert not cluster.monitor.close_window(cluster.window * CONFIG.window_s + 2.0)


def test_a_window_is_closed_once_its_time_is_over() -> None:
    monitor = Monitor(CONFIG, 100.0)
    assert not monitor.close_window(100.0 + 0.9 * CONFIG.window_s)
    assert monitor.close_window(100.0 + CONFIG.window_s)
    assert not monitor.close_window(100.0 + 1.5 * CONFIG.window_s)


@pytest.mark.parametrize("num_values", [1, 2, 3, 4, 7, 10])
def test_medians_of_the_others_are_those_of_a_plain_loop(num_values: int) -> None:
    values = [random.Random(num_values).random() for _ in range(num_values)]
    if num_values > 2:
        values[0] = values[1]
    expected = [
        median(values[:i] + values[i + 1 :]) if num_values > 1 else values[0]
        for i in range(num_values)
    ]
    assert _medians_of_others(values) == pytest.approx(expected)


def test_ten_thousand_healthy_windows_give_at_most_ten_false_verdicts() -> None:
    """Noise of 15 % from window to window, and every 200th window three times slower (a garbage
    collection, a checkpoint, a noisy neighbour for a moment)."""
    noise = random.Random(7)

    def noisy(window: int) -> tuple[float, float, float]:
        spike = 3.0 if noise.random() < 1 / 200 else 1.0
        return (noise.lognormvariate(0.0, 0.15) * spike, 0.1, 0.1)

    cluster = Cluster({f"w{i}": noisy for i in range(8)})
    false = sum(one.verdict in STRAGGLERS for _ in range(1250) for one in cluster.run(1).values())
    assert false <= 10  # 0.1 % of 8 x 1,250


def test_a_straggler_stays_one_while_the_others_have_nothing_left_to_do() -> None:
    cluster = Cluster({"a": steady(), "b": steady(), "c": steady(), "slow": steady(4.0)})
    assert cluster.run(3)["slow"].verdict == "transient"
    assert cluster.run(6, "a", "b", "c")["slow"].verdict == "transient"
    assert cluster.monitor.health["a"].verdict == "healthy"


def test_who_becomes_slow_at_the_end_of_the_data_is_held_against_what_idle_workers_did() -> None:
    late = Cluster({"a": steady(), "b": steady(), "late": lambda w: (1.0 if w < 3 else 4.0, 0, 0)})
    assert late.run(3)["late"].verdict == "healthy"
    assert late.run(3, "a", "b")["late"].verdict == "transient"
