"""The sharding plan: which rank holds which rows and columns of which table.

Tables are placed by hand, so that every rank gets about the same share of them, or by TorchRec's
planner where the config leaves a table to it.
"""

import heapq
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from gmeta.errors import ConfigError
from gmeta.parallel.ranks import Ranks
from gmeta.tables.names import module_name, table_of
from gmeta.tables.sharding import ExchangeKind, Kind, ShardingConfig, kinds_of_tables

# What the planner may choose from: by columns only where the config says so.
PLANNED = ("row_wise", "table_wise")
PLANNED_ON_CUDA = (*PLANNED, "data_parallel")
# fbgemm's kernels read a row in vectors of four values, and TorchRec cuts no thinner columns.
WIDTH_MULTIPLE = 4
# Names of a kind, and ranks, that the short form of a plan spells out.
MAX_SHOWN = 6


def make_plan(
    tables: nn.Module, config: ShardingConfig, tasks_per_step: int, ranks: Ranks
) -> dict[str, EmbeddingModuleShardingPlan]:
    """Return the sharding plan of each collection of tables in a ShardedLearner's `tables`, by the
    collection's name in the learner; the same on every rank.

    Raises:
        ConfigError: a kind does not fit the device, the width or the number of ranks.
    """
    collections = _collections(tables)
    configs = {t.name: t for one in collections.values() for t in one.embedding_configs()}
    kinds: dict[str, Kind | None] = {}
    for table, kind in kinds_of_tables(config, [table_of(name) for name in configs]).items():
        name = module_name(table)
        _check_kind(table, kind, configs[name].embedding_dim, config.exchange, ranks)
        kinds[name] = kind
    if any(kind is None for kind in kinds.values()):
        return _planned(tables, kinds, config.exchange, tasks_per_step, ranks)
    placed = _by_hand(
        {name: kind for name, kind in kinds.items() if kind},
        {name: table.num_embeddings * table.embedding_dim for name, table in configs.items()},
        ranks.world_size,
    )
    return {
        path: construct_module_sharding_plan(
            one,
            {table.name: placed[table.name] for table in one.embedding_configs()},
            local_size=_local_size(),
            world_size=ranks.world_size,
            device_type=ranks.device.type,
        )
        for path, one in collections.items()
    }


def plan_of_tables(
    plans: Mapping[str, EmbeddingModuleShardingPlan], names: Sequence[str] = ()
) -> EmbeddingModuleShardingPlan:
    """Return the plan of the tables of all collections, in the order of `names` if it has any."""
    merged = {name: table for plan in plans.values() for name, table in plan.items()}
    return EmbeddingModuleShardingPlan({name: merged[name] for name in names or merged})


def check_clipping(plan: EmbeddingModuleShardingPlan, clip_norm: float) -> None:
    """Refuse clipping where every rank holds a whole table: a row's gradient must be summed by its
    one holder.

    Raises:
        ConfigError: a table whose rows every rank holds is to be clipped.
    """
    copied = [name for name, table in plan.items() if table.sharding_type == "data_parallel"]
    if clip_norm and copied:
        name = table_of(copied[0])
        raise ConfigError(
            f"outer.clip_norm = {clip_norm:g} with table {name!r} data_parallel: every rank would "
            "count its own part of that table's gradient in the norm. "
            f'Set sharding.tables = ["{name}=row_wise"], or outer.clip_norm = 0'
        )


def describe_plan(plan: EmbeddingModuleShardingPlan, world_size: int) -> dict[str, Any]:
    """Return what plan.json holds: the kind of each table and its shards."""
    tables = {}
    for name, sharding in plan.items():
        spec = sharding.sharding_spec
        shards = [] if spec is None else spec.shards
        tables[table_of(name)] = {
            "kind": sharding.sharding_type,
            "shards": [
                {
                    "rank": shard.placement.rank(),
                    "rows": [shard.shard_offsets[0], shard.shard_offsets[0] + shard.shard_sizes[0]],
                    "columns": [
                        shard.shard_offsets[1],
                        shard.shard_offsets[1] + shard.shard_sizes[1],
                    ],
                }
                for shard in shards
            ],
        }
    return {"world_size": world_size, "tables": tables}


def plan_lines(described: dict[str, Any]) -> list[str]:
    """Return the described plan in words: how many tables of each kind, what each rank holds."""
    tables = described["tables"]
    by_kind: dict[str, list[str]] = {}
    values_of_rank = [0] * described["world_size"]
    for name, table in tables.items():
        place = f" on rank {table['shards'][0]['rank']}" if table["kind"] == "table_wise" else ""
        by_kind.setdefault(table["kind"], []).append(name + place)
        for shard in table["shards"]:
            (row, end_row), (column, end_column) = shard["rows"], shard["columns"]
            values_of_rank[shard["rank"]] += (end_row - row) * (end_column - column)
    lines = [f"tables {kind}: {len(names)} ({_listed(names)})" for kind, names in by_kind.items()]
    if any(values_of_rank):
        # Tables are trained in float32: 4 bytes a value.
        held = [f"rank {rank} {4 * n / 1e6:,.1f} MB" for rank, n in enumerate(values_of_rank)]
        lines.append(f"weights held: {_listed(held)}")
    return lines


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more


def _local_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _check_kind(
    name: str, kind: Kind | None, width: int, exchange: ExchangeKind, ranks: Ranks
) -> None:
    """Raise ConfigError where a table cannot be sharded this way here."""
    on_cuda = ranks.device.type == "cuda"
    if kind == "data_parallel" and not on_cuda:
        raise ConfigError(
            f"table {name!r} is to be data_parallel on the CPU: TorchRec's kernel for it corrupts "
            "memory there. Choose row_wise, table_wise or column_wise, or run on CUDA"
        )
    if kind == "data_parallel" and exchange == "host":
        raise ConfigError(
            f"table {name!r} is to be data_parallel, which only TorchRec's exchange does. Choose "
            'row_wise, table_wise or column_wise, or set sharding.exchange = "torchrec"'
        )
    multiple = ranks.world_size * WIDTH_MULTIPLE
    if kind == "column_wise" and ranks.world_size > 1 and width % multiple:
        raise ConfigError(
            f"table {name!r} is to be column_wise over {ranks.world_size} ranks, but "
            f"its width is {width}, which is no multiple of {multiple}. "
            "Choose another width, or another kind of sharding"
        )


def _by_hand(
    kinds: dict[str, Kind], num_values: dict[str, int], world_size: int
) -> dict[str, ParameterShardingGenerator]:
    """Place whole tables, largest first, on the rank that holds the least of such tables so far."""
    held = [(0, rank) for rank in range(world_size)]
    placed: dict[str, ParameterShardingGenerator] = {}
    for name in sorted(kinds, key=lambda name: -num_values[name]):
        if kinds[name] == "table_wise":
            values, rank = held[0]
            heapq.heapreplace(held, (values + num_values[name], rank))
            placed[name] = table_wise(rank=rank)
        elif kinds[name] == "column_wise":
            placed[name] = column_wise(ranks=list(range(world_size)))
        else:
            placed[name] = row_wise() if kinds[name] == "row_wise" else data_parallel()
    # In the order of the tables again.
    return {name: placed[name] for name in kinds}


def _planned(
    tables: nn.Module,
    kinds: dict[str, Kind | None],
    exchange: ExchangeKind,
    tasks_per_step: int,
    ranks: Ranks,
) -> dict[str, EmbeddingModuleShardingPlan]:
    """Return TorchRec's plan, made by rank 0 for all: ranks that planned for themselves might
    differ.
    """
    result: list[Any] = [None]
    if ranks.rank == 0:
        try:
            result[0] = _run_planner(tables, kinds, exchange, tasks_per_step, ranks)
        except PlannerError as error:
            result[0] = str(error).strip().splitlines()[0].rstrip(" .")
    dist.broadcast_object_list(result, src=0, group=ranks.control)
    if isinstance(result[0], str):
        raise ConfigError(
            f"TorchRec's planner finds no place for the tables: {result[0]}. Add ranks or memory, "
            'make model.embedding_dim smaller, or set sharding.default = "row_wise"'
        )
    plans: dict[str, EmbeddingModuleShardingPlan] = result[0]
    return plans


def _run_planner(
    tables: nn.Module,
    kinds: dict[str, Kind | None],
    exchange: ExchangeKind,
    tasks_per_step: int,
    ranks: Ranks,
) -> dict[str, EmbeddingModuleShardingPlan]:
    on_cuda = ranks.device.type == "cuda"
    choice = PLANNED_ON_CUDA if on_cuda and exchange == "torchrec" else PLANNED
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=[kind] if (kind := kinds[table.name]) else list(choice),
            # Of its own accord it would put rows into the host's memory, for fbgemm's kernels.
            compute_kernels=[EmbeddingComputeKernel.FUSED.value] if exchange == "host" else None,
            min_partition=table.embedding_dim // ranks.world_size
            if kinds[table.name] == "column_wise"
            else None,
        )
        for one in _collections(tables).values()
        for table in one.embedding_configs()
    }
    # The ranks of a host share its memory.
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _local_size()
    topology = Topology(
        world_size=ranks.world_size,
        local_world_size=_local_size(),
        compute_device=ranks.device.type,
        ddr_cap=host_bytes,
        **({"hbm_cap": torch.cuda.mem_get_info(ranks.device)[0]} if on_cuda else {}),
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=-(-tasks_per_step // ranks.world_size),
        constraints=constraints,
        debug=False,
    )
    sharders = [EmbeddingCollectionSharder()]
    plans = planner.plan(nn.ModuleDict({"tables": tables}), sharders).plan
    # In the order of the tables, which the planner need not keep.
    return {
        path: EmbeddingModuleShardingPlan(
            {table.name: plans[path][table.name] for table in one.embedding_configs()}
        )
        for path, one in _collections(tables).items()
    }


def _collections(tables: nn.Module) -> dict[str, EmbeddingCollection]:
    """Return the collections in the `tables` of a ShardedLearner, by their names in the learner."""
    return {
        f"tables.{name}".removesuffix("."): module
        for name, module in tables.named_modules()
        if isinstance(module, EmbeddingCollection)
    }
