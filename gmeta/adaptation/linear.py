"""Linear layers adapted to many tasks at once: one GEMM for all tasks plus a correction inside each
task.

After k inner steps a task's weight is W - sum_j a A_j^T G_j, where A_j are the support activations
that entered the layer and G_j the gradients of the task's support loss at the layer's output. On
rows x of the same task,

    x (W - sum_j a A_j^T G_j) + (b - sum_js a G_js)  =  x W + b  -  sum_j (x A_j^T + 1) (a G_j)

which is exact in any order of differentiation: the second order flows through A and G. The
correction is either two thin products per step (low rank) or one with the task's summed weight
change (materialised). A gate per task on W's rows and b multiplies x W + b and nothing else.

Shape suffixes: T tasks, L longest task, N rows, I input width, O output width, S support rows (of
all steps).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from gmeta.adaptation.config import InnerPath
from gmeta.adaptation.costs import PathCosts
from gmeta.adaptation.layout import RowLayout
from gmeta.adaptation.rates import FixedRates, InnerRates, LayerRate, WeightRates
from models.gated import row_layers


def adaptable_layers(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Linear]:
    """The row layers of `model` whose names match any of the glob patterns, by name.

    Raises:
        ValueError: a pattern matches no such layer.
    """
    linears = row_layers(model)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise ValueError(
                f"algorithm.adapt_layers: {pattern!r} matches no layer; "
                f"this model has {', '.join(linears)}. "
                'Name some of them, "*" for all, or none at all: []'
            )
    return {
        name: layer
        for name, layer in linears.items()
        if any(fnmatchcase(name, p) for p in patterns)
    }


@dataclass(frozen=True)
class LowRankChange:
    """sum_j A_j^T (a G_j) as its factors: S (I + O) numbers a task."""

    activations_TSI: Tensor
    scaled_grads_TSO: Tensor

    @classmethod
    def of(
        cls, activations_TSI: Tensor, grads_TSO: Tensor, rate: float | Tensor
    ) -> "LowRankChange":
        """One step: W_t -= A_t^T (a G_t) and b_t -= sum_s a G_ts."""
        return cls(activations_TSI, grads_TSO * rate)

    def then(self, step: "LowRankChange") -> "LowRankChange":
        """This change and one more step."""
        return LowRankChange(
            torch.cat([self.activations_TSI, step.activations_TSI], dim=1),
            torch.cat([self.scaled_grads_TSO, step.scaled_grads_TSO], dim=1),
        )

    def correction_TLO(self, rows_TLI: Tensor, has_bias: bool) -> Tensor:
        """What to subtract from the unadapted layer's outputs: (x A^T + 1) (a G)."""
        weights_TLS = rows_TLI @ self.activations_TSI.mT
        if has_bias:
            weights_TLS = weights_TLS + 1.0
        return weights_TLS @ self.scaled_grads_TSO


@dataclass(frozen=True)
class MaterialisedChange:
    """sum_j a A_j^T G_j as a matrix: I O numbers a task, however many rows and steps."""

    weight_TIO: Tensor
    bias_T1O: Tensor

    @classmethod
    def of(
        cls, activations_TSI: Tensor, grads_TSO: Tensor, rate: LayerRate
    ) -> "MaterialisedChange":
        """One step: W_t -= a A_t^T G_t and b_t -= a sum_s G_ts."""
        if not isinstance(rate, WeightRates):
            grads_TSO = grads_TSO * rate
        weight_TIO = activations_TSI.mT @ grads_TSO
        bias_T1O = grads_TSO.sum(dim=1, keepdim=True)
        if isinstance(rate, WeightRates):
            weight_TIO = weight_TIO * rate.weight_OI.mT
            bias_T1O = bias_T1O if rate.bias_O is None else bias_T1O * rate.bias_O
        return cls(weight_TIO, bias_T1O)

    def then(self, step: "MaterialisedChange") -> "MaterialisedChange":
        """This change and one more step."""
        return MaterialisedChange(self.weight_TIO + step.weight_TIO, self.bias_T1O + step.bias_T1O)

    def correction_TLO(self, rows_TLI: Tensor, has_bias: bool) -> Tensor:
        """What to subtract from the unadapted layer's outputs: x (A^T a G) + sum_s a G_s."""
        if has_bias:
            return torch.baddbmm(self.bias_T1O, rows_TLI, self.weight_TIO)
        return rows_TLI @ self.weight_TIO


@dataclass
class Tape:
    """What the adapted layers saw in one forward pass: the names, inputs and outputs, in order of
    use.
    """

    layout: RowLayout
    names: list[str] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


class AdaptedLayers:
    """The adaptation of some linear layers of a model to T tasks; starts as none at all.

    `gates` multiply a layer's initial weights and biases by task and output, [T, O]; a layer may
    have a gate and not adapt.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Linear],
        rates: InnerRates,
        paths: Mapping[str, InnerPath],
        costs: PathCosts,
        gated: Mapping[str, tuple[nn.Linear, Tensor]],
    ) -> None:
        self._layers = layers
        self._rates = rates
        self._paths = paths
        self._costs = costs
        self._gated = gated
        self._changes: dict[str, LowRankChange | MaterialisedChange] = {}

    @classmethod
    def unadapted(cls, gated: Mapping[str, tuple[nn.Linear, Tensor]]) -> "AdaptedLayers":
        """Layers that only their gates tell from the meta-parameters."""
        return cls({}, FixedRates(0.0), {}, PathCosts(0, 0, 0), gated)

    @contextmanager
    def applied(self, layout: RowLayout) -> Iterator[Tape]:
        """Inside, the model's layers act on each row with the weights of the row's task.

        The tape is what `step` takes; it fills while the model runs on rows laid out as `layout`.
        """
        tape = Tape(layout)
        # Hooks run in the order of registration: the gate is part of the output that adapts.
        handles = [
            layer.register_forward_hook(_gate_hook(name, layout, gate_TO))
            for name, (layer, gate_TO) in self._gated.items()
        ]
        handles += [
            layer.register_forward_hook(self._hook(name, tape))
            for name, layer in self._layers.items()
        ]
        try:
            yield tape
        finally:
            for handle in handles:
                handle.remove()

    def step(self, tape: Tape, output_grads: Sequence[Tensor]) -> None:
        """One inner SGD step from the gradients of the summed support losses at `tape.outputs`."""
        for name, seen, grad in zip(tape.names, tape.inputs, output_grads, strict=True):
            activations_TSI = _by_task(tape.layout, seen)
            grads_TSO = _by_task(tape.layout, grad)
            self._changes[name] = self._changed(name, seen, activations_TSI, grads_TSO)

    def _changed(
        self, name: str, seen: Tensor, activations_TSI: Tensor, grads_TSO: Tensor
    ) -> LowRankChange | MaterialisedChange:
        rate, before = self._rates.of_layer(name), self._changes.get(name)
        if isinstance(before, LowRankChange) and not isinstance(rate, WeightRates):
            return before.then(LowRankChange.of(activations_TSI, grads_TSO, rate))
        if isinstance(before, MaterialisedChange):
            return before.then(MaterialisedChange.of(activations_TSI, grads_TSO, rate))
        path = self._paths[name]
        if path == "auto":
            uses = math.prod(seen.shape[1:-1])
            path = self._costs.cheaper(seen.shape[-1], grads_TSO.shape[-1], uses)
        # A rate for each weight has no low rank: a config that asks for both is refused earlier.
        if isinstance(rate, WeightRates) or path == "materialised":
            return MaterialisedChange.of(activations_TSI, grads_TSO, rate)
        return LowRankChange.of(activations_TSI, grads_TSO, rate)

    def _hook(self, name: str, tape: Tape) -> Callable[[nn.Linear, tuple[Tensor], Tensor], Tensor]:
        layout, change = tape.layout, self._changes.get(name)

        def on_forward(layer: nn.Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
            (rows,) = args
            _check_rows(name, rows, layout)
            if change is not None:
                block_TLO = change.correction_TLO(_by_task(layout, rows), layer.bias is not None)
                block_shape = (layout.num_tasks, layout.longest, *output.shape[1:])
                output = output - layout.unpad(block_TLO.reshape(block_shape))
            if not output.requires_grad and torch.is_grad_enabled():
                # Frozen weights: the inner gradient still needs a handle.
                output = output.requires_grad_()
            tape.names.append(name)
            tape.inputs.append(rows)
            tape.outputs.append(output)
            return output

        return on_forward


def _gate_hook(
    name: str, layout: RowLayout, gate_TO: Tensor
) -> Callable[[nn.Linear, tuple[Tensor], Tensor], Tensor]:
    def on_forward(layer: nn.Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
        _check_rows(name, args[0], layout)
        gate_NO = layout.spread(gate_TO)
        return output * gate_NO.view(layout.num_rows, *[1] * (output.dim() - 2), gate_NO.shape[1])

    return on_forward


def _check_rows(name: str, rows: Tensor, layout: RowLayout) -> None:
    if rows.shape[0] != layout.num_rows:
        raise ValueError(
            f"layer {name!r} works on {rows.shape[0]} rows, the tasks have {layout.num_rows}: "
            "only layers applied row by row can adapt. Leave it out of algorithm.adapt_layers"
        )


def _by_task(layout: RowLayout, rows: Tensor) -> Tensor:
    """[N, ..., I] -> [T, S, I]: extra dimensions of a row count as more rows of its task."""
    return layout.pad(rows).flatten(1, -2)
