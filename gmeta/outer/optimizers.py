"""The outer optimizers: one over the replicated layers, beside those fused into the tables'
backward.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from gmeta.config import OuterConfig
from gmeta.outer.clipping import GradientClipping
from gmeta.outer.schedules import rate_scale
from gmeta.tables.groups import adam_groups, set_adam_step


class _FusedAdam(torch.optim.Adam):
    """torch's Adam as its fused kernel alone: of small layers, torch's own step spends two thirds
    of its time around that. State and result are torch's; AdamW is Adam whose group says so.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            parameters = [x for x in group["params"] if x.grad is not None]
            states: list[dict[str, Tensor]] = [self.state[x] for x in parameters]
            if not (states and all(states)):
                return super().step(closure)  # makes the state
            steps = [state["step"] for state in states]
            # A number would become a tensor once for each.
            torch._foreach_add_(steps, [torch.ones(())] * len(steps))
            kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            beta1, beta2 = group["betas"]
            kernel(
                parameters,
                [x.grad for x in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
        return None

    # torch would wrap it in hooks that nobody sets and a range that OuterOptimizer's step has.
    step.hooked = True  # type: ignore[attr-defined]


# Fused: one pass over each layer, where torch's default on a CPU is a dozen calls for each.
DENSE_OPTIMIZERS: dict[str, Callable[[OuterConfig], Callable[..., torch.optim.Optimizer]]] = {
    "adam": lambda outer: partial(_FusedAdam, fused=True),
    "adamw": lambda outer: partial(_FusedAdam, fused=True, decoupled_weight_decay=True),
    "adagrad": lambda outer: torch.optim.Adagrad,
    "sgd": lambda outer: partial(torch.optim.SGD, momentum=outer.momentum, fused=True),
}


class OuterOptimizer(CombinedOptimizer):
    """Layers and tables: `begin_step`, forward and backward, `step`. One state dict for both."""

    def __init__(self, sharded: DistributedModelParallel, outer: OuterConfig) -> None:
        layers = dict(in_backward_optimizer_filter(sharded.named_parameters()))

        def dense(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            kind = DENSE_OPTIMIZERS[outer.dense_optimizer](outer)
            return kind(parameters, lr=outer.dense_lr, weight_decay=outer.weight_decay)

        self._dense = KeyedOptimizerWrapper(layers, dense)
        super().__init__([sharded.fused_optimizer, self._dense])
        self._sharded = sharded
        self._adam_groups = adam_groups(sharded)
        self._layers = list(layers.values())
        self._outer = outer
        self._clipping = (
            GradientClipping(sharded, layers.values(), outer.clip_norm) if outer.clip_norm else None
        )

    def begin_step(self, step: int, total_steps: int) -> None:
        """Take the schedule's rates for the step that `step` steps of the run stand before, and
        forget the gradients of the last. Call it before forward.
        """
        outer = self._outer
        scale = rate_scale(outer.lr_schedule, outer.warmup_steps, step, total_steps)
        for _, part in self.optimizers:
            rate = outer.dense_lr if isinstance(part, KeyedOptimizerWrapper) else outer.sparse_lr
            for group in part.param_groups:
                group["lr"] = rate * scale
        set_adam_step(self._adam_groups, step)
        self.zero_grad()  # the tables take their rate here

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the layers' gradients; the tables, which keep none, take their rate."""
        # torch's own takes longer than the update of small layers.
        for layer in self._layers:
            layer.grad = None
        self._sharded.fused_optimizer.zero_grad()

    def step(self, closure: Any = None) -> None:
        """Update the layers; backward updated the tables, unless clipping held it back till now."""
        is_profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        name = "Optimizer.step#OuterOptimizer.step"
        with record_function(name) if is_profiled else nullcontext():
            if self._clipping is not None:
                self._clipping.apply()
            # The tables' own part would only take its rate again, in a call for every table.
            self._dense.step(closure)

    # As _FusedAdam's: torch's range, which is made also while nobody profiles, took a third of it.
    step.hooked = True  # type: ignore[attr-defined]


def build_optimizer(sharded: DistributedModelParallel, outer: OuterConfig) -> OuterOptimizer:
    """The optimizer of a sharded learner; make it before the learner's first step."""
    return OuterOptimizer(sharded, outer)
