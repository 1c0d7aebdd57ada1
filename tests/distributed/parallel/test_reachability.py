"""Nodes that do not reach each other, in network namespaces; ranks that are slow."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, Store

from gmeta.distributed import reachability
from gmeta.distributed.link_probe import find_slow_ranks
from gmeta.distributed.reachability import check_nodes, own_address
from gmeta.errors import GMetaError, UserError
from tests.deploy.network import Host, NoNamespacesError, _ip, hosts


@pytest.fixture
def network() -> Iterator[list[Host]]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(hosts(4))
        except NoNamespacesError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made[1:]


def told(
    folder: Path, network: Sequence[Host], absent: tuple[int, ...] = (), patience_s: float = 240.0
) -> list[str]:
    """What each node ends with, "" for nothing; each is a thread in a host of its own."""
    said = [""] * len(network)

    def work(node: int, host: Host) -> None:
        host.enter()
        store: Store = FileStore(str(folder / "store"), -1)
        store.set_timeout(timedelta(seconds=patience_s))
        try:
            check_nodes(store, node, len(network), host.address)
        except GMetaError as error:
            said[node] = str(error)

    threads = [
        threading.Thread(target=work, args=at) for at in enumerate(network) if at[0] not in absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_nodes_that_reach_each_other_are_told_nothing(tmp_path: Path, network: list[Host]) -> None:
    assert told(tmp_path, network) == ["", "", ""]


def test_a_pair_that_a_firewall_parts_is_named_on_every_node(
    tmp_path: Path, network: list[Host]
) -> None:
    _ip("-n", network[2].namespace, "route", "add", "blackhole", network[1].address)
    said = told(tmp_path, network)
    assert len(set(said)) == 1
    assert f"node 2 ({os.uname().nodename}, {network[2].address}) does not reach node 1" in said[0]


def test_a_node_without_a_cable_is_named(
    tmp_path: Path, network: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "CONNECT_S", 1.0)
    network[0].pull_cable()
    said = told(tmp_path, network)
    named = f"does not reach node 0 ({os.uname().nodename}, {network[0].address}) (3 more such"
    assert f"{named} pairs): no answer within 1 s. See whether that host runs" in said[1]


def test_a_node_that_does_not_come_is_named(tmp_path: Path, network: list[Host]) -> None:
    said = told(tmp_path, network, absent=(1,), patience_s=5)
    assert said[0].startswith("node 1 of 3 says nothing. See whether that host runs")


def test_a_name_that_stands_for_another_host_is_told_of(tmp_path: Path) -> None:
    store: Store = FileStore(str(tmp_path / "store"), -1)
    with pytest.raises(UserError, match=r"stands for 192\.0\.2\.1, which is no address of its own"):
        check_nodes(store, 0, 2, "192.0.2.1")


def test_the_address_is_that_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == "127.0.0.1"


def test_slow_links_and_processors_are_named() -> None:
    usual = ("a", 0.001, 0.01)
    assert list(find_slow_ranks([usual, usual, ("b", 0.003, 0.03)])) == []
    assert list(find_slow_ranks([usual, usual, ("b", 0.005, 0.01), ("c", 0.001, 0.05)])) == [
        "rank 2 on b is slow, and all ranks will wait for it: its network link takes 5 ms where "
        "most take 1",
        "rank 3 on c is slow, and all ranks will wait for it: its processor takes 50 ms where most "
        "take 10",
    ]
    assert list(find_slow_ranks([("a", 0.0, 0.01), ("b", 0.0, 0.01)])) == []  # two: no link's time
