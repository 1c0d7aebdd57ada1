"""Tables of several widths train as plain tensors would; no value more travels or is held."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gmeta.config.sharding import ShardingConfig
from gmeta.config.table_names import table_of_weight
from gmeta.config.table_widths import widths_of_tables
from gmeta.config.train_config import TrainConfig
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import shard_learner, table_shards
from gmeta.errors import ConfigError
from gmeta.runs.build import build_learner
from metaio.read.batch import TaskBatch
from tests.distributed.harness import on_ranks
from tests.distributed.test_sharding_plans import (
    ALGORITHM,
    FEATURES,
    NARROW,
    STEPS,
    Run,
    batches_of_rank,
)
from tests.support.refusals import catch_message

WIDTHS = {"s0": 16, "s1": 8, "m0": 16, "m1": 4}


def rows_of(batch: TaskBatch, tables: dict[str, Tensor]) -> Iterator[Tensor]:
    """The rows of a batch, table by table, as wide as the model."""
    ids = batch.unique_ids_U.split(batch.unique_lengths_B.tolist())
    for mine, spec in zip(ids, FEATURES.tables, strict=True):
        rows = tables[spec.name][mine]
        yield torch.cat([rows, rows.new_zeros(len(rows), 16 - rows.shape[1])], dim=1)


def trained_by_gmeta(ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Any]]:
    run = Run(ranks, "mixed", model=NARROW)
    start = whole_tables(run)
    run.train(0, STEPS)
    return start, {**run.result(), "tables": whole_tables(run)}


def whole_tables(run: Run) -> dict[str, Tensor]:
    """The tables of a single rank, in the order of the dataset."""
    found = {
        table_of_weight(name): table.local_shards()[0].tensor.clone()
        for name, table in table_shards(run.sharded).items()
    }
    return {spec.name: found[spec.name] for spec in FEATURES.tables}


@pytest.mark.distributed
def test_narrow_tables_and_projections_train_as_plain_tensors_do() -> None:
    ((start, found),) = on_ranks(1, trained_by_gmeta)
    assert {name: rows.shape[1] for name, rows in start.items()} == WIDTHS
    torch.manual_seed(3)
    learner = build_learner(FEATURES, NARROW, ALGORITHM, "bce")
    tables = {name: rows.clone().requires_grad_() for name, rows in start.items()}
    dense = torch.optim.Adam(learner.parameters(), lr=0.01)
    sparse = torch.optim.Adagrad(tables.values(), lr=0.1, eps=1e-8)
    alone: Any = type("Alone", (), {"rank": 0, "world_size": 1})
    losses = []
    for batch in batches_of_rank(alone):
        episodes, lengths = learner.collate(batch), batch.unique_lengths_B.tolist()
        loss = learner(torch.cat([*rows_of(batch, tables)]), episodes, 1 / episodes.num_terms)
        for optimizer in (dense, sparse):
            optimizer.zero_grad()
        loss.backward()
        for name, mine in zip(tables, batch.unique_ids_U.split(lengths), strict=True):
            tables[name].data[mine] *= 1 - 0.1 * 0.5  # the decay of a step's rows
        for optimizer in (dense, sparse):
            optimizer.step()
        losses.append(loss.item())
    assert found["losses"] == pytest.approx(losses, abs=2e-6)
    for name, rows in tables.items():
        torch.testing.assert_close(found["tables"][name], rows.detach(), rtol=0, atol=2e-6)
    layers = dict(learner.named_parameters())
    expected = {"projections.layers.s1.weight", "projections.layers.m1.weight"}
    assert {name for name in layers if "projections" in name} == expected
    for name, value in layers.items():
        torch.testing.assert_close(found["layers"][name], value.detach(), rtol=0, atol=2e-6)


def sent_and_held(ranks: Ranks) -> dict[str, Any]:
    """What a rank sends in one step, in values of rows and gradients, and what it holds."""
    run = Run(ranks, "row_wise", model=NARROW)
    batch = batches_of_rank(ranks)[0]
    transport = ranks.transport
    with mock.patch.object(type(transport), "swap", wraps=transport.swap) as swap:
        loss = run.sharded(run.learner.collate(batch), 1.0)
        loss.backward()
    _, _, rows, gradients = (sum(call.args[1]) for call in swap.call_args_list)
    ids = batch.unique_ids_U.split(batch.unique_lengths_B.tolist())
    held = {
        table_of_weight(name): table.local_shards()[0]
        for name, table in table_shards(run.sharded).items()
    }
    firsts = {name: shard.metadata.shard_offsets[0] for name, shard in held.items()}
    remote = {
        spec.name: int(((mine < firsts[spec.name]) | (mine >= firsts[spec.name] + len(part))).sum())
        for spec, mine in zip(FEATURES.tables, ids, strict=True)
        for part in [held[spec.name].tensor]
    }
    values = sum(shard.tensor.numel() for shard in held.values())
    return {"rows": rows, "gradients": gradients, "remote": remote, "held": values}


@pytest.mark.distributed
def test_a_row_travels_and_is_held_in_its_own_width() -> None:
    found = on_ranks(2, sent_and_held)
    asked = [sum(count * WIDTHS[name] for name, count in each["remote"].items()) for each in found]
    assert [each["gradients"] for each in found] == asked
    assert [each["rows"] for each in found] == asked[::-1]  # what the other one asks for
    assert all(min(each["remote"].values()) > 0 for each in found)
    in_all = sum(spec.num_rows * WIDTHS[spec.name] for spec in FEATURES.tables)
    assert sum(each["held"] for each in found) == in_all


def refusal_of_torchrecs_exchange(ranks: Ranks) -> str:
    config = TrainConfig(model=NARROW, sharding=ShardingConfig(exchange="torchrec"))
    learner = build_learner(FEATURES, NARROW, ALGORITHM, "bce")
    return catch_message(ConfigError, shard_learner, learner, FEATURES, config, ranks)


@pytest.mark.distributed
def test_torchrecs_exchange_refuses_several_widths() -> None:
    assert on_ranks(1, refusal_of_torchrecs_exchange) == [
        'sharding.exchange = "torchrec" fetches rows of one width, and these tables have 3 widths. '
        'Set sharding.exchange = "host", or model.width = "equal" and model.widths = []'
    ]


def test_the_widths_are_those_that_the_config_names() -> None:
    assert widths_of_tables(FEATURES, NARROW) == WIDTHS
