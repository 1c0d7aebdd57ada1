"""`gmeta plan`: on a dataset, on stated rows alone, and what it says of tables that do not fit."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gmeta.cli.capacity import count_flops, plan_capacity
from gmeta.cli.commands.plan import parse_amount
from gmeta.config.train_config import TrainConfig, config_from_dict
from gmeta.distributed.cluster_spec import CapacityOverrides, Cluster, Speeds
from gmeta.distributed.sequence.plan_events import estimate_long_events
from gmeta.errors import UserError
from gmeta.runs.build import build
from gmeta_models import ModelConfig
from gmeta_models.sequence.encoder import StateEncoder
from gmeta_models.sequence.registry import build_encoder
from metaio import open_dataset
from metaio.read.reader import BatchReader
from metaio.recipes import synthetic
from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic
from tests.metaio.prepare.test_events import log, prepared, schema
from tests.support.commands import gmeta, write_config
from tests.support.refusals import catch_message

GB = 10**9
SPEEDS = Speeds(hbm=4e12, pcie=5e10, nvlink=3e11, network=5e10, flops=6e13)
HUGE = ("--rows", "item=1e9", "--rows", "user=3e8", "--rows", "city=64000", "--rows-per-task", "40")


def config_of(dataset: Path, **sections: dict[str, Any]) -> TrainConfig:
    data = {"path": str(dataset), "tasks_per_step": 64}
    model = {"name": "melu", "embedding_dim": 8, "hidden": [16]}
    return config_from_dict({"data": data, "model": model, **sections})


@pytest.mark.parametrize(
    ("text", "amount"),
    [("400Gb/s", 5e10), ("400 Gbit/s", 5e10), ("50gB/s", 5e10), ("4GiB/s", 2**32)],
)
def test_speeds_are_in_bytes_or_in_bits(text: str, amount: float) -> None:
    assert parse_amount("--network", text, "/s") == amount


def test_memory_is_in_bytes_alone() -> None:
    assert parse_amount("--gpu-memory", "80gb", "") == 8e10
    assert catch_message(UserError, parse_amount, "--gpu-memory", "640Gbit", "") == (
        "--gpu-memory is '640Gbit': a number and a unit are needed, such as 80GB. Correct it"
    )


def cluster_of(gpus: int) -> Cluster:
    return Cluster(gpus, min(gpus, 8), "cuda", 80 * GB, 125 * GB)


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 synthetic users, four of them a bundle: many an item stands in several."""
    out = tmp_path_factory.mktemp("data") / "bundled"
    config = SyntheticConfig(num_tasks=200, num_items=60, min_rows=12, max_rows=16, query_rows=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "usual_bundle_tasks", lambda num_rows: 4)
        prepare_synthetic(str(out), config)
    return out


@pytest.mark.parametrize("data", ["click_logs", "bundled"])
@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {
            "support_features": {"task": True, "columns": ["*"]},
            "item_features": {"columns": ["item"]},
        },
    ],
)
def test_the_ids_of_a_step_are_those_that_a_rank_of_it_asks_for(
    request: pytest.FixtureRequest, data: str, inputs: dict[str, Any]
) -> None:
    config = config_of(request.getfixturevalue(data), **inputs)
    found = plan_capacity(config, CapacityOverrides({}), cluster_of(4), SPEEDS)
    dataset, _ = build(config)
    of_rank = {"tasks_per_step": 64, "rank": 3, "world_size": 4, "seed": config.run.seed}
    with BatchReader(dataset, "train", **of_rank) as reader:
        batches = list(itertools.islice(reader.batches(0), 3))  # of four; the last is smaller
    assert found.measured
    assert found.step.tasks == 16
    assert found.step.rows == pytest.approx(sum(batch.num_rows for batch in batches) / 3)
    asked_B = np.mean([batch.unique_lengths_B.numpy() for batch in batches], axis=0)
    names = [table.name for table in dataset.features.tables]
    assert found.step.ids == pytest.approx(dict(zip(names, asked_B, strict=True)))
    repeated = asked_B > [table.num_rows for table in dataset.features.tables]
    assert repeated.any() == (data == "bundled")
    for table in dataset.features.tables:
        assert found.estimate.tables[table.name]["rows"] == table.num_rows


def test_the_tasks_of_whole_blocks_are_those_of_the_dataset(bundled: Path) -> None:
    config = config_of(bundled, data={"path": str(bundled), "blocks_per_step": 1})
    found = plan_capacity(config, CapacityOverrides({}), cluster_of(1), SPEEDS)
    dataset, _ = build(config)
    assert found.step.tasks == dataset.split("train").num_episodes
    assert found.step.rows == pytest.approx(dataset.split("train").num_rows)


def test_a_step_of_more_tasks_than_there_are_counts_fewer_ranks(click_logs: Path) -> None:
    config = config_of(click_logs, data={"path": str(click_logs), "tasks_per_step": 6400})
    found = plan_capacity(config, CapacityOverrides({}), cluster_of(64), SPEEDS)
    dataset, _ = build(config)
    of_rank = {"tasks_per_step": 200, "rank": 1, "world_size": 2, "seed": config.run.seed}
    with BatchReader(dataset, "train", **of_rank) as reader:
        batch = next(reader.batches(0))
    assert found.step.tasks == 100
    assert found.step.ids == dict(
        zip([t.name for t in dataset.features.tables], batch.unique_lengths_B.tolist(), strict=True)
    )


def test_a_step_of_rows_is_one_of_as_many_mean_tasks(click_logs: Path) -> None:
    split = open_dataset(str(click_logs)).split("train")
    config = config_of(click_logs, data={"path": str(click_logs), "rows_per_step": 900})
    found = plan_capacity(config, CapacityOverrides({}), cluster_of(4), SPEEDS)
    tasks = round(900 * split.num_episodes / split.num_rows)
    assert (found.tasks_per_step, found.step.tasks) == (tasks, -(-tasks // 4))
    nowhere = replace(config, data=replace(config.data, path="nowhere"))
    stated = CapacityOverrides({"item": 1000}, rows_per_task=30)
    assert plan_capacity(nowhere, stated, cluster_of(4), SPEEDS).tasks_per_step == 30


def test_stated_rows_and_shares_take_the_place_of_the_datasets(click_logs: Path) -> None:
    config = config_of(click_logs)
    (item, *_) = (t.name for t in build(config)[0].features.tables if t.name == "item")
    asked = CapacityOverrides({item: 10**9}, rows_per_task=30, unique_share=0.5)
    found = plan_capacity(config, asked, cluster_of(64), SPEEDS)
    assert found.estimate.tables[item]["rows"] == 10**9
    assert found.estimate.tables[item]["bytes"] == 10**9 * (8 * 4 + 4)
    assert found.step.rows == pytest.approx(30)  # one task a GPU
    assert found.step.ids[item] == pytest.approx(15)
    assert not found.measured


@pytest.mark.parametrize(("support", "query"), [(5, 5), (3, 9)])
def test_operations_of_plain_training_are_six_a_weight_and_row(
    click_logs: Path, support: int, query: int
) -> None:
    config = config_of(click_logs, algorithm={"name": "none"})
    dataset, learner = build(config)
    weights = sum(weight.numel() for weight in learner.parameters() if weight.dim() == 2)
    flops = count_flops(learner, dataset.features, 8, support, query)
    assert flops == pytest.approx(6 * weights * (support + query), rel=0.05)


def test_the_operations_of_layers_over_events_are_six_a_weight_and_event(tmp_path: Path) -> None:
    path = Path(prepared(tmp_path, log(), schema()))
    model = {"name": "melu", "embedding_dim": 8, "hidden": [4], "events": "sasrec"}
    dataset, learner = build(config_of(path, model=model, algorithm={"name": "none"}))
    assert learner.events is not None
    of_layers = 6 * sum(one.numel() for one in learner.events.parameters() if one.dim() == 2)
    few, many = (count_flops(learner, dataset.features, 8, 2, 2, events) for events in (200, 300))
    # Those of attention grow with the square: of two blocks two products, three times each.
    of_attention = 2 * 2 * 8 * (300**2 - 200**2) * 6
    assert 100 * of_layers * 0.95 <= many - few <= 100 * of_layers + of_attention
    # The command counts the events of the dataset.
    capacity = plan_capacity(
        config_of(path, model=model), CapacityOverrides({}), cluster_of(2), SPEEDS
    )
    assert capacity.step.flops > 6 * of_layers


@pytest.mark.parametrize(
    ("encoder", "options"),
    [("sasrec", {}), ("sasrec", {"attention": "linear"}), ("hstu", {}), ("din", {})],
)
def test_the_plan_tells_what_long_tasks_send_and_keep(
    tmp_path: Path, encoder: str, options: dict[str, Any]
) -> None:
    path = Path(prepared(tmp_path, log(), schema()))
    model = {"name": "melu", "embedding_dim": 8, "hidden": [4], "events": encoder}
    model["event_options"] = options
    none, some = (
        plan_capacity(
            config_of(path, model=model, sharding={"sequence": kind, "sequence_from": 20}),
            CapacityOverrides({}),
            cluster_of(2),
            SPEEDS,
        )
        for kind in ("none", "ring")
    )
    assert none.long_events is None
    assert some.long_events is not None
    assert some.long_events.tasks > 2
    more = some.estimate.device_bytes_W - none.estimate.device_bytes_W
    assert more == pytest.approx([some.long_events.kept_bytes] * 2)
    sent, seconds = some.estimate.parts["events of long tasks"]
    assert sent == some.long_events.sent_bytes > 0
    assert seconds > 0


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_a_long_task_keeps_is_what_torch_saves(dropout: float) -> None:
    model = ModelConfig(
        "melu", embedding_dim=16, events="sasrec", event_options={"dropout": dropout}
    )
    encoder = build_encoder(model, 1)
    assert isinstance(encoder, StateEncoder)
    events, kept = 999, dict[int, torch.Tensor]()
    weights = {one.untyped_storage().data_ptr() for one in encoder.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    inputs = torch.randn(1, events + 1, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states, _ = encoder.states_THD(inputs, torch.zeros(1, events + 1))
    assert states.requires_grad
    measured = sum(
        tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in weights
    )
    alone = estimate_long_events(encoder, "ring", [events], 1, 1)
    assert alone.kept_bytes == pytest.approx(measured, rel=0.1)
    assert alone.sent_bytes == 0
    shared = estimate_long_events(encoder, "ring", [events], 1, 4)
    assert shared.kept_bytes == pytest.approx(measured / 4, rel=0.1)


@pytest.mark.parametrize("adapts_rows", [False, True])
def test_the_fused_loops_operations_are_the_generals(click_logs: Path, adapts_rows: bool) -> None:
    """Large layers go through other products than small ones."""

    def flops(rows: int, general: bool) -> float:
        config = config_of(
            click_logs,
            model={"name": "melu", "embedding_dim": 8, "hidden": [512, 256]},
            algorithm={"name": "maml", "inner_steps": 2, "adapt_embeddings": adapts_rows},
        )
        dataset, learner = build(config)
        if general:
            learner.use_general_loop()
        return count_flops(learner, dataset.features, 8, rows, rows)

    for rows in (1, 20):
        assert flops(rows, False) == pytest.approx(flops(rows, True), rel=0.25)


def test_more_inner_steps_and_second_order_cost_more(click_logs: Path) -> None:
    def flops(name: str, steps: int) -> float:
        config = config_of(click_logs, algorithm={"name": name, "inner_steps": steps})
        dataset, learner = build(config)
        return count_flops(learner, dataset.features, 8, 10, 10)

    assert flops("fomaml", 1) < flops("fomaml", 3)
    assert flops("fomaml", 3) < flops("maml", 3)
    assert flops("maml", 1) < flops("maml", 3)


@pytest.mark.parametrize("gpus", [8, 64])
def test_the_command_needs_no_data_for_a_billion_rows(tmp_path: Path, gpus: int) -> None:
    config = write_config(tmp_path / "c.toml", tmp_path / "nothing", tmp_path / "run")
    done = gmeta("plan", config, "--gpus", str(gpus), *HUGE, "model.embedding_dim=64", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    by_hand = (10**9 + 3 * 10**8 + 64_000) * (64 * 4 + 4)
    assert sum(table["bytes"] for table in found["tables"].values()) == by_hand
    held = np.array(found["gpu_bytes"])
    assert len(held) == gpus
    assert held.sum() - by_hand < 0.01 * by_hand
    assert "gmeta" not in done.stderr
    assert "Tables" in done.stderr


@pytest.mark.parametrize("in_background", [True, False])
def test_a_checkpoints_copy_is_part_of_host_memory(tmp_path: Path, in_background: bool) -> None:
    config = write_config(tmp_path / "c.toml", tmp_path / "nothing", tmp_path / "run")
    more = "--host-memory", "500GB", f"run.checkpoint_in_background={str(in_background).lower()}"
    done = gmeta("plan", config, *HUGE, *more, "model.embedding_dim=64", "--json")
    assert done.returncode == 0, done.stderr
    copied = json.loads(done.stdout)["checkpoint_copy_bytes_per_gpu"]
    # Weights, and a number a row of rowwise Adagrad, each in pinned memory's next power of two: of
    # 32 GB and 9.6, 0.5 and 0.15. Layers are small.
    assert copied == pytest.approx([2**35 + 2**34 + 2**29 + 2**28] * 8, rel=0.01)
    told = (
        "memory of the host for a GPU: up to 52.3 GB of 62.5 GB\n"
        "  52.3 GB for a checkpoint's copy of them\n"
    )
    assert (told in done.stderr) == in_background
    done = gmeta("plan", config, *HUGE, "model.embedding_dim=64", "--host-memory", "300GB", more[2])
    too_much = "copy of them; too much: set run.checkpoint_in_background = false\n"
    assert (too_much in done.stdout) == in_background


def test_a_table_is_on_the_gpus_that_hold_a_row_of_it(tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.toml", tmp_path / "nothing", tmp_path / "run")
    options = "--gpus", "64", "--rows", "item=1e6", "--rows", "city=7", "--rows-per-task", "40"
    done = gmeta("plan", config, *options, "--json")
    assert done.returncode == 0, done.stderr
    tables = json.loads(done.stdout)["tables"]
    assert tables["item"]["ranks"] == [*range(64)]
    assert tables["city"]["ranks"] == [*range(7)]
    (line,) = (one for one in done.stderr.splitlines() if one.startswith(" city") and "row" in one)
    assert line.split()[5] == "0-6"
    assert "Not in it: launches of kernels, element-wise work" in done.stderr


def test_the_tables_fit_into_80_columns(tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.toml", tmp_path / "nothing", tmp_path / "run")
    done = gmeta("plan", config, "--gpus", "64", *HUGE, "sharding.default=column_wise",
                 "model.embedding_dim=256", "outer.sparse_optimizer=adagrad")  # fmt: skip
    assert done.returncode == 0, done.stderr
    tables = [line for line in done.stdout.splitlines() if line.startswith(" ")]
    assert max(map(len, tables)) <= 80
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("default", ["row_wise", "planner"])
def test_tables_that_do_not_fit_are_told_with_what_would(tmp_path: Path, default: str) -> None:
    config = write_config(tmp_path / "c.toml", tmp_path / "nothing", tmp_path / "run")
    huge = ("--rows", "item=8e9", "--rows", "city=8e3", "--rows-per-task", "40")
    more = "model.embedding_dim=32", f"sharding.default={default}"
    done = gmeta("plan", config, *huge, *more)
    why = {
        "row_wise": "GPU 0 would hold 132.0 GB, and 68.0 GB of 80.0 GB are for that",
        "planner": "TorchRec's planner finds no place for the tables",
    }[default]
    fits = 'What would fit: --gpus 16, or model.embedding_dim = 12, or sharding.placement = "file"'
    assert done.returncode == 2
    assert done.stderr == f"error: the tables do not fit on 8 GPUs: {why}. {fits}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            (),
            "data.path = {data!r} holds no dataset: name every table and the rows of a task, as "
            "--rows item=1e9 --rows user=1e8 --rows-per-task 40, or prepare the data",
        ),
        (
            ("--rows", "item=many"),
            "--rows has 'item=many': write TABLE=ROWS with 1 to 2^40 rows, such as item=1e9",
        ),
    ],
)
def test_wrong_options_get_one_line(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    config = write_config(tmp_path / "c.toml", tmp_path / "nothing", tmp_path / "run")
    done = gmeta("plan", config, *arguments)
    data = str(tmp_path / "nothing")
    assert (done.returncode, done.stderr) == (2, f"error: {told.format(data=data)}\n")


def test_what_training_refuses_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.toml", tmp_path / "nothing", tmp_path / "run")
    overrides = "sharding.exchange=torchrec", 'model.widths=["item=4"]', "model.embedding_dim=8"
    done = gmeta("plan", config, *HUGE, *overrides)
    assert done.returncode == 2
    assert done.stderr == (
        'error: sharding.exchange = "torchrec" fetches rows of one width, and these tables have 2 '
        'widths. Set sharding.exchange = "host", or model.width = "equal" and model.widths = []\n'
    )


def test_items_of_a_table_that_is_too_large_for_their_statistics_are_told(
    tmp_path: Path, click_logs: Path
) -> None:
    config = write_config(tmp_path / "c.toml", click_logs, tmp_path / "run")
    done = gmeta("plan", config, "--rows", "item=1e12", 'item_features.columns=["item"]')
    assert done.returncode == 2
    assert done.stderr.startswith("error: item_features.columns: item has a table of 1,000,0")
