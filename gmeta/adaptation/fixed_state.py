"""What the passes of fixed_passes.py take and keep: the loop's settings, layers with their
gradients, and what a pass over rows saw.

Shape suffixes: N rows of one side, R of both, I and O widths of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.products import add_times, over_rows, times

if TYPE_CHECKING:
    from gmeta.adaptation.bags import Bags
    from gmeta.adaptation.blocks import BlockRows
    from gmeta.adaptation.changes import Change, StepGrads
    from gmeta.adaptation.paths import Path

SUPPORT, QUERY = 0, 1  # the sides
Views = list[Tensor]


@dataclass(frozen=True)
class FixedLoop:
    """What the operation takes beside tensors that it differentiates."""

    steps: int
    loss: str
    support_prior: float
    support: BlockRows
    query: BlockRows
    # How the change of each layer is held in each rectangle; none where it does not adapt.
    paths: tuple[tuple[Path, ...], ...]
    rates: tuple[float | Tensor, ...]  # by layer, a scalar or [O]
    gated: tuple[bool, ...]  # by layer
    support_NX: Tensor | None  # None: second order, and the inputs are of both sides
    # Where the first layer's biases are of tasks (common.py): the task of each row of the inputs,
    # and in first order what the support rows' biases are.
    task_of_row: Bags | None = None
    support_bias_NO: Tensor | None = None


class Layer:
    """A layer, its change, and what backward knows of their gradients."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor, gate_RO: Tensor | None, num_support: int
    ) -> None:
        self.weight_OI = weight_OI
        self.weight_IO = weight_OI.mT
        self.bias_O = bias_O  # of the first layer maybe one for each task: [T, O]
        self.gates: tuple[Tensor, ...] = ()
        if gate_RO is not None:
            self.gates = gate_RO[:num_support], gate_RO[num_support:]
        self.rate: float | Tensor | None = 0.0  # None: the inner gradients carry it already
        self.changes: list[Change] = []  # by rectangle; none: it does not adapt
        self.weight_grad: Tensor | None = None
        self.bias_grad: Tensor | None = None
        self.gate_grads: list[Tensor | None] = [None, None]  # of support and query rows
        self.rate_grad: Tensor | None = None

    def linear(self, rows_NI: Tensor, bias_NO: Tensor | None = None) -> Tensor:
        """Before gates and changes; a bias for each row is overwritten."""
        if bias_NO is None:
            return times(rows_NI, self.weight_IO, self.bias_O)
        add_times(bias_NO, rows_NI, self.weight_IO, beta=1)
        return bias_NO

    def add_weight_grad(self, grad_NO: Tensor, rows_NI: Tensor) -> None:
        """Of one product grad^T rows more."""
        self.weight_grad = over_rows(grad_NO, rows_NI, self.weight_grad)

    def add_bias_grad(self, grad_NO: Tensor) -> None:
        """Of outputs with this gradient."""
        self.bias_grad = plus(self.bias_grad, grad_NO.sum(dim=0))

    def add_gate_grad(self, side: int, grad_NO: Tensor) -> None:
        """Of the rows of one side."""
        self.gate_grads[side] = plus(self.gate_grads[side], grad_NO)

    def through_rate(self, scaled_grad_NO: Tensor, grad_NO: Tensor) -> Tensor:
        """The gradient of g, from that of rate * g; not to be written to."""
        if self.rate is None:
            return scaled_grad_NO
        if isinstance(self.rate, Tensor):
            of_rate = scaled_grad_NO * grad_NO
            summed = of_rate.sum(dim=0) if self.rate.dim() else of_rate.sum()
            self.rate_grad = plus(self.rate_grad, summed)
        return scaled_grad_NO * self.rate

    def gate_grad(self) -> Tensor:
        """Of the rows of both sides; of the support none in first order."""
        support, query = self.gate_grads
        assert query is not None
        if support is None:
            support = torch.zeros_like(self.gates[SUPPORT])
        return torch.cat([support, query])


@dataclass
class Pass:
    """What a pass over the rows of a side saw, by layer, and what its changes keep."""

    side: int  # SUPPORT or QUERY
    rows: BlockRows
    seen: list[Tensor]  # h_0, ..., h_{L-1}, z_L
    views: list[Views]  # of h_0, ..., h_{L-1}
    bases: list[Tensor | None] = field(default_factory=list)  # what a gate multiplied
    kept: list[list[Any]] = field(default_factory=list)  # by rectangle; nothing before a step


@dataclass
class Grads:
    """The gradients g of one inner step's support loss, from the lowest layer that adapts."""

    by_layer: dict[int, Tensor] = field(default_factory=dict)
    shared: dict[int, Tensor] = field(default_factory=dict)  # gate * g
    kept: dict[int, list[Any]] = field(default_factory=dict)


@dataclass
class LayerStep:
    """Gradients of what a step added to a layer's change, whole and by rectangle."""

    activations: Tensor
    scaled: Tensor
    views: list[StepGrads]

    def of(self, rectangle: int) -> StepGrads:
        """Of one rectangle."""
        return self.views[rectangle]


def plus(total: Tensor | None, more: Tensor) -> Tensor:
    """The sum so far, in place."""
    return more if total is None else total.add_(more)
