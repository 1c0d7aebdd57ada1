"""TorchRec's planner: places tables by its estimates of memory and time."""

from collections.abc import Mapping

from torch import nn
from torchrec import EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from gmeta.config.sharding import ExchangeKind, Kind, Placement
from gmeta.distributed.cluster_spec import Cluster
from gmeta.errors import ConfigError

# What the planner may choose from: by columns only where the config says so.
PLANNED = ("row_wise", "table_wise")
PLANNED_ON_CUDA = (*PLANNED, "data_parallel")
# Where fbgemm's kernels keep rows that the config gives a place; auto: TorchRec's default.
KERNELS = {
    "device": EmbeddingComputeKernel.FUSED.value,
    "uvm": EmbeddingComputeKernel.FUSED_UVM.value,
    "uvm_cached": EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
}
PLACES = {kernel: place for place, kernel in KERNELS.items()}


class NoPlaceError(ConfigError):
    """TorchRec's planner finds no place for the tables."""


def plan_by_torchrec(
    tables: nn.Module,
    kinds: Mapping[str, Kind | None],
    placements: Mapping[str, Placement],
    exchange: ExchangeKind,
    tasks_per_step: int,
    cluster: Cluster,
) -> dict[str, EmbeddingModuleShardingPlan]:
    """Return TorchRec's plan of each collection in `tables`; kinds and placements are by names of
    modules, None: the planner chooses. Raises NoPlaceError: it finds none."""
    collections = collections_in(tables)
    configs = [table for one in collections.values() for table in one.embedding_configs()]
    on_cuda = cluster.device == "cuda"
    choice = PLANNED_ON_CUDA if on_cuda and exchange == "torchrec" else PLANNED
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=[kind] if (kind := kinds[table.name]) else list(choice),
            compute_kernels=_kernels(placements[table.name], exchange == "torchrec"),
            min_partition=table.embedding_dim // cluster.world_size
            if kinds[table.name] == "column_wise"
            else None,
        )
        for table in configs
    }
    topology = Topology(
        world_size=cluster.world_size,
        local_world_size=cluster.ranks_per_host,
        compute_device=cluster.device,
        ddr_cap=cluster.host_bytes,
        **({"hbm_cap": cluster.device_bytes} if on_cuda else {}),
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=-(-tasks_per_step // cluster.world_size),
        constraints=constraints,
        debug=False,
    )
    try:
        plans = planner.plan(nn.ModuleDict({"tables": tables}), [EmbeddingCollectionSharder()]).plan
    except PlannerError as error:
        raise NoPlaceError(
            "TorchRec's planner finds no place for the tables: "
            f"{str(error).strip().splitlines()[0].rstrip(' .')}. Add ranks or memory, "
            'make model.embedding_dim smaller, or set sharding.default = "row_wise"'
        ) from error
    # In the order of the tables, which the planner need not keep.
    return {
        path: EmbeddingModuleShardingPlan(
            {table.name: plans[path][table.name] for table in one.embedding_configs()}
        )
        for path, one in collections.items()
    }


def _kernels(placement: Placement, is_torchrecs: bool) -> list[str] | None:
    if placement == "auto" and is_torchrecs:
        return None
    if placement in ("auto", "device"):
        # Of its own accord it would put rows into the host's memory, for fbgemm's kernels. A table
        # that every rank holds has a kernel of another name.
        copied = [EmbeddingComputeKernel.DENSE.value] if is_torchrecs else []
        return [KERNELS["device"], *copied]
    return [KERNELS[placement]]


def collections_in(tables: nn.Module) -> dict[str, EmbeddingCollection]:
    """Return the collections in the `tables` of a ShardedLearner, by their names in the learner."""
    return {
        f"tables.{name}".removesuffix("."): module
        for name, module in tables.named_modules()
        if isinstance(module, EmbeddingCollection)
    }
