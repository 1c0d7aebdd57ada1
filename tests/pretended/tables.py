"""Stand-ins on the pretended GPU for what is compiled code there: fbgemm's lookup of a group of
tables, with a row-wise Adagrad step in its backward, and DistributedDataParallel."""

from typing import Any

import torch
import torch.distributed as dist
import torchrec.distributed.batched_embedding_kernel as kernels
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

import gmeta.distributed.sharding as sharding
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.platform.internals import call_after_backward
from tests.pretended.device import OnDevice, counts, held

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
        first_rows = held(group.hash_size_cumsum)[:-1]
        samples = (offsets.numel() - 1) // first_rows.numel()
        num_ids = held(offsets)[::samples].diff()
        ctx.row_N = held(indices).long() + torch.repeat_interleave(first_rows, num_ids)
        ctx.group = group
        counts().launches["fbgemm::lookup"] += 2  # with the check of the ids
        return OnDevice(held(weights).detach().view(-1, group.max_D)[ctx.row_N])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        group, width = ctx.group, ctx.group.max_D
        counts().launches["fbgemm::update"] += BACKWARD_LAUNCHES
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


class Averaged(sharding._NoAveraging):
    """In place of DistributedDataParallel, whose reducer writes to memory of a GPU: one message,
    when the last layer has its gradient.

    In a group of its own: ranks that start it at another point of backward, which NCCL's one
    communicator would not forgive, come to their end here, and the order tells."""

    def wrap(self, dmp: DistributedLearner, env: Any, device: torch.device) -> None:
        """Have the layers' gradients averaged over the ranks in every backward."""
        self.layers = [p for p in dmp.local.learner.parameters() if p.requires_grad]
        self.missing = len(self.layers)
        if dist.get_world_size() > 1:
            self._group = dist.new_group()
            for layer in self.layers:
                layer.register_post_accumulate_grad_hook(lambda one: self.ready(one))

    def ready(self, _: Tensor) -> None:
        """Take note of a layer's gradient."""
        self.missing -= 1
        if not self.missing:
            self.missing = len(self.layers)
            self.average()

    def average(self) -> None:
        """Start to add up the gradients; behind the last operation of backward they are means."""
        grads = [layer.grad for layer in self.layers if layer.grad is not None]
        message = torch.cat([grad.flatten() for grad in grads])
        # Waited for behind backward: until then others may need this rank for their rows.
        work = dist.all_reduce(message, group=self._group, async_op=True)

        def finish() -> None:
            work.wait()
            message.div_(dist.get_world_size())
            parts = message.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(parts, grads, strict=True)])

        call_after_backward(finish)


def stand_in() -> None:
    """Put them in place, in this process for good."""
    kernels.TableBatchedEmbeddingSlice = _Slice
    group = SplitTableBatchedEmbeddingBagsCodegen
    of_cpu = group.forward
    group.forward = lambda self, *rest, **named: (
        of_cpu(self, *rest, **named) if self.use_cpu else _forward(self, *rest, **named)
    )
    shard = sharding.DistributedLearner

    def sharded(module: nn.Module, **named: Any) -> DistributedLearner:
        on_gpu = named["device"].type == "cuda"
        return shard(module, **(named | {"data_parallel_wrapper": Averaged()} if on_gpu else named))

    sharding.DistributedLearner = sharded  # type: ignore[misc,assignment]
