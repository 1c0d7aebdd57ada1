"""Ranks, sharded tables and the steps that all ranks take together.

The only package that touches torch.distributed and TorchRec's sharding.
"""

from gmeta.parallel.exchange import WireExchange
from gmeta.parallel.links import LinkProbe
from gmeta.parallel.plan import plan_lines
from gmeta.parallel.ranks import (
    Ranks,
    add_over_ranks,
    any_rank_later,
    barrier,
    choose_cpu_matmul,
    gather_to_first,
    lost_peers_explained,
    new_control_group,
    start_ranks,
    stop_ranks,
    sum_over_ranks,
    value_of_first,
)
from gmeta.parallel.sharding import (
    ShardedLearner,
    described_plan,
    initialise_tables,
    local_learner,
    shard_learner,
    table_shards,
)
from gmeta.parallel.steps import StepTotals, in_step
from gmeta.parallel.transport import Swap

__all__ = [
    "LinkProbe",
    "Ranks",
    "ShardedLearner",
    "StepTotals",
    "Swap",
    "WireExchange",
    "add_over_ranks",
    "any_rank_later",
    "barrier",
    "choose_cpu_matmul",
    "described_plan",
    "gather_to_first",
    "in_step",
    "initialise_tables",
    "local_learner",
    "lost_peers_explained",
    "new_control_group",
    "plan_lines",
    "shard_learner",
    "start_ranks",
    "stop_ranks",
    "sum_over_ranks",
    "table_shards",
    "value_of_first",
]
