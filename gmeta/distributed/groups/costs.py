"""What copies of the tables in groups of ranks cost: bytes between the groups."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gmeta.config.sharding import ShardingConfig
from gmeta.config.train_config import OuterConfig
from gmeta.distributed.cluster_spec import Cluster, Speeds
from gmeta.distributed.sharding_estimate import (
    FLOAT_BYTES,
    LAYERS,
    NETWORK,
    ShardingEstimate,
    StepWork,
    count_dense_states,
    count_states,
    layers_part,
    wire_bytes,
)

ID_BYTES = 4


@dataclass(frozen=True)
class TouchedCounts:
    """The rows of each table that one group of ranks touches between two averages (in a step, where
    every step is exact), and that all groups together touch."""

    of_group: Mapping[str, float]
    of_all: Mapping[str, float]


def bytes_between_groups(
    touched: TouchedCounts,
    sizes: Mapping[str, tuple[int, int]],
    sharding: ShardingConfig,
    outer: OuterConfig,
    ranks_of_group: int,
) -> float:
    """Return what a rank sends to other groups for rows, on average of a step, see RowUnion."""
    # A row that n of N groups touch is sent (n - 1) + (N - 1) times, by the ranks that hold it.
    num_groups, of_values, of_rows = sharding.groups, *count_states(outer)
    total = 0.0
    for name, (_, width) in sizes.items():
        of_group, of_all = touched.of_group[name], touched.of_all[name]
        # Gradients; between averages, the movement of weights and of their optimizer's state.
        row_bytes = wire_bytes(sharding) * width
        if sharding.sync_every > 1:
            row_bytes = FLOAT_BYTES * (width * (1 + of_values) + of_rows)
        times_sent = of_group + of_all * (num_groups - 2) / num_groups
        total += times_sent * row_bytes + of_group * (num_groups - 1) * ID_BYTES
    return total / ranks_of_group / sharding.sync_every


def with_groups(
    of_group: ShardingEstimate,
    touched: TouchedCounts,
    sizes: Mapping[str, tuple[int, int]],
    sharding: ShardingConfig,
    outer: OuterConfig,
    step: StepWork,
    cluster: Cluster,
    speeds: Speeds,
) -> ShardingEstimate:
    """Return the estimate of all groups of the cluster from that of one, whose tables are sharded
    over its ranks."""
    of_ranks = cluster.world_size // sharding.groups
    across = bytes_between_groups(touched, sizes, sharding, outer, of_ranks)
    is_exact = sharding.sync_every == 1
    everyone = 2 * step.num_weights * FLOAT_BYTES * (1 - 1 / cluster.world_size)
    parts = dict(of_group.parts)
    if is_exact:
        parts = {name: part for name, part in parts.items() if not name.startswith(LAYERS)}
        parts |= layers_part(everyone, cluster.world_size <= cluster.ranks_per_host, speeds)
    else:
        # They go among the ranks of a group in every step; between averages, with their state, to
        # all.
        averaged = everyone * (1 + count_dense_states(outer)) / sharding.sync_every
        parts[f"{LAYERS}, between groups{NETWORK}"] = averaged, averaged / speeds.network
    parts[f"rows between groups{NETWORK}"] = across, across / speeds.network
    return replace(of_group, parts=parts)
