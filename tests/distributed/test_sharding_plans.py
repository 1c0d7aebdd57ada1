"""The plan decides where rows live, never what is trained: every kind, 1, 2 and 4 gloo ranks."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingCollection, EmbeddingConfig

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.sharding import (
    DefaultKind,
    Placement,
    ShardingConfig,
    check_sharding,
    kinds_of_tables,
    sharding_to_evaluate,
)
from gmeta.config.train_config import OuterConfig, RunConfig, TrainConfig
from gmeta.distributed.cluster_spec import Cluster
from gmeta.distributed.optim.optimizers import build_optimizer
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import shard_learner, table_shards
from gmeta.distributed.sharding_plan import (
    check_clipping,
    check_lookups,
    describe_in_words,
    describe_plan,
    make_plan,
    merge_plans,
    plan_on,
)
from gmeta.distributed.torchrec_planner import NoPlaceError
from gmeta.errors import ConfigError
from gmeta.runs.build import build_learner
from gmeta.runs.checkpoints.checkpoint_writer import CheckpointWriter
from gmeta.runs.checkpoints.loader import load_checkpoint
from gmeta.runs.run_progress import RunProgress
from gmeta_models import ModelConfig
from metaio.read.batch import TaskBatch
from tests.distributed.harness import on_ranks, steps_of
from tests.support import reference
from tests.support.refusals import catch_message

MODEL = ModelConfig(name="melu", embedding_dim=16, hidden=(5,))
FEATURES = reference.some_features(2, 2, 1)
ALGORITHM = AlgorithmConfig(name="maml", inner_lr=0.1)
PLANS = {
    "row_wise": ShardingConfig(),
    "table_wise": ShardingConfig(default="table_wise"),
    "column_wise": ShardingConfig(default="column_wise"),
    "mixed": ShardingConfig(tables=("s1=table_wise", "m0=column_wise")),
    "planner": ShardingConfig(default="planner", tables=("s0=column_wise",)),
}
# Tables of three widths; columns of 4 and 8 are too few for every rank to hold some.
NARROW = replace(MODEL, widths=("s1=8", "m1=4"))
CASES = {name: (name, MODEL) for name in PLANS} | {
    f"{name}, narrow": (name, NARROW) for name in PLANS if name not in ("column_wise", "table_wise")
}
STEPS, CHECKPOINT_STEP = 3, 2


def batches_of_rank(ranks: Ranks) -> list[TaskBatch]:
    """Every rank another number of tasks; all ranks together the same at any world size."""
    rng = random.Random(4)
    batches = []
    for _ in range(STEPS):
        tasks = [reference.random_task(FEATURES, 3, 2, rng) for _ in range(7)]
        share = slice(7 * ranks.rank // ranks.world_size, 7 * (ranks.rank + 1) // ranks.world_size)
        batches.append(reference.batch_of(tasks[share], FEATURES))
    return batches


class Run:
    """A learner under a plan, and what its training gave so far."""

    def __init__(
        self, ranks: Ranks, plan: str, dense_optimizer: Literal["adam", "sgd"] = "adam",
        algorithm: AlgorithmConfig = ALGORITHM, model: ModelConfig = MODEL,
    ) -> None:  # fmt: skip
        outer = OuterConfig(
            dense_optimizer=dense_optimizer,
            dense_lr=0.01,
            sparse_optimizer="adagrad",
            sparse_lr=0.1,
            sparse_weight_decay=0.5,
        )
        config = TrainConfig(model=model, outer=outer, sharding=PLANS[plan], run=RunConfig(seed=11))
        torch.manual_seed(3)
        self.ranks, self.config = ranks, config
        self.learner = build_learner(FEATURES, model, algorithm, "bce")
        self.sharded = shard_learner(self.learner, FEATURES, config, ranks)
        self.optimizer = build_optimizer(self.sharded, outer)
        self.losses: list[float] = []

    def train(self, first: int, end: int) -> None:
        batches = iter(batches_of_rank(self.ranks)[first:end])
        for episodes, totals in steps_of(batches, self.learner.collate, FEATURES, self.ranks):
            loss = self.sharded(episodes, self.ranks.world_size / totals.num_terms)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())

    def result(self) -> dict[str, Any]:
        layers = {name: value.detach() for name, value in self.learner.named_parameters()}
        return {"losses": self.losses, "layers": layers, "tables": local_parts(self.sharded)}


def local_parts(sharded: torch.nn.Module) -> dict[str, list[tuple[list[int], Tensor]]]:
    """(offsets, values) of this rank's parts of every table."""
    return {
        name: [(s.metadata.shard_offsets, s.tensor.clone()) for s in table.local_shards()]
        for name, table in table_shards(sharded).items()
    }


def work_on_rank(ranks: Ranks, folder: Path) -> dict[str, dict[str, Any]]:
    """Trains under every plan; 4 ranks go on from what 2 ranks left under the plan before."""
    results: dict[str, dict[str, Any]] = {}
    for name, (plan, model) in CASES.items():
        run = Run(ranks, plan, model=model)
        start = run.result()["tables"]
        run.train(0, CHECKPOINT_STEP)
        checkpoint = folder / f"{ranks.world_size}-{name}"
        writer = CheckpointWriter(checkpoint, run.sharded, run.optimizer, run.config, ranks)
        writer.save(RunProgress(step=CHECKPOINT_STEP))
        writer.finish()
        run.train(CHECKPOINT_STEP, STEPS)
        results[name] = {"start": start, **run.result()}
    if ranks.world_size == 4:
        for name, (plan, model) in CASES.items():
            # Another plan's of the same widths: that of the case before, the first's of the last.
            alike = [other for other, (_, its) in CASES.items() if its == model]
            before = alike[alike.index(name) - 1]
            run = Run(ranks, plan, model=model)
            saved = folder / f"2-{before}" / "step-00000002"
            load_checkpoint(saved, run.sharded, run.optimizer, ranks)
            run.train(CHECKPOINT_STEP, STEPS)
            results[f"{name} after {before}"] = run.result()
    return results


def whole(results: list[dict[str, Any]], key: str) -> dict[str, Tensor]:
    """Every table, put together from the parts of all ranks."""
    tables = {}
    for name in results[0][key]:
        parts = [part for result in results for part in result[key][name]]
        ends = [[o + n for o, n in zip(at, v.shape, strict=True)] for at, v in parts]
        tables[name] = torch.full([max(size) for size in zip(*ends, strict=True)], torch.nan)
        for (row, column), (end_row, end_column), (_, values) in zip(
            [at for at, _ in parts], ends, parts, strict=True
        ):
            tables[name][row:end_row, column:end_column] = values
    return tables


@pytest.mark.distributed
def test_each_plan_trains_the_same_model_at_any_size_from_any_checkpoint(tmp_path: Path) -> None:
    by_world = {world: on_ranks(world, work_on_rank, tmp_path) for world in (1, 2, 4)}
    for results in by_world.values():
        for name in results[0]:
            mine = [result[name] for result in results]
            widths = ", narrow" if "narrow" in name else ""
            expected = [by_world[1][0][f"row_wise{widths}"]]
            if "start" in mine[0]:
                for table, rows in whole(expected, "start").items():
                    assert torch.equal(whole(mine, "start")[table], rows), name
            for table, rows in whole(expected, "tables").items():
                torch.testing.assert_close(
                    whole(mine, "tables")[table], rows, rtol=0, atol=2e-6, msg=f"{name}: {table}"
                )
            for layer, value in expected[0]["layers"].items():
                torch.testing.assert_close(mine[0]["layers"][layer], value, rtol=0, atol=2e-6)
            losses = torch.tensor([result["losses"] for result in mine]).mean(dim=0).tolist()
            wanted = expected[0]["losses"][-len(losses) :]
            assert losses == pytest.approx(wanted, abs=2e-6), name


def refused(config: ShardingConfig, sparse_optimizer: str = "adagrad") -> str:
    return catch_message(ConfigError, check_sharding, config, ["user", "item"], sparse_optimizer)


def test_a_plan_for_a_table_that_does_not_exist_is_refused() -> None:
    assert refused(ShardingConfig(tables=("city=row_wise",))) == (
        "sharding.tables names 'city', which is no table: the dataset has user, item. "
        "Name one of them"
    )


def test_a_table_with_an_equals_sign_in_its_name_can_be_named() -> None:
    config = ShardingConfig(tables=("utm=a=table_wise",))
    assert kinds_of_tables(config, ["item", "utm=a"]) == {"item": "row_wise", "utm=a": "table_wise"}


def test_columns_are_refused_where_the_optimizer_needs_whole_rows() -> None:
    assert refused(ShardingConfig(tables=("item=column_wise",)), "rowwise_adagrad") == (
        "table 'item' is to be column_wise with outer.sparse_optimizer = \"rowwise_adagrad\": "
        "it keeps the mean square over a whole row, of which each rank would see only some "
        "columns, and train another model. "
        'Set outer.sparse_optimizer = "adagrad", or another kind of sharding'
    )


def ranks_on(device: str, world_size: int) -> Any:
    return SimpleNamespace(rank=0, world_size=world_size, device=torch.device(device))


def tables_of(width: int, rows: int = 8) -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name="item", embedding_dim=width, num_embeddings=rows, feature_names=["item"]
            )
        ],
        device=torch.device("meta"),
    )


def test_a_copy_on_every_rank_is_refused_on_the_cpu() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(tables_of(4), ShardingConfig(default="data_parallel"), 16, ranks_on("cpu", 1))
    assert str(caught.value) == (
        "table 'item' is to be data_parallel on the CPU: TorchRec's kernel for it corrupts memory "
        "there. Choose row_wise, table_wise or column_wise, or run on CUDA"
    )


def test_a_copy_on_every_rank_is_refused_by_our_exchange() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(tables_of(4), ShardingConfig(default="data_parallel"), 16, ranks_on("cuda", 1))
    assert str(caught.value) == (
        "table 'item' is to be data_parallel, which only TorchRec's exchange does. Choose "
        'row_wise, table_wise or column_wise, or set sharding.exchange = "torchrec"'
    )


def test_a_copy_on_every_rank_is_not_clipped() -> None:
    ranks = ranks_on("cuda", 2)
    copying = ShardingConfig(default="data_parallel", exchange="torchrec")
    copied = merge_plans(make_plan(tables_of(4), copying, 16, ranks))
    check_clipping(copied, 0.0)
    check_clipping(merge_plans(make_plan(tables_of(4), ShardingConfig(), 16, ranks)), 1.0)
    assert catch_message(ConfigError, check_clipping, copied, 1.5) == (
        "outer.clip_norm = 1.5 with table 'item' data_parallel: every rank would count its own "
        "part of that table's gradient in the norm. "
        'Set sharding.tables = ["item=row_wise"], or outer.clip_norm = 0'
    )


def test_a_rank_that_would_hold_no_row_is_refused_where_fbgemm_looks_them_up() -> None:
    ranks = ranks_on("cpu", 4)
    check_lookups(merge_plans(make_plan(tables_of(4, rows=4), ShardingConfig(), 16, ranks)))
    small = tables_of(4, rows=5)  # 2, 2, 1 and 0
    check_lookups(merge_plans(make_plan(small, ShardingConfig("table_wise"), 16, ranks)))
    with pytest.raises(ConfigError) as caught:
        check_lookups(merge_plans(make_plan(small, ShardingConfig(), 16, ranks)))
    assert str(caught.value) == (
        "table 'item' is to be row_wise, and the tables that are leave rank 3 without a row, which "
        'sharding.exchange = "torchrec" needs on a CPU. '
        'Set sharding.tables = ["item=table_wise"], or sharding.exchange = "host"'
    )


@pytest.mark.parametrize(("width", "world_size"), [(4, 2), (12, 2), (24, 4)])
def test_columns_that_ranks_cannot_share_evenly_are_refused(width: int, world_size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(
            tables_of(width), ShardingConfig(default="column_wise"), 16, ranks_on("cpu", world_size)
        )
    assert str(caught.value) == (
        f"table 'item' is to be column_wise over {world_size} ranks, but its width is {width}, "
        f"which is no multiple of {world_size * 4}. Choose another width, or another kind of "
        "sharding"
    )


def described(kind: str, *shards: tuple[int, int, int]) -> dict[str, Any]:
    """(rank, rows, columns) of each shard, from the table's first row and column on."""
    return {
        "kind": kind,
        "shards": [
            {"rank": rank, "rows": [0, rows], "columns": [0, columns]}
            for rank, rows, columns in shards
        ],
    }


def test_the_short_form_of_a_plan_names_six_tables_and_what_each_rank_holds() -> None:
    by_rows = {f"t{i}": described("row_wise", (0, 500_000, 16), (1, 250_000, 16)) for i in range(8)}
    city = described("table_wise", (1, 1000, 16))
    assert describe_in_words({"world_size": 2, "tables": {**by_rows, "city": city}}) == [
        "tables row_wise: 8 (t0, t1, t2, t3, t4, t5 and 2 more)",
        "tables table_wise: 1 (city on rank 1)",
        "weights held: rank 0 256.0 MB, rank 1 128.1 MB",
    ]


def test_the_short_form_of_a_plan_of_no_shards_holds_nothing() -> None:
    copied = {"item": described("data_parallel")}
    expected = ["tables data_parallel: 1 (item)"]
    assert describe_in_words({"world_size": 1, "tables": copied}) == expected


def cluster_of(world_size: int, device_bytes: int, host_bytes: int = 1 << 40) -> Cluster:
    return Cluster(world_size, min(world_size, 8), "cuda", device_bytes, host_bytes)


def test_the_planner_leaves_rows_of_our_exchange_in_the_gpus_memory() -> None:
    """Of a table of 64 MB on a GPU of 40 MB: with fbgemm's kernels the host's memory takes it."""
    tables, small = tables_of(16, rows=1_000_000), cluster_of(1, 40 << 20)
    chosen = ShardingConfig(default="planner", exchange="torchrec")
    plan = merge_plans(plan_on(tables, chosen, 16, small))
    assert "uvm" in plan["item"].compute_kernel
    for kept in (replace(chosen, exchange="host"), replace(chosen, placement="device")):
        with pytest.raises(NoPlaceError):
            plan_on(tables, kept, 16, small)


@pytest.mark.parametrize("default", ["row_wise", "table_wise", "column_wise", "planner"])
@pytest.mark.parametrize(
    ("placement", "kernel"), [("uvm", "fused_uvm"), ("uvm_cached", "fused_uvm_caching")]
)
def test_a_placement_in_the_hosts_memory_becomes_a_kernel_of_fbgemms(
    default: DefaultKind, placement: Placement, kernel: str
) -> None:
    config = ShardingConfig(default=default, exchange="torchrec", placement=placement)
    plan = merge_plans(plan_on(tables_of(16), config, 16, cluster_of(2, 1 << 30)))
    assert plan["item"].compute_kernel == kernel
    assert describe_plan(plan, 2, config)["tables"]["item"]["placement"] == placement
    alone = replace(config, placement="auto", placements=(f"item={placement}",))
    plan = merge_plans(plan_on(tables_of(16), alone, 16, cluster_of(2, 1 << 30)))
    assert plan["item"].compute_kernel == kernel


def test_a_placement_that_cannot_be_had_is_refused() -> None:
    there = ShardingConfig(placement="uvm", exchange="torchrec")
    assert refused(replace(there, exchange="host")) == (
        "table 'user' is to be placed in \"uvm\", which needs fbgemm's kernels, and "
        'sharding.exchange = "host" has tables of its own. Set sharding.exchange = "torchrec", or '
        'placement "host"'
    )
    assert refused(replace(there, placement="file")) == (
        "table 'user' is to be placed in \"file\", as only our own exchange can. Set "
        'sharding.exchange = "host", or placement "uvm_cached"'
    )
    assert refused(ShardingConfig(placement="file", default="planner")) == (
        "table 'user' is to be placed in \"file\", of which TorchRec's planner knows nothing. Set "
        'sharding.default = "row_wise", or placement "auto"'
    )
    assert refused(replace(there, default="data_parallel")) == (
        "table 'user' is to be data_parallel and placed in \"uvm\": every GPU holds its own copy "
        'of such a table. Choose another kind, or placement "device"'
    )
    assert refused(replace(there, placements=("item=hbm",))) == (
        "sharding.placements has 'item=hbm': write table=placement with one of the placements "
        "auto, device, host, file, uvm, uvm_cached"
    )
    assert catch_message(ConfigError, make_plan, tables_of(4), there, 16, ranks_on("cpu", 1)) == (
        "table 'item' is to be placed in \"uvm\" on the CPU, where all tables are in the host's "
        'memory. Set placement "auto", or "file" for tables beyond it, or run on CUDA'
    )


def test_tables_beyond_memory_are_evaluated_there_on_whatever_device_there_is() -> None:
    trained = ShardingConfig(
        default="table_wise", placement="host", placements=("item=file", "user=device"),
        cache_share=0.2, file_dir="/scratch", sequence="ulysses",
    )  # fmt: skip
    on_cuda, on_cpu = (sharding_to_evaluate(trained, on_cuda) for on_cuda in (True, False))
    assert (on_cuda.placement, on_cpu.placement) == ("host", "auto")
    for one in (on_cuda, on_cpu):
        assert one.placements == ("item=file", "user=auto")
        assert (one.default, one.cache_share, one.file_dir) == ("row_wise", 0.2, "/scratch")
        assert one.sequence == "both"
    of_torchrec = ShardingConfig(exchange="torchrec", placement="uvm")
    assert sharding_to_evaluate(of_torchrec, True) == ShardingConfig()


def refusal_of_planner(ranks: Ranks) -> str:
    tables = tables_of(16, rows=10**12)
    with pytest.raises(ConfigError) as caught:
        make_plan(tables, ShardingConfig(default="planner"), 16, ranks)
    return str(caught.value)


@pytest.mark.distributed
def test_all_ranks_are_told_what_the_planner_finds_no_place_for() -> None:
    """Rank 0 alone plans: an error that only it raised would leave the other in a collective."""
    (told,) = set(on_ranks(2, refusal_of_planner))
    assert told == (
        "TorchRec's planner finds no place for the tables: Unable to find a plan for this model "
        "because of insufficient storage. Add ranks or memory, make model.embedding_dim smaller, "
        'or set sharding.default = "row_wise"'
    )
