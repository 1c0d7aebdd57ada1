"""What a plan is said to cost, against sums by hand and against what the exchange itself counts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gmeta.config.sharding import ShardingConfig
from gmeta.config.train_config import OuterConfig, TrainConfig
from gmeta.distributed.cluster_spec import Cluster, Speeds
from gmeta.distributed.exchange.planning import Routes, Shard
from gmeta.distributed.exchange.wire import KINDS
from gmeta.distributed.sharding_estimate import (
    OWN_ROW_BYTES,
    OWN_SLOT_BYTES,
    RESERVED,
    ShardingEstimate,
    StepWork,
    estimate,
    suggest_fits,
)
from gmeta.distributed.sharding_plan import describe_plan, merge_plans, plan_on
from gmeta.distributed.tables.row_slots import RowSlots
from gmeta.distributed.unsharded import make_unsharded_tables
from gmeta_models.model_config import ModelConfig
from metaio.format.features import Features, FeatureSpec, TableSpec

GB = 10**9
SPEEDS = Speeds(hbm=4e12, pcie=5e10, nvlink=3e11, network=5e10, flops=6e13)
ROWS = {"item": GB, "user": 3 * 10**8, "city": 64_000}


def features_of(rows: dict[str, int]) -> Features:
    tables = tuple(TableSpec(name, count) for name, count in rows.items())
    return Features(tables, tuple(FeatureSpec(name, name) for name in rows), (), ())


def estimated(
    sharding: ShardingConfig,
    gpus: int,
    outer: OuterConfig = OuterConfig(),  # noqa: B008 - frozen
    rows: dict[str, int] = ROWS,
    ids: float = 1000.0,
    width: int = 32,
    row_counts: int = 0,
) -> tuple[ShardingEstimate, dict[str, object], Cluster]:
    config = TrainConfig(model=ModelConfig(embedding_dim=width), outer=outer, sharding=sharding)
    cluster = Cluster(gpus, min(gpus, 8), "cuda", 80 * GB, 125 * GB)
    tables = make_unsharded_tables(features_of(rows), config.model, config.outer)
    plan = merge_plans(plan_on(tables, sharding, 4096, cluster))
    described = describe_plan(plan, gpus, sharding)
    step = StepWork(64, 2560, dict.fromkeys(rows, ids), 6e9, 100_000, row_counts)
    sizes = {name: (count, width) for name, count in rows.items()}
    return estimate(described, sizes, sharding, outer, step, cluster, SPEEDS), described, cluster


@pytest.mark.parametrize("gpus", [8, 64])
@pytest.mark.parametrize("default", ["row_wise", "table_wise", "planner"])
@pytest.mark.parametrize(
    ("optimizer", "of_value", "of_row"),
    [("sgd", 4, 0), ("rowwise_adagrad", 4, 4), ("adam", 12, 0), ("partial_rowwise_adam", 8, 4)],
)
def test_the_gpus_hold_each_row_with_its_optimizer_once(
    gpus: int, default: str, optimizer: str, of_value: int, of_row: int
) -> None:
    outer = replace(OuterConfig(), sparse_optimizer=optimizer)
    # Smaller for the planner, which must find room for whole tables' kinds too.
    found, _, _ = estimated(ShardingConfig(default=default), gpus, outer)  # type: ignore[arg-type]
    by_hand = sum(rows * (32 * of_value + of_row) for rows in ROWS.values())
    assert (found.device_bytes_W - found.fixed_bytes).sum() == pytest.approx(by_hand, rel=1e-12)
    assert sum(table["bytes"] for table in found.tables.values()) == pytest.approx(by_hand)
    assert not found.host_bytes_W.any()


def test_counts_of_rows_are_in_the_bytes() -> None:
    without, counted = (
        estimated(ShardingConfig(), 8, row_counts=number)[0].device_bytes_W.sum()
        for number in (0, 2)
    )
    assert counted - without == pytest.approx(sum(8 * rows for rows in ROWS.values()))


@pytest.mark.parametrize("gpus", [2, 8])
@pytest.mark.parametrize(
    "sharding",
    [
        ShardingConfig(),
        ShardingConfig(default="table_wise"),
        ShardingConfig(default="column_wise"),
        ShardingConfig(tables=("user=table_wise",), wire_dtype="bfloat16"),
    ],
)
def test_bytes_on_the_wire_are_as_the_exchange_counts(gpus: int, sharding: ShardingConfig) -> None:
    """Every rank asks for all rows: of such ids each shard has its share to the last one."""
    rows = {"item": 6400, "user": 640, "city": 64}
    outer = replace(OuterConfig(), sparse_optimizer="adagrad")
    _, described, _ = estimated(sharding, gpus, outer, rows, width=64)
    shards = [
        Shard(
            KINDS.index(table["kind"]), place, shard["columns"][0],
            shard["columns"][1] - shard["columns"][0], shard["rows"][0],
            shard["rows"][1] - shard["rows"][0], shard["rank"],
        )
        for place, table in enumerate(described["tables"].values())  # type: ignore[attr-defined]
        for shard in table["shards"]
    ]  # fmt: skip
    ids_U = torch.cat([torch.arange(count) for count in rows.values()])
    lengths_B = torch.tensor(list(rows.values()))
    ids, values = 0, 0
    for rank in range(gpus):
        routes = Routes(shards, rank, gpus)
        asked = routes.make_request(ids_U, lengths_B)
        is_remote_Y = ~routes.is_of_peer_YW[:, -1].astype(bool)
        ids += asked.row_of_shard.element_size() * int(asked.counts_Y[is_remote_Y].sum())
        values += int((asked.counts_Y * routes.columns_Y)[is_remote_Y].sum())
    step = StepWork(1, 1, {name: float(count) for name, count in rows.items()}, 0.0, 0)
    sizes = {name: (count, 64) for name, count in rows.items()}
    cluster = Cluster(gpus, gpus, "cuda", GB, GB)
    found = estimate(described, sizes, sharding, outer, step, cluster, SPEEDS)
    told = found.tables.values()
    assert sum(table["id_bytes_per_step"] for table in told) * gpus == pytest.approx(ids)
    size = 2 if sharding.wire_dtype == "bfloat16" else 4
    rows_sent = sum(table["row_bytes_per_step"] for table in told) * gpus
    assert rows_sent == pytest.approx(2 * size * values)  # rows, and their gradients


def test_tables_that_every_rank_holds_send_no_rows_but_their_gradients_sum() -> None:
    sharding = ShardingConfig(exchange="torchrec", default="data_parallel")
    found, _, _ = estimated(sharding, 16, rows={"city": 640})
    assert found.parts["rows and gradients, NVLink"] == (0.0, 0.0)
    assert found.parts["rows and gradients, network"] == (0.0, 0.0)
    reduced, _ = found.parts["AllReduce of the layers, network"]
    assert reduced == pytest.approx(2 * 4 * (100_000 + 640 * 32) * 15 / 16)


def test_a_host_has_seven_near_ranks_of_64() -> None:
    found, _, _ = estimated(ShardingConfig(), 64, ids=6400.0, rows={"item": GB})
    given = 6400 * 32 * 4 / 64  # by each rank to each other
    near, near_s = found.parts["rows and gradients, NVLink"]
    far, far_s = found.parts["rows and gradients, network"]
    assert (near, far) == pytest.approx((2 * 7 * given, 2 * 56 * given))
    assert (near_s, far_s) == pytest.approx((near / 3e11, far / 5e10))
    reduced, reduced_s = found.parts["AllReduce of the layers, network"]
    assert reduced == pytest.approx(2 * 4 * 100_000 * 63 / 64)
    assert found.step_s == pytest.approx(sum(seconds for _, seconds in found.parts.values()))
    assert found.parts["layers, forward and backward"][1] == pytest.approx(1e-4)
    assert reduced_s == pytest.approx(reduced / 5e10)


@pytest.mark.parametrize("placement", ["uvm", "uvm_cached"])
def test_in_the_hosts_memory_a_gpu_keeps_row_states_and_the_cache(placement: str) -> None:
    sharding = ShardingConfig(exchange="torchrec", placement=placement)  # type: ignore[arg-type]
    found, _, _ = estimated(sharding, 8, rows={"item": 8 * GB})
    np.testing.assert_allclose(found.host_bytes_W, GB * 32 * 4)
    cache = GB * (0.2 * 32 * 4 + 4 + 0.2 * 16) if placement == "uvm_cached" else 0
    on_device = found.device_bytes_W - found.fixed_bytes
    np.testing.assert_allclose(on_device, GB * 4 + cache)
    assert found.parts["tables, in the host's memory"][0] == pytest.approx(1000 * 32 * 4 * 2)


@pytest.mark.parametrize("placement", ["host", "file"])
def test_of_tables_beyond_it_a_gpu_keeps_the_cache_and_its_host_the_places(placement: str) -> None:
    sharding = ShardingConfig(placement=placement, cache_share=0.05)  # type: ignore[arg-type]
    outer = replace(OuterConfig(), sparse_optimizer="rowwise_adagrad")
    found, described, _ = estimated(sharding, 8, outer, rows={"item": 8 * GB})
    assert described["tables"]["item"]["placement"] == placement  # type: ignore[index]
    row_bytes = 32 * 4 + 4
    in_file, on_host = (GB * row_bytes * (placement == there) for there in ("file", "host"))
    np.testing.assert_allclose(found.file_bytes_W, in_file)
    np.testing.assert_allclose(found.device_bytes_W - found.fixed_bytes, 0.05 * GB * row_bytes)
    slots = RowSlots(1000, 1000)
    kept = [value for value in vars(slots).values() if isinstance(value, np.ndarray)]
    of_slots = sum(value.nbytes for value in kept if value.size) / 1000
    # 4 more of a slot find rows that repeat.
    assert of_slots + 4 == OWN_ROW_BYTES + OWN_SLOT_BYTES
    places = GB * (OWN_ROW_BYTES + 0.05 * OWN_SLOT_BYTES)
    np.testing.assert_allclose(found.host_bytes_W, on_host + places)


def test_what_would_fit_does_and_a_step_less_does_not() -> None:
    rows = {"item": 8 * GB}
    found, _, cluster = estimated(ShardingConfig(), 8, rows=rows)
    assert found.device_bytes_W.max() > 0.85 * cluster.device_bytes
    ways = suggest_fits(found, range(4, 32, 4), OuterConfig(), ShardingConfig(), cluster)
    # The host has 125 GB for a GPU, the tables would take 132.
    in_file = 'sharding.placement = "file"'
    assert ways == ["--gpus 16", "model.embedding_dim = 12", in_file]
    usable = (1 - RESERVED) * cluster.device_bytes
    assert estimated(ShardingConfig(), 16, rows=rows)[0].device_bytes_W.max() <= usable
    for width, fits in ((12, True), (16, False)):
        there, _, _ = estimated(ShardingConfig(), 8, rows=rows, width=width)
        assert (there.device_bytes_W.max() <= usable) == fits
    torchrecs, roomy = ShardingConfig(exchange="torchrec"), replace(cluster, host_bytes=140 * GB)
    ways = suggest_fits(found, (), OuterConfig(), torchrecs, roomy)
    assert ways[-1] == 'sharding.placement = "uvm_cached"'
    assert "placement" not in suggest_fits(found, (), OuterConfig(), torchrecs, cluster)[-1]
    whole, _, _ = estimated(ShardingConfig(default="table_wise"), 8, rows={"item": 10**9})
    ways = suggest_fits(whole, (), OuterConfig(), ShardingConfig(), cluster)
    assert ways == ['sharding.default = "row_wise"']
