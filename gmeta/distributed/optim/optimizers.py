"""The outer optimizers: one over the replicated layers, beside those fused into the tables."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from gmeta.config.train_config import OuterConfig
from gmeta.distributed.exchange.wire import WireExchange
from gmeta.distributed.groups.local_rows import LocalRows
from gmeta.distributed.optim.clipping import GradientClipping
from gmeta.distributed.optim.local_layers import OUTER_MOMENTUM, LocalLayers
from gmeta.distributed.optim.local_steps import LocalSteps
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.distributed.tables.plain_tables import PlainTables
from gmeta.distributed.tables.table_groups import Group, table_groups
from gmeta.platform.internals import place_row_states

# The share of the rate after a share of the decaying steps (0 at the first, never quite 1).
DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),  # arXiv 1608.03983, equation 5
}
# Fused: one pass over each layer, where torch's default on a CPU is a dozen calls for each.
DENSE_OPTIMIZERS: dict[str, Callable[[OuterConfig], Callable[..., torch.optim.Optimizer]]] = {
    "adam": lambda outer: partial(torch.optim.Adam, fused=True),
    "adamw": lambda outer: partial(torch.optim.AdamW, fused=True),
    "adagrad": lambda outer: torch.optim.Adagrad,
    "sgd": lambda outer: partial(torch.optim.SGD, momentum=outer.momentum, fused=True),
}


class _DenseOptimizer(KeyedOptimizerWrapper):  # type: ignore[misc]
    has_outer_momentum = False

    def init_state(self, *rest: Any, **named: Any) -> None:
        """Make all state, so that a checkpoint's can be loaded."""
        super().init_state(*rest, **named)
        if self.has_outer_momentum:
            for layer in self.params.values():
                self.state[layer][OUTER_MOMENTUM] = torch.zeros_like(layer)


class OuterOptimizer(CombinedOptimizer):
    """Layers and tables: `begin_step`, forward and backward, `step`. One state dict for both."""

    def __init__(self, sharded: DistributedLearner, outer: OuterConfig) -> None:
        # Frozen ones have no state that a checkpoint could hold.
        named = in_backward_optimizer_filter(sharded.named_parameters())
        layers = {name: parameter for name, parameter in named if parameter.requires_grad}

        def dense(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            kind = DENSE_OPTIMIZERS[outer.dense_optimizer](outer)
            return kind(parameters, lr=outer.dense_lr, weight_decay=outer.weight_decay)

        levels = sharded.local.levels
        self._dense = _DenseOptimizer(layers, dense)
        self._dense.has_outer_momentum = levels.is_local and levels.outer_momentum > 0
        self._tables = sharded.fused_optimizer
        place_row_states(self._tables)
        super().__init__([self._tables, self._dense])
        self._layers = list(layers.values())
        # What the schedule scales; a callback may set other rates.
        self.full_rates = {"dense_lr": outer.dense_lr, "sparse_lr": outer.sparse_lr}
        self._rates = self.full_rates
        self._sharded = sharded
        self._stepwise_groups = _find_stepwise_groups(sharded)
        for group in table_groups(sharded):
            if isinstance(group, PlainTables):  # fbgemm's are refused: check_sharding
                group.weight_decay = outer.sparse_weight_decay
        self._outer = outer
        self._local: LocalSteps | None = None
        exchange = sharded.local.exchange
        if levels.is_local and isinstance(exchange, WireExchange):
            assert isinstance(exchange.copies, LocalRows)
            local_layers = LocalLayers(self._layers, self._dense.state, levels.outer_momentum)
            self._local = LocalSteps(exchange.copies, local_layers, levels)
        self._step = 0
        self.steps_before = 0  # the run: those of the runs that it goes on from
        self._clipping = (
            GradientClipping(sharded, layers.values(), outer.clip_norm) if outer.clip_norm else None
        )

    def begin_step(self, step: int, total_steps: int) -> None:
        """Set the rates for the step after `step` steps of the run, and drop the last gradients."""
        # Before the step's rows are looked up: fbgemm takes the rate with the lookup.
        outer, self._step = self._outer, step
        if self._local is not None:
            self._local.begin_step()
        scale = rate_scale(outer.lr_schedule, outer.warmup_steps, step, total_steps)
        self._rates = {name: rate * scale for name, rate in self.full_rates.items()}
        for _, part in self.optimizers:
            is_dense = isinstance(part, KeyedOptimizerWrapper)
            for group in part.param_groups:
                group["lr"] = self._rates["dense_lr" if is_dense else "sparse_lr"]
        # Bias correction goes on with the run before: its moments come along.
        _set_step(self._stepwise_groups, self.steps_before + step)
        # As zero_grad does, but for torch's three wrappers around it.
        for layer in self._layers:
            layer.grad = None
        self._tables.zero_grad()  # the tables take their rate here

    def step(self, closure: Any = None) -> None:
        """Update the layers; backward updated the tables, unless clipping held them back."""
        if self._clipping is not None:
            self._clipping.apply()
        # The tables' own part would only take its rate again, in a call for every table.
        self._dense.step(closure)
        if self._local is not None:
            self._local.finish_step(self._step)

    def sync(self) -> None:
        """Have all groups of ranks hold the same model and state, as they do unless they take steps
        by themselves. Collective."""
        if self._local is not None:
            self._local.sync()

    def reading(self) -> dict[str, float | None]:
        """Return the last step's rates and its gradient's norm before clipping, of the layers and,
        with outer.clip_norm, of all; None where it is not finite; and what the exchange tells of
        the steps since the last reading. Waits for the device."""
        if self._clipping is not None:
            norms = self._clipping.norms()
        else:
            grads = [layer.grad for layer in self._layers if layer.grad is not None]
            norms = {"dense_grad_norm": float(torch.nn.utils.get_total_norm(grads))}
        finite = {name: norm if math.isfinite(norm) else None for name, norm in norms.items()}
        return {**self._rates, **finite, **self._sharded.local.exchange.reading()}


def build_optimizer(sharded: DistributedLearner, outer: OuterConfig) -> OuterOptimizer:
    """Return the optimizer of a sharded learner; make it before the learner's first step."""
    return OuterOptimizer(sharded, outer)


def rate_scale(schedule: str, warmup_steps: int, step: int, total_steps: int) -> float:
    """Return the factor of the learning rates in the step after `step` steps.

    The first `warmup_steps` rise evenly to the full rate (arXiv 1706.02677, section 2.2), the
    schedule runs over the steps after them. Steps beyond `total_steps` have the scale of the last
    one.

    >>> [rate_scale("linear", 2, step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> rate_scale("linear", 2, 9, 6)
    0.25"""
    # A pure function: a resumed run has the rates of an unbroken one. Leased shards may take a few
    # steps more than `total_steps`.
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    # The warm-up may be longer than the run; then the schedule stands at its beginning.
    step = max(min(step, total_steps - 1), warmup_steps)
    return DECAYS[schedule]((step - warmup_steps) / max(total_steps - warmup_steps, 1))


def _find_stepwise_groups(sharded: nn.Module) -> list[Group]:
    """Return the groups whose updates depend on the step's number: Adam's, or where rows expire."""
    adams = EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM
    return [
        group
        for group in table_groups(sharded)
        if group.optimizer in adams or (isinstance(group, PlainTables) and group.admission[1])
    ]


def _set_step(groups: Iterable[Group], step: int) -> None:
    # Adam's bias correction goes by this. By themselves fbgemm's tables count lookups, also those
    # of a validation, and start at 0 after a resume.
    for group in groups:
        if isinstance(group, PlainTables):
            group.set_optimizer_step(step)
        else:
            group.iter.fill_(step)
            group.iter_cpu.fill_(step)
