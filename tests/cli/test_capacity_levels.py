"""`gmeta plan` with groups of ranks: what they hold and send, and what it compares them with."""

from pathlib import Path

import numpy as np
import pytest

from gmeta.cli.capacity import plan_capacity
from gmeta.distributed.cluster_spec import CapacityOverrides, Cluster
from gmeta.errors import ConfigError
from metaio import open_dataset
from tests.cli.test_capacity import GB, SPEEDS, cluster_of, config_of
from tests.support.refusals import catch_message

GROUPS = {"sharding": {"groups": 2}}
NETWORK = "rows between groups, network"


def test_every_group_holds_the_tables_and_tells_the_others_of_the_rows_that_it_touches(
    click_logs: Path,
) -> None:
    """A step of all tasks: then a group's rows are those of half of them, counted here by hand."""
    dataset = open_dataset(str(click_logs))
    num_tasks = dataset.split("train").num_episodes
    data = {"path": str(click_logs), "tasks_per_step": num_tasks}
    flat = plan_capacity(
        config_of(click_logs, data=data), CapacityOverrides({}), cluster_of(16), SPEEDS
    )
    two = plan_capacity(
        config_of(click_logs, data=data, **GROUPS), CapacityOverrides({}), cluster_of(16), SPEEDS
    )
    held = [one.estimate.device_bytes_W - one.estimate.fixed_bytes for one in (flat, two)]
    assert held[1].sum() == pytest.approx(held[0].sum(), rel=0.05)  # of one of its two groups
    assert len(held[1]) == 8
    # Of two groups each sends every row that it touches once, with its number.
    by_width = two.estimate.tables.values()
    most = sum(table["rows"] * (table["width"] * 4 + 4) for table in by_width) / 8
    sent, seconds = two.estimate.parts[NETWORK]
    assert 0.5 * most < sent <= most
    assert seconds == pytest.approx(sent / SPEEDS.network)
    assert NETWORK not in flat.estimate.parts


def test_one_two_and_as_many_groups_as_fit_are_compared() -> None:
    rows = CapacityOverrides({"item": GB, "user": 3 * 10**8}, rows_per_task=40)
    config = config_of(Path("nowhere"), outer={"sparse_optimizer": "rowwise_adagrad"})
    found = plan_capacity(config, rows, cluster_of(64), SPEEDS)
    # 1.3 billion rows of 8 + 1 numbers: 47 GB fit on one host of 8 GPUs, even on each.
    levels = [(one.groups, one.sync_every) for one, _ in found.levels]
    assert levels == [(1, 1), (2, 1), (2, 10), (8, 1), (8, 10)]
    memory = [float(one.device_bytes_W.max() - one.fixed_bytes) for _, one in found.levels]
    assert np.array(memory) / memory[0] == pytest.approx([1, 2, 2, 8, 8])
    # Without data no two tasks share a row: all other groups must hear of each.
    flat, *_, exact, _ = (one.network_bytes for _, one in found.levels)
    assert exact > 3 * flat
    assert not plan_capacity(config, rows, cluster_of(8), SPEEDS).levels


def test_groups_in_which_the_tables_do_not_fit_are_too_many() -> None:
    rows = CapacityOverrides({"item": 10 * GB}, rows_per_task=40)
    config = config_of(Path("nowhere"), sharding={"groups": 8})
    cluster = Cluster(64, 8, "cuda", 40 * GB, 125 * GB)
    message = catch_message(ConfigError, plan_capacity, config, rows, cluster, SPEEDS)
    assert message.endswith("What would fit: sharding.groups = 4")
