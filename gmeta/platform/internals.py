"""Every private name of torch and TorchRec that the engine uses, each behind a function of its own.
When a new version moves one, tests/platform/test_internals.py names it: change it here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.distributed_c10d import Store, _get_default_store
from torchrec.distributed import batched_embedding_kernel as kernels
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.types import ParameterSharding
from torchrec.optim.keyed import KeyedOptimizer


class TableKernel(NamedTuple):
    """Tables that are kept as one block of memory and looked up together."""

    group: Any  # fbgemm's SplitTableBatchedEmbeddingBagsCodegen, or what stands in its place
    tables: list[Any]  # TorchRec's ShardedEmbeddingTable of each, in the order of the memory


def table_kernels(module: nn.Module) -> Iterator[TableKernel]:
    """Yield this rank's groups of tables, wherever TorchRec has put them in `module`."""
    # If they move: whatever `ShardedEmbeddingCollection.forward` calls to look rows up.
    for part in module.modules():
        if isinstance(part, ShardedEmbeddingCollection):
            for lookup in part._lookups:
                for kernel in getattr(lookup, "module", lookup)._emb_modules:
                    yield TableKernel(kernel.emb_module, kernel._config.embedding_tables)


@contextmanager
def keep_tables_in(kind: type[nn.Module]) -> Iterator[None]:
    """Have TorchRec keep the tables that it shards inside the block in modules of this kind."""
    # In place of fbgemm's. If it moves: what `BatchedFusedEmbedding` makes its `emb_module` of.
    before = kernels.SplitTableBatchedEmbeddingBagsCodegen
    kernels.SplitTableBatchedEmbeddingBagsCodegen = kind
    try:
        yield
    finally:
        kernels.SplitTableBatchedEmbeddingBagsCodegen = before


def update_in_backward(
    tables: nn.Module, optimizer: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    """Have TorchRec fuse this optimizer into the backward of tables not placed yet."""
    # torch's `_apply_optimizer_in_backward` sets the same attributes, but comes with eight
    # optimizers that are compiled at import: 0.2 s of the start of each rank. If they move: what
    # TorchRec's ShardedEmbeddingCollection and its planner read of a parameter.
    for table in tables.parameters():
        parameter: Any = table
        parameter._in_backward_optimizers = []
        parameter._optimizer_classes, parameter._optimizer_kwargs = [optimizer], [settings]


def call_after_backward(function: Callable[[], None]) -> None:
    """Have `function` called when the backward that runs now has done its last operation."""
    # If it moves: torch's DistributedDataParallel and FSDP2 need the same.
    torch.autograd.Variable._execution_engine.queue_callback(function)


def job_store() -> Store:
    """Return the store through which the ranks of this job met."""
    # If it moves: start_ranks can make the store itself, in place of init_process_group.
    return _get_default_store()


def map_sharded(value: ShardedTensor, function: Callable[[Tensor], Tensor]) -> ShardedTensor:
    """Return a ShardedTensor of the same layout, its shards here what the function makes of each,
    of its shape."""
    # If it moves: DTensor replaces ShardedTensor where TorchRec's state dict does.
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(function(shard.tensor), shard.metadata) for shard in value.local_shards()],
        value.metadata(),
        process_group=value._process_group,
    )


def place_on_host(table: ParameterSharding) -> None:
    """Have TorchRec take the shards of a table for tensors on the hosts of its ranks."""
    # If it moves: torch's ShardedTensor compares the device of each shard with its placement.
    spec: Any = table.sharding_spec
    spec.shards = [
        ShardMetadata(one.shard_offsets, one.shard_sizes, f"rank:{one.placement.rank()}/cpu")
        for one in spec.shards
    ]


def place_row_states(optimizer: KeyedOptimizer) -> None:
    """Have the state that a sharded optimizer keeps of each row lie where the row does."""
    # On a rank that holds a single row TorchRec takes its state for one number of the whole table,
    # and no checkpoint of all ranks can be made. If it moves: TorchRec's EmbeddingFusedOptimizer
    # makes these states.
    for table, states in optimizer.state.items():
        places = table.metadata().shards_metadata
        # Cut by columns: all ranks hold the same rows, and the state lies right.
        if any(one.shard_offsets[1] for one in places):
            continue
        for name, state in states.items():
            local = state.local_shards() if isinstance(state, ShardedTensor) else []
            if len(local) != 1 or local[0].tensor.shape != (1,):
                continue
            shards = [
                ShardMetadata([one.shard_offsets[0]], [one.shard_sizes[0]], one.placement)
                for one in places
            ]
            (mine,) = (one for one in shards if one.placement == local[0].metadata.placement)
            properties = state.metadata().tensor_properties
            states[name] = ShardedTensor._init_from_local_shards_and_global_metadata(
                [Shard(local[0].tensor, mine)],
                ShardedTensorMetadata(shards, table.size()[:1], properties),
                process_group=state._process_group,
            )
