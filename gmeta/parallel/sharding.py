"""Sharded tables in front of the replicated layers.

Tables are split row-wise over the ranks (AlltoAll of ids and rows), dense layers are replicated
(AllReduce): arXiv 2401.04338, section 3.

Shape suffixes: U fetched rows, B tables, D embedding width.
"""

import os

import torch
import torch.distributed as dist
import torchrec.optim
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from gmeta.accumulate import MicroBatches, accumulated_loss
from gmeta.config import TrainConfig
from gmeta.episodes import Episodes
from gmeta.errors import ConfigError
from gmeta.learner import MetaLearner, QueryPrediction
from gmeta.parallel.ranks import Ranks
from gmeta.table_updates import use_fast_cpu_updates
from metaio.features import Features

SPARSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
    "adam": torch.optim.Adam,
    "partial_rowwise_adam": torchrec.optim.PartialRowWiseAdam,
}
CUDA_SPARSE_OPTIMIZERS = ("adam", "partial_rowwise_adam")
# Rows of a table that share one random stream: any sharding then starts from the same values.
INIT_BLOCK_ROWS = 65_536
ADAGRAD_EPSILON = (
    1e-8  # the default of fbgemm's kernels, named so that other implementations can match it
)


class ShardedLearner(nn.Module):
    """The embedding tables in front of a MetaLearner: what DistributedModelParallel shards and
    replicates.
    """

    def __init__(self, tables: EmbeddingCollection, learner: MetaLearner) -> None:
        super().__init__()
        self.tables = tables
        self.learner = learner
        self._names = [config.name for config in tables.embedding_configs()]

    def forward(self, episodes: Episodes | MicroBatches, weight: float) -> Tensor:
        """The rank's weighted loss, see MetaLearner.forward."""
        rows_UD = self.fetch(episodes)
        if isinstance(episodes, MicroBatches):
            return accumulated_loss(self.learner, rows_UD, episodes, weight)
        loss: Tensor = self.learner(rows_UD, episodes, weight)
        return loss

    def fetch(self, episodes: Episodes | MicroBatches) -> Tensor:
        """The rows of `episodes.unique_ids_U`, from whichever rank holds them: [U, D]."""
        # Lengths of one id each and stride 1: every table's ids are one jagged sample.
        ids = KeyedJaggedTensor(
            keys=self._names,
            values=episodes.unique_ids_U,
            lengths=episodes.unique_lengths_B,
            stride=1,
        )
        fetched = self.tables(ids)
        return torch.cat([fetched[name].values() for name in self._names])

    @torch.no_grad()
    def predict(self, episodes: Episodes) -> QueryPrediction:
        """See MetaLearner.predict; every rank must call it for each step, also without episodes."""
        return self.learner.predict(self.fetch(episodes), episodes)


def shard_learner(
    learner: MetaLearner,
    features: Features,
    config: TrainConfig,
    ranks: Ranks,
    stock_kernels: bool = False,
) -> DistributedModelParallel:
    """Tables split row-wise over the ranks with their optimizer fused into backward, layers
    replicated.

    On a CPU the tables' arithmetic is ours unless `stock_kernels` asks for fbgemm's.
    The tables' initial values depend on `run.seed` alone, not on the number of ranks.

    Raises:
        ConfigError: the tables' optimizer is not one of this device.
    """
    outer = config.outer
    check_sparse_optimizer(outer.sparse_optimizer, ranks.device)
    tables = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=table.name,
                embedding_dim=config.model.embedding_dim,
                num_embeddings=table.num_rows,
                feature_names=[table.name],
            )
            for table in features.tables
        ],
        device=torch.device("meta"),
    )
    epsilon = {} if outer.sparse_optimizer == "sgd" else {"eps": ADAGRAD_EPSILON}
    apply_optimizer_in_backward(
        SPARSE_OPTIMIZERS[outer.sparse_optimizer],
        tables.parameters(),
        {"lr": outer.sparse_lr, **epsilon},
    )
    plan = construct_module_sharding_plan(
        tables,
        {table.name: row_wise() for table in features.tables},
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        world_size=ranks.world_size,
        device_type=ranks.device.type,
    )
    sharded = DistributedModelParallel(
        ShardedLearner(tables, learner.to(ranks.device)),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=ranks.device,
        plan=ShardingPlan({"tables": plan}),
        sharders=[EmbeddingCollectionSharder()],
    )
    if ranks.device.type == "cpu" and not stock_kernels:
        use_fast_cpu_updates(sharded)
    initialise_tables(sharded, outer.embedding_init_std, config.run.seed)
    return sharded


def check_sparse_optimizer(name: str, device: torch.device) -> None:
    """Refuse an optimizer that fbgemm does not fuse on this kind of device.

    Raises:
        ConfigError: it is Adam's kind and the device is a CPU.
    """
    if device.type == "cpu" and name in CUDA_SPARSE_OPTIMIZERS:
        others = [known for known in SPARSE_OPTIMIZERS if known not in CUDA_SPARSE_OPTIMIZERS]
        raise ConfigError(
            f"outer.sparse_optimizer = {name!r} needs CUDA: fbgemm has no such fused update on a "
            f"CPU. Choose one of {', '.join(others)}"
        )


def initialise_tables(sharded: DistributedModelParallel, std: float, seed: int) -> None:
    """Normal values with this deviation in every table shard of this rank, the same at any world
    size.
    """
    for table_index, (_, table) in enumerate(sorted(table_shards(sharded).items())):
        for shard in table.local_shards():
            first_row, num_rows = shard.metadata.shard_offsets[0], shard.tensor.shape[0]
            for block in range(
                first_row // INIT_BLOCK_ROWS, -(-(first_row + num_rows) // INIT_BLOCK_ROWS)
            ):
                # Always the whole block: torch's normal values depend on how many are asked for.
                start = block * INIT_BLOCK_ROWS
                block_rows = min(INIT_BLOCK_ROWS, table.size(0) - start)
                generator = torch.Generator().manual_seed(_mixed_seed(seed, table_index, block))
                values = torch.randn(block_rows, table.size(1), generator=generator) * std
                begin, end = max(first_row, start), min(first_row + num_rows, start + block_rows)
                with torch.no_grad():
                    shard.tensor[begin - first_row : end - first_row] = values[
                        begin - start : end - start
                    ]


def _mixed_seed(seed: int, table: int, block: int) -> int:
    return ((seed * 1_000_003 + table) * 1_000_003 + block) % 2**63


def table_shards(sharded: DistributedModelParallel) -> dict[str, ShardedTensor]:
    """This rank's view of every table, by the name of its weight in the state dict."""
    return {
        name: value
        for name, value in sharded.state_dict().items()
        if isinstance(value, ShardedTensor)
    }


def local_learner(sharded: DistributedModelParallel) -> ShardedLearner:
    """The module inside the data-parallel wrapper, for evaluation."""
    wrapped = sharded.module
    learner: ShardedLearner = wrapped.module if hasattr(wrapped, "module") else wrapped
    return learner
