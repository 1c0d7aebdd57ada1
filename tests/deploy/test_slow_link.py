"""A rank behind a slow link, on several hosts with a real one: the monitor names it."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gmeta.antdt.monitor import Monitor
from gmeta.antdt.reports import MonitorConfig, Report
from gmeta.distributed.link_probe import LinkProbe
from gmeta.distributed.ranks import Ranks
from gmeta.feeds.step_agent import MEETINGS_PER_STEP
from tests.deploy.network import INTERFACE, Host, NoNamespacesError, hosts
from tests.distributed.harness import on_ranks

NUM_RANKS, SLOW_RANK = 3, 2


@pytest.fixture
def network() -> Iterator[list[Host]]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(hosts(NUM_RANKS + 1))
        except NoNamespacesError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made


def swaps_of(nodes: list[Host]) -> list[list[float]]:
    """Seconds of five swaps of each rank, one rank a host."""
    return on_ranks(len(nodes), _swaps, hosts=nodes)


def _swaps(ranks: Ranks) -> list[float]:
    probe = LinkProbe(ranks)
    return [probe.swap_s() for _ in range(5)]


@pytest.mark.distributed
def test_a_slow_link_is_told_from_waiting_for_one(network: list[Host]) -> None:
    nodes = network[1:]
    slowed = subprocess.run(
        nodes[SLOW_RANK].command(
            "tc", "qdisc", "add", "dev", INTERFACE, "root",
            "tbf", "rate", "4mbit", "burst", "32kbit", "latency", "400ms",
        ),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if slowed.returncode:
        pytest.skip(f"no traffic shaping here: {slowed.stderr.strip()}")
    swaps_s = [min(of_rank) for of_rank in swaps_of(nodes)]
    others_s = [swap_s for rank, swap_s in enumerate(swaps_s) if rank != SLOW_RANK]
    # 64 KiB at 4 Mbit/s take 131 ms: far more than a busy machine lets a rank wait for its turn.
    assert swaps_s[SLOW_RANK] > 0.1
    assert swaps_s[SLOW_RANK] > 4 * max(others_s)

    monitor = Monitor(MonitorConfig(), 0.0)
    for window in range(4):
        for rank, swap_s in enumerate(swaps_s):
            steps = 10 * window
            transfers_ms = 1000 * MEETINGS_PER_STEP * swap_s * steps
            report = Report(steps, 8 * steps, 50.0 * steps, 0.0, transfers_ms)
            monitor.observe(f"rank{rank}", "p0", report)
        monitor.close_window(2.5 * window)
    said = {name: (health.verdict, health.cause) for name, health in monitor.health.items()}
    assert said[f"rank{SLOW_RANK}"] == ("transient", "network")
    expected = {("healthy", "")}
    assert {said[f"rank{rank}"] for rank in range(NUM_RANKS) if rank != SLOW_RANK} == expected
