"""Spreads a learner over the ranks: its tables by a plan (AlltoAll of ids and rows), its layers as
copies (AllReduce): arXiv 2401.04338, section 3."""

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from gmeta.config.sharding import ShardingConfig, WireDtype
from gmeta.config.table_names import TABLES_PREFIX, module_name
from gmeta.config.train_config import RunConfig, TrainConfig
from gmeta.data.cuda_graphs import CudaCapture
from gmeta.distributed.averaging import LayerAverage
from gmeta.distributed.exchange.torchrec import TorchRecExchange
from gmeta.distributed.exchange.wire import WireExchange
from gmeta.distributed.groups.levels import split_levels
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sequence.long_events import spread_long_events
from gmeta.distributed.sharded_learner import DistributedLearner, ShardedLearner
from gmeta.distributed.sharding_plan import (
    check_clipping,
    check_lookups,
    describe_plan,
    make_plan,
    merge_plans,
)
from gmeta.distributed.tables.admission import RowAdmission, TableShare
from gmeta.distributed.tables.plain_tables import PlainTables
from gmeta.distributed.unsharded import SPARSE_OPTIMIZERS, make_unsharded_tables, storages_of_tables
from gmeta.errors import ConfigError
from gmeta.platform.internals import ShardedTensor, keep_tables_in, table_kernels
from metaio.format.features import Features

if TYPE_CHECKING:  # which learner is spread over the ranks is its builder's business
    from gmeta.learner import MetaLearner

_log = logging.getLogger(__name__)

CUDA_SPARSE_OPTIMIZERS = ("adam", "partial_rowwise_adam")
# Rows of a table that share one random stream: any sharding then starts from the same values.
INIT_BLOCK_ROWS = 65_536
_BLOCKS_AT_ONCE = 16


class _NoAveraging(DataParallelWrapper):  # type: ignore[misc]
    # In place of DistributedDataParallel with one rank, or where LayerAverage averages.
    def wrap(self, dmp: DistributedLearner, env: ShardingEnv, device: torch.device) -> None:
        """Leave the layers as they are."""


class _AveragingOver(DefaultDataParallelWrapper):  # type: ignore[misc]
    # By DistributedDataParallel, over more ranks than the tables are sharded over, or as many.
    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._env = _environment(ranks)

    def wrap(self, dmp: DistributedLearner, env: ShardingEnv, device: torch.device) -> None:
        """Have the layers' gradients averaged."""
        super().wrap(dmp, self._env, device)


def _environment(ranks: Ranks) -> ShardingEnv:
    return ShardingEnv.from_process_group(ranks.devices or dist.group.WORLD)


def shard_learner(
    learner: "MetaLearner", features: Features, config: TrainConfig, ranks: Ranks
) -> DistributedLearner:
    """Return the learner, layers replicated, tables sharded by plan and updated within backward."""
    outer = config.outer
    is_ours = config.sharding.exchange == "host"
    if not is_ours:
        check_sparse_optimizer(outer.sparse_optimizer, ranks.device)
    names = [table.name for table in features.tables]
    storages = storages_of_tables(config.sharding, names, config.run.dir)
    tables = make_unsharded_tables(features, config.model, outer, storages)
    # In the order of the features: the exchange knows a table by its number.
    modules = list(map(module_name, names))
    levels = split_levels(ranks, config.sharding)
    averaged = levels.inside if levels.is_local else ranks  # whose layers are one
    plans = make_plan(tables, config.sharding, config.data.tasks_per_step, ranks, levels)
    plan = merge_plans(plans, modules)
    check_clipping(plan, outer.clip_norm)
    if not is_ours and ranks.device.type == "cpu":
        check_lookups(plan)
    # DistributedDataParallel lays out its messages anew after a process's first step, and with the
    # place of a gradient changes the order in which gloo adds those of three ranks or more: the
    # first step after a resume would not be that of an unbroken run.
    is_average_ours = is_ours and ranks.device.type == "cpu"
    spread_long_events(learner, config, ranks)
    _choose_shapes(learner, config.run, ranks)
    with keep_tables_in(PlainTables) if is_ours else nullcontext():
        sharded = DistributedLearner(
            ShardedLearner(tables, learner.to(ranks.device), config.run.precision),
            env=_environment(levels.inside),
            device=ranks.device,
            plan=ShardingPlan(plans),
            # Ours has codecs of its own, and TorchRec warns of those that gloo does without.
            sharders=[_sharder("float32" if is_ours else config.sharding.wire_dtype, ranks.device)],
            data_parallel_wrapper=_NoAveraging()
            if averaged.world_size == 1 or is_average_ours
            else _AveragingOver(averaged),
        )
    if is_average_ours and averaged.world_size > 1:
        LayerAverage(learner.parameters(), averaged)
    # The exchange and the tables' arithmetic are ours, or those of TorchRec and fbgemm.
    inner = sharded.local
    inner.levels = levels
    if is_ours:
        inner.exchange = WireExchange(inner.tables, plan, config.sharding.wire_dtype, levels)
    else:
        inner.exchange = TorchRecExchange(inner.tables, list(plan), ranks.device)
    if config.model.admission[0]:
        _share_rare_rows(sharded, names, outer.embedding_init_std, config.run.seed)
    else:
        initialise_tables(sharded, outer.embedding_init_std, config.run.seed)
    return sharded


@torch.no_grad()
def _share_rare_rows(sharded: DistributedLearner, tables: list[str], std: float, seed: int) -> None:
    """Begin with rows of zeros, in whose place a table's one vector is read, and have updates admit
    rows."""
    inner = sharded.local
    shared_BD = inner.learner.projections.shared_BD
    assert shared_BD is not None
    assert isinstance(inner.exchange, WireExchange)  # check_admission
    generator = torch.Generator().manual_seed(seed)
    shared_BD.copy_(torch.randn(shared_BD.shape, generator=generator) * std)
    places = {module_name(name): place for place, name in enumerate(tables)}
    parts = {kernel.group: kernel.tables for kernel in table_kernels(inner.tables)}
    for group in inner.exchange.groups:
        group.tables.values_RD.zero_()  # TorchRec has filled them, those in a file too
        shares = [
            TableShare(shared_BD[places[part.name]], part.local_metadata.shard_offsets[0] == 0)
            for part in parts[group.tables]
        ]
        group.after_update = RowAdmission(group, shares).record_step


def _choose_shapes(learner: "MetaLearner", run: RunConfig, ranks: Ranks) -> None:
    """Set whether batches have few shapes and steps run as graphs; log why they do not."""
    buckets, on_cuda = run.shape_buckets, ranks.device.type == "cuda"
    learner.in_buckets = buckets == "on" or (buckets == "auto" and on_cuda)
    if run.cuda_graphs == "off":
        return
    why_not = learner.use_graphs(CudaCapture()) if on_cuda else "this run computes on the CPU"
    if why_not and ranks.rank == 0:
        wants_graphs = run.cuda_graphs == "on"
        level = logging.WARNING if wants_graphs else logging.DEBUG
        _log.log(level, "run.cuda_graphs: steps are taken eagerly, as %s", why_not)


def _sharder(wire_dtype: WireDtype, device: torch.device) -> EmbeddingCollectionSharder:
    # The codecs are for TorchRec's own exchange.
    types = {"float32": CommType.FP32, "bfloat16": CommType.BF16, "float16": CommType.FP16}
    precision = types[wire_dtype]
    codecs = QCommsConfig(forward_precision=precision, backward_precision=precision)
    registry = get_qcomm_codecs_registry(codecs, device=device)
    return EmbeddingCollectionSharder(qcomm_codecs_registry=registry)


def check_sparse_optimizer(name: str, device: torch.device) -> None:
    """Raise ConfigError for an optimizer without a kernel of fbgemm on this kind of device."""
    # Of Adam's kinds fbgemm has none on a CPU.
    if device.type == "cpu" and name in CUDA_SPARSE_OPTIMIZERS:
        others = [known for known in SPARSE_OPTIMIZERS if known not in CUDA_SPARSE_OPTIMIZERS]
        raise ConfigError(
            f'outer.sparse_optimizer = {name!r} with sharding.exchange = "torchrec" needs CUDA: '
            'fbgemm has no such fused update on a CPU. Set sharding.exchange = "host", or choose '
            f"one of {', '.join(others)}"
        )


def initialise_tables(sharded: DistributedLearner, std: float, seed: int) -> None:
    """Fill every table shard of this rank with normal values of this deviation."""
    # From `run.seed`, the table and the row alone: equal under any plan, at any world size and
    # table size, so that a table that grows has the rows that it would have had from the start.
    state = sharded.state_dict()
    tables = [name for name in state if name.startswith(TABLES_PREFIX)]
    tables.sort(key=lambda name: name.rpartition("embeddings.")[2])  # whatever their widths
    for table_index, name in enumerate(tables):
        table = state[name]
        if isinstance(table, ShardedTensor):
            for shard in table.local_shards():
                first_row, first_column = shard.metadata.shard_offsets
                _fill(shard.tensor, first_row, first_column, table.size(1), std, seed, table_index)
        else:  # data-parallel
            _fill(table, 0, 0, table.shape[1], std, seed, table_index)


@torch.no_grad()
def _fill(
    part: Tensor,
    first_row: int,
    first_column: int,
    width: int,
    std: float,
    seed: int,
    table_index: int,
) -> None:
    """Initialise the part of a table that starts at this row and column."""
    end_row, columns = first_row + len(part), slice(first_column, first_column + part.shape[1])
    drawn = torch.empty(INIT_BLOCK_ROWS, width)  # once: the allocator would keep one of each block
    for block in range(first_row // INIT_BLOCK_ROWS, -(-end_row // INIT_BLOCK_ROWS)):
        start = block * INIT_BLOCK_ROWS
        begin, end = max(first_row, start), min(end_row, start + INIT_BLOCK_ROWS)
        # As many rows of the block as are needed, in sixteens: torch draws normal values sixteen at
        # a time, and only an incomplete sixteen at the end depends on how many are asked for.
        num_rows = -(-(end - start) // _BLOCKS_AT_ONCE) * _BLOCKS_AT_ONCE
        mixed_seed = ((seed * 1_000_003 + table_index) * 1_000_003 + block) % 2**63
        generator = torch.Generator().manual_seed(mixed_seed)
        values = drawn[:num_rows].normal_(generator=generator).mul_(std)
        part[begin - first_row : end - first_row] = values[begin - start : end - start, columns]


def describe_sharding(
    sharded: DistributedLearner, config: ShardingConfig, ranks: Ranks
) -> dict[str, Any]:
    """Return where the rows of every table live, see describe_plan."""
    size = sharded.local.levels.inside.world_size
    description = describe_plan(merge_plans(sharded.plan.plan), size, config)
    # The plan of each of the groups of ranks, counted from its first.
    groups = {"groups": ranks.world_size // size} if size < ranks.world_size else {}
    return {**description, **groups}


def table_shards(sharded: DistributedLearner) -> dict[str, ShardedTensor]:
    """Return this rank's view of every table, by the name of its weight in the state dict."""
    return {
        name: value
        for name, value in sharded.state_dict().items()
        if isinstance(value, ShardedTensor)
    }
