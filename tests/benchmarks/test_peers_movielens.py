"""The comparison as a user runs it: help, line of JSON, what it says without the peers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from peers_movielens import speedup, speedups_of, summary

from tests.support.waiting import PATIENCE_S

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "peers_movielens.py"


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )


def steady(samples_per_s: float) -> list[float]:
    return [samples_per_s] * 3


@pytest.fixture(scope="module")
def without_packages(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    nowhere = tmp_path_factory.mktemp("empty")
    paths = ["--peers-env", str(nowhere / "venv"), "--movielens", str(nowhere)]
    sizes = ["--rows-per-table", "2000", "--rounds", "1", "--threads", "1", "--quick"]
    return run_script(*paths, *sizes, "--peers", "gmeta", "vmap", "learn2learn")


def test_peers_that_need_only_torch_run_without_the_others(
    without_packages: subprocess.CompletedProcess[str],
) -> None:
    assert without_packages.returncode == 0, without_packages.stderr
    figures = json.loads(without_packages.stdout.splitlines()[-1])
    assert figures["benchmark"] == "peers_movielens"
    for workload in ("movielens", "large"):
        samples_per_s = figures["samples_per_s"][workload]["1"]
        assert list(samples_per_s) == ["gmeta", "loop", "vmap"]
        assert min(samples_per_s.values()) > 0
        for name, (lowest, highest) in figures["samples_per_s_range"][workload]["1"].items():
            assert lowest <= samples_per_s[name] <= highest
    assert figures["speedup_vs_learn2learn"] is None
    assert figures["speedup_vs_best_peer"] > 0
    assert figures["best_peer"] in ("loop", "vmap")
    assert figures["rows_per_table"] == 2000
    assert figures["versions"]["gmeta"].keys() == {"torch", "torchrec"}


def test_a_missing_environment_is_named_with_the_command_that_makes_it(
    without_packages: subprocess.CompletedProcess[str],
) -> None:
    (reason,) = json.loads(without_packages.stdout.splitlines()[-1])["missing"].values()
    assert reason.endswith("/venv does not exist")
    lines = without_packages.stdout.splitlines()
    assert f"learn2learn is left out: {reason}." in lines
    assert "Install the peers with: python benchmarks/peers_movielens.py --setup" in lines


def test_gmeta_gives_the_plain_loops_gradients_and_losses(
    without_packages: subprocess.CompletedProcess[str],
) -> None:
    # The script stops with status 1 at the first peer that does not.
    agreed = [one.split(";")[0] for one in without_packages.stdout.splitlines() if "agree" in one]
    assert agreed == ["movielens: 3 peers agree", "large: 3 peers agree"]


def test_a_speedup_is_against_the_fastest_other() -> None:
    found = {"gmeta": steady(30), "loop": steady(10), "learn2learn": steady(5), "jax": steady(20)}
    assert speedups_of(found) == {"vs_learn2learn": 6.0, "vs_best_peer": 1.5, "best_peer": "jax"}


def test_a_speedup_is_that_of_a_round_as_a_slow_minute_falls_on_both() -> None:
    ours, theirs = [10.0, 30.0, 90.0], [10.0, 20.0, 30.0]
    assert speedup(ours, theirs) == 1.5
    alone = [10.0, 20.0]  # in rounds of its own
    assert speedup(ours, alone) == 2


def test_the_reported_speedups_are_the_worst_of_all_workloads_and_threads() -> None:
    slow = {"gmeta": steady(30), "jax": steady(40), "learn2learn": steady(20)}
    fast = {"gmeta": steady(90), "jax": steady(30), "learn2learn": steady(10)}
    figures = summary({"movielens": {"1": fast, "2": slow}, "large": {"1": fast}})
    assert figures["speedup_vs_learn2learn"] == 1.5
    assert figures["speedup_vs_best_peer"] == 0.75
    assert figures["best_peer"] == "jax"
    assert figures["samples_per_s"]["movielens"]["2"] == {"gmeta": 30, "jax": 40, "learn2learn": 20}
