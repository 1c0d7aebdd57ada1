"""Linear layers of any model adapted to many tasks at once: hooks on the model's own layers, one
GEMM for all tasks and the change inside each task (plain_update.py).

Shape suffixes: T tasks, S support rows, H longest list or task, I inputs, O outputs, J parts of a
gate"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gmeta.adaptation.closed_form import LayerGradients
from gmeta.adaptation.plain_update import PlainUpdate, add_step, step_update
from gmeta.errors import ConfigError

if TYPE_CHECKING:
    from gmeta.adaptation.adaptation_plan import AdaptationPlan, TaskSize
    from gmeta.adaptation.layout.ragged import RowLayout
    from gmeta.adaptation.rates import InnerRates

# By layer name: the layer, and the factor of its outputs, then their shift if J is 2: [T, J, O].
Gates = Mapping[str, tuple[nn.Linear, Tensor]]


@dataclass
class Tape:
    """Inputs and outputs of the layers that adapt, in order of a pass; `called` has gated layers
    too."""

    layout: RowLayout
    called: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def record_rows(self, name: str, args: tuple[Tensor, ...]) -> Tensor:
        """Return the rows that a layer was called on, and note the call. Raises ConfigError: no
        layer that is called so can adapt."""
        if len(args) != 1:
            raise _uncalled_layer_error(name)
        (rows,) = args
        if rows.shape[0] != self.layout.num_rows:
            raise ConfigError(
                f"layer {name!r} works on {rows.shape[0]} rows, the tasks have "
                f"{self.layout.num_rows}: only layers applied row by row can adapt. Leave it out "
                "of algorithm.adapt_layers"
            )
        self.called.add(name)
        return rows


class AdaptedLayers:
    """How far some layers have adapted to T tasks; a layer may have a gate and not adapt."""

    def __init__(
        self, plan: AdaptationPlan, rates: InnerRates, size: TaskSize, gates: Gates
    ) -> None:
        self._plan = plan
        self._rates = rates
        self._size = size
        self._gates = gates
        self._changes: dict[str, PlainUpdate] = {}

    @property
    def changes(self) -> Mapping[str, PlainUpdate]:
        """Return how far the steps so far have moved each layer, by name."""
        return self._changes

    @property
    def gates_TJO(self) -> dict[str, Tensor]:
        """Return the gates by the name of their layer."""
        return {name: gate_TJO for name, (_, gate_TJO) in self._gates.items()}

    def with_changes(self, changes: Mapping[str, PlainUpdate]) -> AdaptedLayers:
        """Return layers with the same gates, already moved by these changes."""
        adapted = AdaptedLayers(self._plan, self._rates, self._size, self._gates)
        adapted._changes = dict(changes)
        return adapted

    @contextmanager
    def apply(self, layout: RowLayout) -> Iterator[Tape]:
        """Have the model's layers use, inside, the weights of each row's task; yield the tape that
        `step` takes. Raises ConfigError: a layer is not called, or on other rows."""
        tape = Tape(layout)
        # Hooks run in the order of registration: the gate is part of the output that adapts.
        # A task's gate multiplies (and may shift) x W + b, not the change inside the task.
        handles = [
            layer.register_forward_hook(_gate_hook(name, tape, gate_TJO))
            for name, (layer, gate_TJO) in self._gates.items()
        ]
        handles += [
            layer.register_forward_hook(self._hook(name, tape))
            for name, layer in self._plan.layers.items()
        ]
        try:
            yield tape
        finally:
            for handle in handles:
                handle.remove()
        # A layer that is never called, its weight read some other way, takes no step: say so.
        if idle := {*self._gates, *self._plan.layers} - tape.called:
            raise _uncalled_layer_error(min(idle))

    def step(self, tape: Tape, output_grads: Sequence[Tensor], second_order: bool) -> None:
        """Take one inner SGD step, from the gradients of the support losses at `tape.outputs`."""
        for name, rows, grad in zip(tape.names, tape.inputs, output_grads, strict=True):
            if not second_order:  # the A of a step are constants, as its G are
                rows = rows.detach()
            activations_TSI, grads_TSO = (
                _group_by_task(tape.layout, rows),
                _group_by_task(tape.layout, grad),
            )
            widths = activations_TSI.shape[-1], grads_TSO.shape[-1]
            # A layer that works on each of a row's features counts a row once for each.
            path = self._plan.path(name, *widths, self._size, uses=math.prod(rows.shape[1:-1]))
            rates = self._rates.of_layer(name), self._plan.bias_rate(name)
            step = step_update(path, activations_TSI, grads_TSO, *rates)
            self._changes[name] = add_step(self._changes.get(name), step)

    def gradients_of(self, tape: Tape, jacobians: Sequence[Tensor]) -> list[LayerGradients]:
        """Return the gradients of the support rows' outputs by each layer, as factors, task by
        task; `jacobians` are the outputs' gradients at `tape.outputs`."""
        gradients = []
        for name, rows, jacobian in zip(tape.names, tape.inputs, jacobians, strict=True):
            has_bias = self._plan.layers[name].bias is not None
            bias_rate = self._plan.bias_rate(name) if has_bias else 0.0
            blocks = _group_by_task(tape.layout, rows), _group_by_task(tape.layout, jacobian)
            gradients.append(LayerGradients(*blocks, bias_rate))
        return gradients

    def _hook(self, name: str, tape: Tape) -> Callable[[nn.Linear, tuple[Tensor], Tensor], Tensor]:
        layout, change = tape.layout, self._changes.get(name)

        def on_forward(layer: nn.Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
            rows = tape.record_rows(name, args)
            if change is not None:
                block_THO = change.output_change_THO(
                    _group_by_task(layout, rows), layer.bias is not None
                )
                block_shape = (layout.num_tasks, layout.longest, *output.shape[1:])
                output = output - layout.unpad(block_THO.reshape(block_shape))
            if not output.requires_grad and torch.is_grad_enabled():
                # Frozen weights: the inner gradient still needs a handle.
                output = output.requires_grad_()
            tape.names.append(name)
            tape.inputs.append(rows)
            tape.outputs.append(output)
            return output

        return on_forward


def _gate_hook(
    name: str, tape: Tape, gate_TJO: Tensor
) -> Callable[[nn.Linear, tuple[Tensor], Tensor], Tensor]:
    def on_forward(layer: nn.Linear, args: tuple[Tensor], output: Tensor) -> Tensor:
        tape.record_rows(name, args)
        layout = tape.layout
        shape = layout.num_rows, *[1] * (output.dim() - 2), gate_TJO.shape[2]
        scale, *shifts = (part.view(shape) for part in layout.spread(gate_TJO).unbind(dim=1))
        scaled = output * scale
        return scaled + shifts[0] if shifts else scaled

    return on_forward


def _uncalled_layer_error(name: str) -> ConfigError:
    return ConfigError(
        f"layer {name!r} is not called as layer(x): only layers called so can adapt, and none "
        "whose weight is read alone. Call it so in the model, or leave it out of "
        "algorithm.adapt_layers"
    )


def _group_by_task(layout: RowLayout, rows: Tensor) -> Tensor:
    # [N, ..., I] as [T, S, I]: extra dimensions of a row count as more rows of its task.
    return layout.pad(rows).flatten(1, -2)
