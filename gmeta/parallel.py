"""Ranks, sharded tables and the step that all ranks take together.

The only file that touches torch.distributed and TorchRec's sharding. Tables are split row-wise over
the ranks (AlltoAll of ids and rows), dense layers are replicated (AllReduce): arXiv 2401.04338,
section 3.

Shape suffixes: U fetched rows, B tables, D embedding width.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torchrec.optim
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from gmeta.config import TrainConfig
from gmeta.episodes import Episodes
from gmeta.errors import GMetaError, UserError
from gmeta.learner import MetaLearner, QueryPrediction
from gmeta.table_updates import use_fast_cpu_updates
from metaio.batch import TaskBatch, empty_batch
from metaio.features import Features

T = TypeVar("T")

SPARSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
}
# Rows of a table that share one random stream: any sharding then starts from the same values.
INIT_BLOCK_ROWS = 65_536
# float32 rounding gives about 5e-7 over 256 terms, bfloat16 about 5e-3.
MATMUL_RELATIVE_ERROR = 5e-6
ADAGRAD_EPSILON = (
    1e-8  # the default of fbgemm's kernels, named so that other implementations can match it
)


@dataclass(frozen=True)
class Ranks:
    """This process among all; `control` is a gloo group for small messages between hosts."""

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup


@dataclass(frozen=True)
class StepTotals:
    """What all ranks together bring to a step."""

    num_terms: int
    num_rows: int
    ranks_with_data: int


def start_ranks(device: str, timeout_s: int, store: Store | None = None) -> Ranks:
    """Join the process group that torchrun describes in the environment (one rank without
    torchrun).

    A `store` replaces the rendezvous that the environment names; rank and world size still come
    from there.

    Raises:
        UserError: cuda is asked for where no GPU is visible.
    """
    _quieten()
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            'run.device = "cuda", but torch sees no GPU. '
            'Set run.device = "cpu" or install the driver'
        )
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    where = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(where)
    else:
        choose_cpu_matmul()
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if use_cuda else "gloo"
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if store is None and "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend, store=store or HashStore(), rank=rank, world_size=world_size, timeout=timeout
        )
    control = dist.new_group(backend="gloo", timeout=timeout)
    return Ranks(dist.get_rank(), dist.get_world_size(), where, control)


def choose_cpu_matmul() -> str:
    """Let float32 products run in oneDNN where that loses no accuracy; returns torch's precision.

    MKL's sgemm runs at half speed on AMD processors. torch reaches oneDNN by the precision
    "medium", which on processors with AMX really computes in bfloat16: one product tells.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    torch.set_float32_matmul_precision("medium")
    error = ((left @ right).double() - exact).abs().max() / exact.abs().max()
    if error > MATMUL_RELATIVE_ERROR:
        torch.set_float32_matmul_precision("highest")
    return torch.get_float32_matmul_precision()


def _quieten() -> None:
    """Hide what TorchRec's own calls set off and no user of ours can act on."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torchrec|torch\.distributed")
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="fbgemm_gpu")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


@contextmanager
def lost_peers_explained() -> Iterator[None]:
    """Turn a broken collective into one line: the rank that caused it tells its own story.

    Raises:
        GMetaError: a peer died or did not answer within the timeout.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors, NCCL and the store raise subclasses of DistError.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise GMetaError(
            f"lost contact with the other ranks: {str(error).splitlines()[0][:200]}. "
            "See what the first rank that failed said; --resume goes on from the newest checkpoint"
        ) from error


def stop_ranks() -> None:
    """Leave the process group."""
    dist.destroy_process_group()


class ShardedLearner(nn.Module):
    """The embedding tables in front of a MetaLearner: what DistributedModelParallel shards and
    replicates.
    """

    def __init__(self, tables: EmbeddingCollection, learner: MetaLearner) -> None:
        super().__init__()
        self.tables = tables
        self.learner = learner
        self._names = [config.name for config in tables.embedding_configs()]

    def forward(self, episodes: Episodes, weight: float) -> Tensor:
        """The rank's weighted loss, see MetaLearner.forward."""
        loss: Tensor = self.learner(self.fetch(episodes), episodes, weight)
        return loss

    def fetch(self, episodes: Episodes) -> Tensor:
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
    """
    outer = config.outer
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


def in_step(
    batches: Iterator[TaskBatch],
    arrange: Callable[[TaskBatch], Episodes],
    features: Features,
    ranks: Ranks,
) -> Iterator[tuple[Episodes, StepTotals]]:
    """This rank's episodes, on its device, and the totals of each step, until no rank has data
    left.

    A rank that runs out feeds empty batches, so its peers' collectives complete. The totals of a
    step travel while the step before it computes.
    """
    empty = empty_batch(
        len(features.tables), len(features.single), len(features.multi), len(features.dense)
    )

    def announce() -> tuple[Episodes, Tensor, dist.Work]:
        batch = next(batches, None)
        mine = arrange(empty if batch is None else batch)
        counts = torch.tensor([mine.num_terms, mine.num_rows, int(batch is not None)])
        return (
            mine.to(ranks.device),
            counts,
            dist.all_reduce(counts, group=ranks.control, async_op=True),
        )

    upcoming = announce()
    while True:
        episodes, counts, work = upcoming
        work.wait()
        totals = StepTotals(*counts.tolist())
        if totals.ranks_with_data == 0:
            return
        upcoming = announce()
        yield episodes, totals


def sum_over_ranks(values: list[float], ranks: Ranks) -> list[float]:
    """Element-wise sum of every rank's values, in float64."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, group=ranks.control)
    summed: list[float] = total.tolist()
    return summed


def barrier(ranks: Ranks) -> None:
    """Wait until every rank is here."""
    dist.barrier(group=ranks.control)


def gather_to_first(value: T, ranks: Ranks) -> list[T] | None:
    """Every rank's value by rank, on rank 0; None elsewhere. Values travel pickled."""
    received: list[Any] | None = [None] * ranks.world_size if ranks.rank == 0 else None
    dist.gather_object(value, received, dst=0, group=ranks.control)
    return received
