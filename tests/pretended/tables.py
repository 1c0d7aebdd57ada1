"""Stand-ins on the pretended GPU for what TorchRec and fbgemm have there in compiled code alone: the
lookup of a group of tables with a row-wise Adagrad step in its backward, and the mean of the layers'
gradients over ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
import torchrec.distributed.batched_embedding_kernel as kernels
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel

import gmeta.parallel.sharding as sharding
from tests.pretended import device
from tests.pretended.device import OnDevice, held

BACKWARD_LAUNCHES = 15  # sort, segments, update: an estimate of fbgemm's


class _Slice(OnDevice):
    """In place of TableBatchedEmbeddingSlice, which cannot be of a wrapper."""

    @staticmethod
    def __new__(cls: Any, data: Tensor, start_offset: int, end_offset: int, num_embeddings: int,
                embedding_dim: int) -> Any:  # fmt: skip
        part = held(data.detach())[start_offset:end_offset]
        return OnDevice.__new__(cls, part.view(num_embeddings, embedding_dim))

    def __init__(self, data: Tensor, **_: Any) -> None:
        self._original_tensor = data
        self._is_param = True
        self.requires_grad_(False)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, group: Any, indices: Tensor, offsets: Tensor) -> Tensor:
        first_row_F = held(group.hash_size_cumsum)[:-1]
        samples = (offsets.numel() - 1) // first_row_F.numel()
        ids_F = held(offsets)[::samples].diff()
        ctx.row_N = held(indices).long() + torch.repeat_interleave(first_row_F, ids_F)
        ctx.group = group
        device.COUNTS.launches["fbgemm::lookup"] += 2  # with the check of the ids
        return OnDevice(held(weights).detach().view(-1, group.max_D)[ctx.row_N])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        group, width = ctx.group, ctx.group.max_D
        device.COUNTS.launches["fbgemm::update"] += BACKWARD_LAUNCHES
        weights_RD = held(group.weights_dev).detach().view(-1, width)
        squares_R = held(group.momentum1_dev).detach()
        row_U, place_N = torch.unique(ctx.row_N, return_inverse=True)
        grad_UD = torch.zeros(row_U.numel(), width).index_add_(0, place_N, held(grads[0]))
        squares_R[row_U] += grad_UD.square().mean(1)
        root_U = squares_R[row_U].sqrt() + group.optimizer_args.eps
        weights_RD[row_U] -= group.get_learning_rate() * grad_UD / root_U.unsqueeze(1)
        return None, None, None, None


def _forward(self: Any, indices: Tensor, offsets: Tensor, *_: Any, **__: Any) -> Tensor:
    if not self.weights_dev.requires_grad:
        self.weights_dev.requires_grad_(True)
    rows: Tensor = _Lookup.apply(self.weights_dev, self, indices, offsets)
    return rows


class _Averaged(sharding._Alone):
    """In place of DistributedDataParallel, whose reducer writes to memory of a GPU."""

    def wrap(self, dmp: DistributedModelParallel, env: Any, device: torch.device) -> None:
        """Have every layer's gradient averaged over the ranks as soon as it is there."""
        if dist.get_world_size() == 1:
            return
        for layer in dmp._dmp_wrapped_module.learner.parameters():
            if layer.requires_grad:
                layer.register_post_accumulate_grad_hook(_average)


def _average(layer: Tensor) -> None:
    assert layer.grad is not None
    dist.all_reduce(layer.grad)
    layer.grad.div_(dist.get_world_size())


def stand_in() -> None:
    """Put them in place, in this process for good."""
    kernels.TableBatchedEmbeddingSlice = _Slice
    group = SplitTableBatchedEmbeddingBagsCodegen
    of_cpu = group.forward
    group.forward = lambda self, *rest, **named: (
        of_cpu(self, *rest, **named) if self.use_cpu else _forward(self, *rest, **named)
    )
    shard = sharding.DistributedModelParallel

    def sharded(module: nn.Module, **named: Any) -> DistributedModelParallel:
        on_gpu = named["device"].type == "cuda"
        return shard(
            module, **(named | {"data_parallel_wrapper": _Averaged()} if on_gpu else named)
        )

    sharding.DistributedModelParallel = sharded  # type: ignore[misc,assignment]
