"""The sharding plan: which rank holds which rows and columns of which table."""

import heapq
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from gmeta.config.sharding import (
    BEYOND_DEVICE,
    IN_HOST_MEMORY,
    Kind,
    Placement,
    ShardingConfig,
    kinds_of_tables,
    placements_of_tables,
)
from gmeta.config.table_names import module_name, table_of
from gmeta.distributed.cluster_spec import Cluster
from gmeta.distributed.collective_errors import run_on_first
from gmeta.distributed.ranks import Ranks, broadcast_value
from gmeta.distributed.torchrec_planner import KERNELS, PLACES, collections_in, plan_by_torchrec
from gmeta.errors import ConfigError
from gmeta.platform.internals import place_on_host

# fbgemm's kernels read a row in vectors of four values, and TorchRec cuts no thinner columns.
WIDTH_MULTIPLE = 4
# Names of a kind, and ranks, that the short form of a plan spells out.
MAX_SHOWN = 6


def make_plan(
    tables: nn.Module, config: ShardingConfig, tasks_per_step: int, ranks: Ranks
) -> dict[str, EmbeddingModuleShardingPlan]:
    """Return the sharding plan of each collection of tables in a ShardedLearner's `tables`, by the
    collection's name; equal on every rank. Raises ConfigError: a kind does not fit here."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cluster = Cluster(ranks.world_size, local_size, ranks.device.type)
    if config.default != "planner":
        return plan_on(tables, config, tasks_per_step, cluster)
    # By rank 0 for all: ranks that planned for themselves might differ.
    found: dict[str, EmbeddingModuleShardingPlan] = {}

    def plan() -> None:
        found.update(plan_on(tables, config, tasks_per_step, _with_memory(cluster, ranks.device)))

    run_on_first(plan, ranks)
    return broadcast_value(found, ranks)


def plan_on(
    tables: nn.Module, config: ShardingConfig, tasks_per_step: int, cluster: Cluster
) -> dict[str, EmbeddingModuleShardingPlan]:
    """Return the sharding plan of each collection, for ranks that need not be here. Raises
    ConfigError: a kind does not fit the device, the width or the number of ranks; NoPlaceError: the
    planner finds no place."""
    kinds, placements = _check_tables(tables, config, cluster)
    # The planner is needed only if it has something to choose.
    if None in kinds.values():
        return plan_by_torchrec(tables, kinds, placements, config.exchange, tasks_per_step, cluster)
    collections = collections_in(tables)
    configs = [table for one in collections.values() for table in one.embedding_configs()]
    placed = _by_hand(
        {name: kind for name, kind in kinds.items() if kind},
        placements,
        {table.name: table.num_embeddings * table.embedding_dim for table in configs},
        cluster.world_size,
    )
    plans = {
        path: construct_module_sharding_plan(
            one,
            {table.name: placed[table.name] for table in one.embedding_configs()},
            local_size=cluster.ranks_per_host,
            world_size=cluster.world_size,
            device_type=cluster.device,
        )
        for path, one in collections.items()
    }
    for plan in plans.values():
        for name, table in plan.items():
            if placements[name] in BEYOND_DEVICE:
                place_on_host(table)
    return plans


def merge_plans(
    plans: Mapping[str, EmbeddingModuleShardingPlan], names: Sequence[str] = ()
) -> EmbeddingModuleShardingPlan:
    """Return the plan of the tables of all collections, in the order of `names`, if any."""
    merged = {name: table for plan in plans.values() for name, table in plan.items()}
    return EmbeddingModuleShardingPlan({name: merged[name] for name in names or merged})


def check_clipping(plan: EmbeddingModuleShardingPlan, clip_norm: float) -> None:
    """Raise ConfigError for clipping with a data-parallel table."""
    # A row's gradient must be summed by its one holder, or the norm would count it several times.
    copied = [name for name, table in plan.items() if table.sharding_type == "data_parallel"]
    if clip_norm and copied:
        name = table_of(copied[0])
        raise ConfigError(
            f"outer.clip_norm = {clip_norm:g} with table {name!r} data_parallel: every rank would "
            "count its own part of that table's gradient in the norm. "
            f'Set sharding.tables = ["{name}=row_wise"], or outer.clip_norm = 0'
        )


def check_lookups(plan: EmbeddingModuleShardingPlan) -> None:
    """Raise ConfigError if row-wise tables are so small that a rank gets no row."""
    # fbgemm takes its lookup for one on CUDA then.
    by_rows = {name: one for name, one in plan.items() if one.sharding_type == "row_wise"}
    rows_of_rank: dict[int, int] = {}
    for one in by_rows.values():
        for shard in one.sharding_spec.shards if one.sharding_spec else []:
            rank = shard.placement.rank()
            rows_of_rank[rank] = rows_of_rank.get(rank, 0) + shard.shard_sizes[0]
    for rank, rows in rows_of_rank.items():
        if not rows:
            name = table_of(next(iter(by_rows)))
            raise ConfigError(
                f"table {name!r} is to be row_wise, and the tables that are leave rank {rank} "
                'without a row, which sharding.exchange = "torchrec" needs on a CPU. '
                f'Set sharding.tables = ["{name}=table_wise"], or sharding.exchange = "host"'
            )


def describe_plan(
    plan: EmbeddingModuleShardingPlan, world_size: int, config: ShardingConfig
) -> dict[str, Any]:
    """Return the content of plan.json: the kind of each table and its shards."""
    tables = {}
    placements = placements_of_tables(config, [table_of(name) for name in plan])
    for name, sharding in plan.items():
        spec = sharding.sharding_spec
        # A data-parallel table has no shards: every rank holds all of it.
        shards = [] if spec is None else spec.shards
        tables[table_of(name)] = {
            "kind": sharding.sharding_type,
            "placement": PLACES.get(sharding.compute_kernel, "device")
            if (place := placements[table_of(name)]) not in BEYOND_DEVICE
            else place,
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


def describe_in_words(description: dict[str, Any]) -> list[str]:
    """Return the described plan in words: tables of each kind, bytes of each rank."""
    tables = description["tables"]
    by_kind: dict[str, list[str]] = {}
    values_of_rank = [0] * description["world_size"]
    for name, table in tables.items():
        place = f" on rank {table['shards'][0]['rank']}" if table["kind"] == "table_wise" else ""
        by_kind.setdefault(table["kind"], []).append(name + place)
        for shard in table["shards"]:
            (row, end_row), (column, end_column) = shard["rows"], shard["columns"]
            values_of_rank[shard["rank"]] += (end_row - row) * (end_column - column)
    lines = [
        f"tables {kind}: {len(names)} ({_list_names(names)})" for kind, names in by_kind.items()
    ]
    if any(values_of_rank):
        # Tables are trained in float32: 4 bytes a value.
        held = [f"rank {rank} {4 * n / 1e6:,.1f} MB" for rank, n in enumerate(values_of_rank)]
        lines.append(f"weights held: {_list_names(held)}")
    return lines


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more


def _with_memory(cluster: Cluster, device: torch.device) -> Cluster:
    # The ranks of a host share its memory.
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // cluster.ranks_per_host
    is_cuda = cluster.device == "cuda"
    device_bytes = torch.cuda.mem_get_info(device)[0] if is_cuda else 0
    return replace(cluster, device_bytes=device_bytes, host_bytes=host_bytes)


def _check_tables(
    tables: nn.Module, config: ShardingConfig, cluster: Cluster
) -> tuple[dict[str, Kind | None], dict[str, Placement]]:
    """Return kind (None: the planner chooses) and placement of each table, by its module's name.
    Raises ConfigError: one does not fit here."""
    collections = collections_in(tables)
    if config.exchange == "torchrec" and len(collections) > 1:
        raise ConfigError(
            'sharding.exchange = "torchrec" fetches rows of one width, and these tables have '
            f'{len(collections)} widths. Set sharding.exchange = "host", or model.width = "equal" '
            "and model.widths = []"
        )
    configs = {t.name: t for one in collections.values() for t in one.embedding_configs()}
    names = [table_of(name) for name in configs]
    kinds, placements = kinds_of_tables(config, names), placements_of_tables(config, names)
    for table, kind in kinds.items():
        _check_kind(table, kind, configs[module_name(table)].embedding_dim, config, cluster)
        if placements[table] in (*IN_HOST_MEMORY, "host") and cluster.device == "cpu":
            raise ConfigError(
                f'table {table!r} is to be placed in "{placements[table]}" on the CPU, where all '
                'tables are in the host\'s memory. Set placement "auto", or "file" for tables '
                "beyond it, or run on CUDA"
            )
    return (
        {module_name(table): kind for table, kind in kinds.items()},
        {module_name(table): place for table, place in placements.items()},
    )


def _check_kind(
    name: str, kind: Kind | None, width: int, config: ShardingConfig, cluster: Cluster
) -> None:
    on_cuda = cluster.device == "cuda"
    if kind == "data_parallel" and not on_cuda:
        raise ConfigError(
            f"table {name!r} is to be data_parallel on the CPU: TorchRec's kernel for it corrupts "
            "memory there. Choose row_wise, table_wise or column_wise, or run on CUDA"
        )
    if kind == "data_parallel" and config.exchange == "host":
        raise ConfigError(
            f"table {name!r} is to be data_parallel, which only TorchRec's exchange does. Choose "
            'row_wise, table_wise or column_wise, or set sharding.exchange = "torchrec"'
        )
    multiple = cluster.world_size * WIDTH_MULTIPLE
    if kind == "column_wise" and cluster.world_size > 1 and width % multiple:
        raise ConfigError(
            f"table {name!r} is to be column_wise over {cluster.world_size} ranks, but "
            f"its width is {width}, which is no multiple of {multiple}. "
            "Choose another width, or another kind of sharding"
        )


def _by_hand(
    kinds: dict[str, Kind],
    placements: dict[str, Placement],
    num_values: dict[str, int],
    world_size: int,
) -> dict[str, ParameterShardingGenerator]:
    # Whole tables, largest first, go to the rank with the fewest values of such tables so far.
    held = [(0, rank) for rank in range(world_size)]
    placed: dict[str, ParameterShardingGenerator] = {}
    for name in sorted(kinds, key=lambda name: -num_values[name]):
        kernel = KERNELS.get(placements[name])
        if kinds[name] == "table_wise":
            values, rank = held[0]
            heapq.heapreplace(held, (values + num_values[name], rank))
            placed[name] = table_wise(rank=rank, compute_kernel=kernel)
        elif kinds[name] == "column_wise":
            placed[name] = column_wise(ranks=list(range(world_size)), compute_kernel=kernel)
        elif kinds[name] == "row_wise":
            placed[name] = row_wise(compute_kernel=kernel)
        else:
            placed[name] = data_parallel()
    # In the order of the tables again.
    return {name: placed[name] for name in kinds}
