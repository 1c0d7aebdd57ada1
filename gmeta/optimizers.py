"""The outer optimizers: one over the replicated layers, beside those fused into the tables'
backward.
"""

import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from gmeta.config import OuterConfig

DENSE_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


def build_optimizer(sharded: DistributedModelParallel, outer: OuterConfig) -> CombinedOptimizer:
    """`step()` updates the layers; the tables were updated in backward. One state dict for both."""

    def dense(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kind = DENSE_OPTIMIZERS[outer.dense_optimizer]
        return kind(parameters, lr=outer.dense_lr, weight_decay=outer.weight_decay)  # type: ignore[call-arg]

    layers = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    return CombinedOptimizer([sharded.fused_optimizer, KeyedOptimizerWrapper(layers, dense)])


def set_learning_rates(optimizer: CombinedOptimizer, outer: OuterConfig, done_share: float) -> None:
    """The schedule's rates for a step that `done_share` of the run's steps stand before.

    The layers take theirs in `step()`, the tables in `zero_grad()`: call it before both. Nothing
    but `done_share` decides, so a resumed run goes on with the rates it would have had.
    """
    scale = 1.0 - done_share if outer.lr_schedule == "linear" else 1.0
    for _, part in optimizer.optimizers:
        rate = outer.dense_lr if isinstance(part, KeyedOptimizerWrapper) else outer.sparse_lr
        for group in part.param_groups:
            group["lr"] = rate * scale


def create_state(optimizer: CombinedOptimizer) -> None:
    """Make the layers' optimizer hold all the state it will have, so that a checkpoint can fill it.

    torch's optimizers create state at their first step: this takes one with zero gradients. It may
    move the layers (weight decay), so load them afterwards.
    """
    for _, part in optimizer.optimizers:
        if isinstance(part, KeyedOptimizerWrapper):
            part.init_state()
            part.zero_grad()
