"""The exchange of rows: three AlltoAlls a step, overlapped, quantised within half a step."""

from dataclasses import replace
from itertools import chain
from typing import Any, get_args
from unittest import mock

import pytest
import torch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.sharding import ExchangeKind, ShardingConfig
from gmeta.config.train_config import OuterConfig, TrainConfig
from gmeta.data.episodes import Episodes
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import shard_learner
from tests.distributed.harness import on_ranks, steps_of
from tests.distributed.test_sharding_plans import (
    ALGORITHM,
    FEATURES,
    MODEL,
    Run,
    batches_of_rank,
    local_parts,
)

# Half a unit in the last place, relative to the value.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# Half the distance of the numbers below the format's smallest normal one.
SUBNORMAL = {"float32": 0.0, "bfloat16": 0.0, "float16": 2.0**-25}
LEARNING_RATE = 1e7
# As small as the mean over 10,000 tasks leaves the gradient of a row: most of float16's range is
# above.
GRADIENT_UNIT = 1e-7


# The second learns a rate for each table: it must know which table a row is of. With the third no
# gradient reaches the rows of the support side.
ALGORITHMS = (
    ALGORITHM,
    AlgorithmConfig(name="metasgd", inner_lr=0.1, options={"learned_rates": "layer"}),
    AlgorithmConfig(name="fomaml", inner_lr=0.1, adapt_embeddings=False),
)


def train_with_and_without_overlap(ranks: Ranks) -> list[list[dict[str, Any]]]:
    """Losses and tables with ids sent a step ahead, then without; rank 1 runs out first."""
    return [
        [trained(ranks, algorithm, overlapped) for overlapped in (True, False)]
        for algorithm in ALGORITHMS
    ]


def trained(ranks: Ranks, algorithm: AlgorithmConfig, overlapped: bool) -> dict[str, Any]:
    run = Run(ranks, "mixed", algorithm=algorithm)
    batches = iter(batches_of_rank(ranks)[: 4 - ranks.rank])
    steps = steps_of(
        batches, run.learner.collate, FEATURES, ranks,
        sharded=run.sharded if overlapped else None,
    )  # fmt: skip
    for episodes, totals in steps:
        take_step(run, episodes, ranks.world_size / totals.num_terms)
    return run.result()


def take_step(run: Run, episodes: Episodes, weight: float) -> None:
    loss = run.sharded(episodes, weight)
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()
    run.losses.append(loss.item())


@pytest.mark.distributed
def test_ids_that_travel_a_step_ahead_change_no_bit() -> None:
    by_algorithm = chain.from_iterable(on_ranks(2, train_with_and_without_overlap))
    for overlapped, serial in by_algorithm:
        assert overlapped["losses"] == serial["losses"]
        for name, parts in serial["tables"].items():
            for (_, expected), (_, values) in zip(parts, overlapped["tables"][name], strict=True):
                assert torch.equal(values, expected)
        for name, value in serial["layers"].items():
            assert torch.equal(overlapped["layers"][name], value)


def train_on_one_batch(ranks: Ranks) -> list[list[dict[str, Any]]]:
    """By algorithm, three steps on the same batch: announced once, then for each of them."""
    return [
        [steps_on_one_batch(ranks, algorithm, times) for times in (1, 3)]
        for algorithm in ALGORITHMS
    ]


def steps_on_one_batch(ranks: Ranks, algorithm: AlgorithmConfig, times: int) -> dict[str, Any]:
    run = Run(ranks, "row_wise", algorithm=algorithm)
    exchange, batch = run.sharded.local.exchange, batches_of_rank(ranks)[0]
    announced = [exchange.enqueue(run.learner.collate(batch)) for _ in range(times)]
    for episodes in announced * (3 // times):
        take_step(run, episodes, 1 / episodes.num_terms)
    return run.result()


@pytest.mark.distributed
def test_one_rank_takes_any_number_of_steps_on_a_batch_announced_once() -> None:
    (by_algorithm,) = on_ranks(1, train_on_one_batch)
    for once, each in by_algorithm:
        assert once["losses"] == each["losses"]
        assert len(set(once["losses"])) == 3
        for name, parts in each["tables"].items():
            for (_, expected), (_, values) in zip(parts, once["tables"][name], strict=True):
                assert torch.equal(values, expected)


def sums_of_gradients(ranks: Ranks) -> list[tuple[float, float]]:
    """What was seen of the gradient of this rank's rows; ours and TorchRec's exchange."""
    run = Run(ranks, "row_wise")
    found = []
    for exchange in get_args(ExchangeKind):
        config = replace(run.config, sharding=ShardingConfig(exchange=exchange))
        sharded = shard_learner(run.learner, FEATURES, config, ranks)
        local = sharded.local
        _, rows_UD = local.fetch(run.learner.collate(batches_of_rank(ranks)[0]))
        grad_UD = torch.full_like(rows_UD, 0.5 + ranks.rank)
        rows_UD.backward(grad_UD)
        found.append((local.exchange.gradient_sum.item(), grad_UD.sum().item()))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_sees_the_gradient_of_the_rows_that_it_fetched(world_size: int) -> None:
    for by_exchange in on_ranks(world_size, sums_of_gradients):
        for seen, expected in by_exchange:
            assert seen == expected


def exchange_on_rank(ranks: Ranks) -> dict[str, Any]:
    """Fetched rows, and tables after one SGD step of known gradients, for every wire format."""
    results: dict[str, Any] = {}
    for dtype in ROUNDING:
        config = TrainConfig(
            model=MODEL,
            outer=OuterConfig(sparse_optimizer="sgd", sparse_lr=LEARNING_RATE),
            sharding=ShardingConfig(tables=("s1=table_wise", "m0=column_wise"), wire_dtype=dtype),
        )
        run = Run(ranks, "mixed")
        sharded = shard_learner(run.learner, FEATURES, config, ranks)
        episodes = run.learner.collate(batches_of_rank(ranks)[0])
        # Positions then index the fetched rows themselves, in any order.
        whole = torch.arange(episodes.unique_ids_U.numel())
        episodes = replace(episodes, held=episodes.inputs._replace(fetched_row_P=whole))
        start = local_parts(sharded)
        transport = ranks.transport
        with mock.patch.object(type(transport), "swap", wraps=transport.swap) as swap:
            fetched, rows_UD = sharded.local.fetch(episodes, GRADIENT_UNIT)
            rows_PD = fetched.working_rows_PD(rows_UD)
            generator = torch.Generator().manual_seed(ranks.rank)
            grad_PD = torch.randn(rows_PD.shape, generator=generator) * GRADIENT_UNIT
            rows_PD.backward(grad_PD)
        results[dtype] = {
            "rows": rows_PD.detach(),
            "grad": grad_PD,
            "swaps": swap.call_count,
            "change": {
                name: [after - before for (_, before), (_, after) in zip(parts, now, strict=True)]
                for (name, parts), now in zip(
                    start.items(), local_parts(sharded).values(), strict=True
                )
            },
        }
    return results


@pytest.fixture(scope="module")
def exchanged() -> list[dict[str, Any]]:
    return on_ranks(2, exchange_on_rank)


@pytest.mark.distributed
def test_quantised_rows_and_gradients_stay_within_half_a_step_of_the_format(
    exchanged: list[dict[str, Any]],
) -> None:
    for dtype, rounding in ROUNDING.items():
        for result in exchanged:
            exact, quantised = result["float32"], result[dtype]
            error = (quantised["rows"] - exact["rows"]).abs()
            assert (error <= rounding * exact["rows"].abs() + SUBNORMAL[dtype]).all()
            assert error.any() == (dtype != "float32")
            # A row's gradient is a sum over the ranks: each part is rounded on its own.
            largest = max(r["float32"]["grad"].abs().max().item() for r in exchanged)
            bound = LEARNING_RATE * rounding * largest + 1e-6  # the tables' own rounding
            for name, changes in exact["change"].items():
                for expected, change in zip(changes, quantised["change"][name], strict=True):
                    assert (change - expected).abs().max() <= bound


@pytest.mark.distributed
def test_a_step_takes_one_alltoall_for_ids_one_for_rows_and_one_for_gradients(
    exchanged: list[dict[str, Any]],
) -> None:
    for result in exchanged:
        # The first only tells how many ids will follow.
        assert result["float32"]["swaps"] == 4
