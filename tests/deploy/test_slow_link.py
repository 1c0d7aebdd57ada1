"""A rank behind a slow link, on several hosts with a real one: the monitor names it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gmeta.agent import MEETINGS_PER_STEP
from gmeta.antdt.monitor import Monitor, MonitorConfig, Report
from tests.commands import environment
from tests.deploy.network import INTERFACE, Host, NoNamespacesError, hosts
from tests.waiting import PATIENCE_S

NUM_RANKS, SLOW_RANK = 3, 2
PROBE = """
import json, sys, torch.distributed as dist
from gmeta.parallel.links import LinkProbe
from gmeta.parallel.ranks import start_ranks, stop_ranks
store, out, world_size = sys.argv[1], sys.argv[2], int(sys.argv[3])
ranks = start_ranks("cpu", 240, dist.FileStore(store, world_size))
probe = LinkProbe(ranks)
swaps_s = [probe.swap_s() for _ in range(5)]
with open(f"{out}/{ranks.rank}.json", "w") as file:
    json.dump(swaps_s, file)
stop_ranks()
"""


@pytest.fixture
def network() -> Iterator[list[Host]]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(hosts(NUM_RANKS + 1))
        except NoNamespacesError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made


def swaps_of(nodes: list[Host], folder: Path) -> list[list[float]]:
    """Seconds of five swaps of each rank, one rank a host."""
    processes = []
    for rank, host in enumerate(nodes):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        command = [sys.executable, "-c", PROBE, str(folder / "store"), str(folder), str(len(nodes))]
        processes.append(
            subprocess.Popen(host.command(*command), env={**environment(), **variables})
        )
    assert [process.wait(PATIENCE_S) for process in processes] == [0] * len(nodes)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(nodes))]


@pytest.mark.distributed
def test_a_slow_link_is_told_from_waiting_for_one(network: list[Host], tmp_path: Path) -> None:
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
    swaps_s = [min(of_rank) for of_rank in swaps_of(nodes, tmp_path)]
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
    assert {said[f"rank{rank}"] for rank in range(NUM_RANKS) if rank != SLOW_RANK} == {
        ("healthy", "")
    }
