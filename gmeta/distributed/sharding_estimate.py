"""Estimates of a sharding plan for each rank: memory, bytes on the wire and time of a step, by
arithmetic from counts and speeds. docs/scaling.md has the formulas.

Shape suffix: W ranks or workers"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from gmeta.config.sharding import BEYOND_DEVICE, IN_HOST_MEMORY, ShardingConfig
from gmeta.config.train_config import OuterConfig
from gmeta.distributed.cluster_spec import Cluster, Speeds
from gmeta.distributed.tables.plain_tables import STATES
from gmeta.distributed.unsharded import SPARSE_OPTIMIZERS

# Ids are taken to spread evenly over a table's rows, as after hashing, and over the ranks that ask.
Values = npt.NDArray[np.float64]
FLOAT_BYTES = 4
# Share of a GPU's memory for activations and what libraries keep: as TorchRec's planner reserves.
RESERVED = 0.15
# Of a table in uvm_cached, the share of its rows in the cache, and what the cache keeps of each row
# and of each of its own: fbgemm's and TorchRec's defaults.
CACHED_SHARE, CACHE_ROW_BYTES, CACHE_SLOT_BYTES = 0.2, 4, 16
LAYERS = "AllReduce of the layers"
NETWORK = ", network"  # ends the names of parts that go to other hosts
# What our own cache keeps on the host of each row and of each slot, see RowSlots.
OWN_ROW_BYTES, OWN_SLOT_BYTES = 5, 15
DENSE_STATES = {"adam": 2, "adamw": 2, "adagrad": 1, "sgd": 0}
# How often a row's values pass the memory of the GPU that holds them (read and written to give them
# out, their gradient written and read, the row read and written), and of the one that asked.
PASSES_OF_HOLDER, PASSES_OF_ASKER = 6, 4


@dataclass(frozen=True)
class StepWork:
    """One rank's tasks and rows in a step, each table's ids, the layers' operations and weights."""

    tasks: float
    rows: float
    ids: Mapping[str, float]
    flops: float
    num_weights: int
    row_counts: int = 0  # kept of each row beside the optimizer's state, by model.admission


@dataclass(frozen=True)
class ShardingEstimate:
    """Tables, each with its place, bytes and traffic in a step; memory by rank, in bytes; and the
    parts of a step as bytes of the busiest rank and seconds."""

    tables: dict[str, dict[str, Any]]
    device_bytes_W: Values
    host_bytes_W: Values
    file_bytes_W: Values  # of the host's disk
    copied_bytes_W: Values  # that a checkpoint in the background takes of the host's beside them
    fixed_bytes: float  # of the device's memory, for what is not a table
    parts: dict[str, tuple[float, float]]

    @property
    def network_bytes(self) -> float:
        """Return what the busiest rank sends to other hosts in a step."""
        return sum(sent for name, (sent, _) in self.parts.items() if name.endswith(NETWORK))

    @property
    def step_s(self) -> float:
        """Return the seconds of a step."""
        # As if no part ran beside another: an upper bound.
        return sum(seconds for _, seconds in self.parts.values())


def estimate(
    plan: Mapping[str, Any],
    sizes: Mapping[str, tuple[int, int]],
    sharding: ShardingConfig,
    outer: OuterConfig,
    step: StepWork,
    cluster: Cluster,
    speeds: Speeds,
) -> ShardingEstimate:
    """Return what a plan of `describe_plan` takes of each rank; `sizes`: tables' rows and width."""
    num_ranks = cluster.world_size
    value_bytes = wire_bytes(sharding)
    device_W, host_W, file_W, copied_W, requested_W, sent_W, from_host_W = np.zeros((7, num_ranks))
    tables = {}
    copied_values = 0
    held = {
        name: _held_rows(table, *sizes[name], num_ranks) for name, table in plan["tables"].items()
    }
    is_long = any(rows_W.max() >= 2**31 for rows_W, _ in held.values())
    id_bytes = 8 if is_long or sharding.exchange == "torchrec" else 4
    for name, table in plan["tables"].items():
        num_rows, width = sizes[name]
        rows_W, columns_W = held[name]
        placed_W = table_bytes(
            table["placement"], rows_W, columns_W, outer, sharding.cache_share, step.row_counts
        )
        device_W += placed_W.device
        host_W += placed_W.host
        file_W += placed_W.file
        of_values, of_rows = count_states(outer)
        copied_W += (1 + of_values) * _pinned_bytes(FLOAT_BYTES * rows_W * columns_W)
        copied_W += (of_rows + step.row_counts) * _pinned_bytes(FLOAT_BYTES * rows_W)
        ids = step.ids[name]
        given_out_W = ids * rows_W / num_rows * columns_W  # values that a rank gives each that asks
        if table["kind"] == "data_parallel":
            copied_values += num_rows * width
            requested_W += ids * width / num_ranks
            given_out_W = np.zeros(num_ranks)
            ids_sent = 0.0
        else:
            requested_W += given_out_W
            sent_W += given_out_W
            ids_sent = ids * float((rows_W / num_rows).sum()) * (num_ranks - 1) / num_ranks
        if table["placement"] in (*IN_HOST_MEMORY, *BEYOND_DEVICE):
            from_host_W += given_out_W * (2 + 2 * count_states(outer)[0])
        rows_sent = 2 * float(given_out_W.mean()) * (num_ranks - 1) * value_bytes
        tables[name] = {
            "rows": num_rows,
            "width": width,
            "kind": table["kind"],
            "placement": table["placement"],
            # Of a table with fewer rows than ranks, some shards are empty.
            "ranks": np.flatnonzero(rows_W * columns_W).tolist(),
            "bytes": round(float(sum(map(np.sum, placed_W)))),
            "ids_per_step": ids,
            "id_bytes_per_step": ids_sent * id_bytes,
            "row_bytes_per_step": rows_sent,
        }
    moved_W = requested_W * num_ranks * PASSES_OF_HOLDER + requested_W.sum() * PASSES_OF_ASKER
    hbm_bytes = float(moved_W.max()) * FLOAT_BYTES
    pcie_bytes = float(from_host_W.max()) * num_ranks * FLOAT_BYTES
    near, far = _busiest(sent_W * value_bytes, cluster.ranks_per_host)
    dense = step.num_weights * FLOAT_BYTES
    reduced = 2 * (dense + copied_values * FLOAT_BYTES) * (num_ranks - 1) / num_ranks
    layers = step.num_weights * FLOAT_BYTES * (2 + count_dense_states(outer))
    # Rows of a step and their gradients: those that came, and those that go out.
    in_flight = 2 * FLOAT_BYTES * float(requested_W.sum() + requested_W.max() * num_ranks)
    return ShardingEstimate(
        tables,
        device_W + layers + in_flight,
        host_W,
        file_W,
        copied_W + layers,
        layers + in_flight,
        {
            "layers, forward and backward": (0.0, step.flops / speeds.flops),
            "tables, in the GPU's memory": (hbm_bytes, hbm_bytes / speeds.hbm),
            "tables, in the host's memory": (pcie_bytes, pcie_bytes / speeds.pcie),
            "rows and gradients, NVLink": (2 * near, 2 * near / speeds.nvlink),
            f"rows and gradients{NETWORK}": (2 * far, 2 * far / speeds.network),
            **layers_part(reduced, num_ranks <= cluster.ranks_per_host, speeds),
        },
    )


def layers_part(
    num_bytes: float, is_one_host: bool, speeds: Speeds
) -> dict[str, tuple[float, float]]:
    """Return the part of a step that averages the layers' gradients."""
    name = f"{LAYERS}{'' if is_one_host else NETWORK}"
    return {name: (num_bytes, num_bytes / (speeds.nvlink if is_one_host else speeds.network))}


class PlacedBytes(NamedTuple):
    """Bytes of a GPU's memory, of its host's and of its host's disk; of each rank or of one."""

    device: Any
    host: Any
    file: Any


def table_bytes(
    placement: str,
    rows: Any,
    columns: Any,
    outer: OuterConfig,
    cache_share: float,
    row_counts: int = 0,
) -> PlacedBytes:
    """Return the bytes of a table, or of each rank's part, with its state."""
    of_values, of_rows = count_states(outer)
    weights, row_states = FLOAT_BYTES * rows * columns, FLOAT_BYTES * (of_rows + row_counts) * rows
    table_size, nothing = weights * (1 + of_values), 0.0 * rows
    if placement in BEYOND_DEVICE:
        whole = table_size + row_states
        slots = rows * (OWN_ROW_BYTES + cache_share * OWN_SLOT_BYTES)
        if placement == "host":
            return PlacedBytes(cache_share * whole, slots + whole, nothing)
        return PlacedBytes(cache_share * whole, slots, whole)
    if placement not in IN_HOST_MEMORY:
        return PlacedBytes(table_size + row_states, nothing, nothing)
    cache = nothing
    if placement == "uvm_cached":
        cache = CACHED_SHARE * weights + rows * (CACHE_ROW_BYTES + CACHED_SHARE * CACHE_SLOT_BYTES)
    # fbgemm keeps states of one number a row on the GPU in any case.
    return PlacedBytes(row_states + cache, table_size, nothing)


def wire_bytes(sharding: ShardingConfig) -> int:
    """Return the bytes of a value of a row, or of its gradient, between ranks."""
    return FLOAT_BYTES if sharding.wire_dtype == "float32" else 2


def count_dense_states(outer: OuterConfig) -> int:
    """Return how many numbers the layers' optimizer keeps of each weight."""
    return DENSE_STATES[outer.dense_optimizer] + (outer.momentum > 0)


def count_states(outer: OuterConfig) -> tuple[int, int]:
    """Return how many numbers the tables' optimizer keeps of each value, and of each row."""
    kind = STATES[optimizer_type_to_emb_opt_type(SPARSE_OPTIMIZERS[outer.sparse_optimizer])]
    return len(kind.names) - len(kind.of_rows), len(kind.of_rows)


def _pinned_bytes(num_bytes: Values) -> Values:
    # torch gives pinned memory out in powers of two.
    return np.where(num_bytes > 0, 2.0 ** np.ceil(np.log2(np.maximum(num_bytes, 1))), 0.0)


def _held_rows(
    table: Mapping[str, Any], num_rows: int, width: int, num_ranks: int
) -> tuple[Values, Values]:
    if table["kind"] == "data_parallel":
        return np.full(num_ranks, float(num_rows)), np.full(num_ranks, float(width))
    rows_W, columns_W = np.zeros(num_ranks), np.zeros(num_ranks)
    for shard in table["shards"]:  # of one table a rank has one at most
        rows_W[shard["rank"]] = shard["rows"][1] - shard["rows"][0]
        columns_W[shard["rank"]] = shard["columns"][1] - shard["columns"][0]
    return rows_W, columns_W


def _busiest(sent_W: Values, ranks_per_host: int) -> tuple[float, float]:
    """Return the bytes that the busiest rank sends, or receives, within its host and beyond it."""
    # Each rank sends every other one `sent_W`.
    host_W = np.arange(len(sent_W)) // ranks_per_host
    of_host_W = np.bincount(host_W, sent_W)[host_W]
    peers_W = np.bincount(host_W)[host_W]
    near_W = np.maximum(sent_W * (peers_W - 1), of_host_W - sent_W)
    far_W = np.maximum(sent_W * (len(sent_W) - peers_W), sent_W.sum() - of_host_W)
    return float(near_W.max()), float(far_W.max())


def suggest_fits(
    estimated: ShardingEstimate,
    widths: Sequence[int],
    outer: OuterConfig,
    sharding: ShardingConfig,
    cluster: Cluster,
) -> list[str]:
    """Return, in words, changes by which tables cut by rows would fit."""
    usable = cluster.device_bytes * (1 - RESERVED) - estimated.fixed_bytes
    sizes = [(table["rows"], table["width"]) for table in estimated.tables.values()]
    ways = []

    def on_each(placement: str, widest: int) -> tuple[float, float]:
        parts = [
            table_bytes(
                placement,
                rows / cluster.world_size,
                min(width, widest),
                outer,
                sharding.cache_share,
            )
            for rows, width in sizes
        ]
        return sum(one.device for one in parts), sum(one.host for one in parts)

    widest = max(width for _, width in sizes)
    needed, _ = on_each("device", widest)
    if needed <= usable:
        return ['sharding.default = "row_wise"']
    if usable > 0:
        # Whole machines, rounded up.
        hosts = -(-needed * cluster.world_size // (usable * cluster.ranks_per_host))
        ways.append(f"--gpus {int(hosts) * cluster.ranks_per_host}")
    narrower = [width for width in widths if on_each("device", width)[0] <= usable]
    if narrower:
        ways.append(f"model.embedding_dim = {max(narrower)}")
    beyond = IN_HOST_MEMORY[::-1] if sharding.exchange == "torchrec" else BEYOND_DEVICE
    for placement in beyond:
        device, host = on_each(placement, widest)
        if device <= usable and host <= cluster.host_bytes:
            ways.append(f'sharding.placement = "{placement}"')
            break
    return ways
