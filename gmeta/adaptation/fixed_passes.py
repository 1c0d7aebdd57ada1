"""The passes over rows that make up k inner steps on fixed inputs and the query loss, and the same
passes in reverse: the equations stand in fixed_inputs.py.

Shape suffixes: N support rows, M query rows, R both, O output width of a layer.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gmeta.adaptation.blocks import BlockRows
from gmeta.adaptation.changes import StepGrads, new_change
from gmeta.adaptation.fixed_state import (
    QUERY,
    SUPPORT,
    FixedLoop,
    Grads,
    Layer,
    LayerStep,
    Pass,
    plus,
)
from models.products import add_times, times

_threshold_backward = torch.ops.aten.threshold_backward.grad_input


class Passes:
    """The layers and the passes of one meta-step."""

    def __init__(self, loop: FixedLoop, inputs: Tensor, tensors: Sequence[Tensor]) -> None:
        self.loop = loop
        self.inputs = inputs
        count, rest = len(loop.paths), iter(tensors)
        weights, biases = ([next(rest) for _ in range(count)] for _ in range(2))
        gates = [next(rest) if gated else None for gated in loop.gated]
        common_T = None if loop.task_of_row is None else next(rest)
        num_support = loop.support.label_N.numel()
        self.layers = [
            Layer(weight, bias, gate, num_support)
            for weight, bias, gate in zip(weights, biases, gates, strict=True)
        ]
        one = inputs.new_ones(1, 1, 1)
        for layer, paths, rate in zip(self.layers, loop.paths, loop.rates, strict=True):
            layer.changes = [new_change(path, one) for path in paths]
            layer.rate = rate
        first = self.layers[0]
        if common_T is not None and first.changes:
            tasks = [rectangle.tasks for rectangle in loop.support.rectangles]
            common = common_T.view(-1, 1, 1).split(tasks)
            first.changes = [
                new_change(path, mine, True)
                for path, mine in zip(loop.paths[0], common, strict=True)
            ]
        shared_rate = _shared_rate(self.layers)
        self.lowest = next(at for at, layer in enumerate(self.layers) if layer.changes)
        bias = None
        if loop.task_of_row is not None:
            bias = loop.task_of_row.forward.times(first.bias_O)
        if loop.support_NX is None:
            first_RO = first.linear(inputs, bias)
            sides = inputs[:num_support], inputs[num_support:]
            self.first = first_RO[:num_support], first_RO[num_support:]
        else:
            sides = loop.support_NX, inputs
            self.first = (
                first.linear(sides[0], loop.support_bias_NO),
                first.linear(sides[1], bias),
            )
        self.sides = sides
        self.input_views = loop.support.views(sides[0]), loop.query.views(sides[1])
        # The inner gradients, which are linear in a shared rate, carry it from the start.
        self.support_loss = loop.support.row_loss(
            loop.loss, inputs.dtype, loop.support_prior, shared_rate
        )
        if shared_rate is not None:
            for layer in self.layers:
                layer.rate = None
        self.query_loss = loop.query.row_loss(loop.loss, inputs.dtype)
        self.steps: list[tuple[Pass, Grads]] = []
        # Of backward: by adapting layer, those of each step; none in first order.
        self.step_grads: dict[int, list[LayerStep]] = {}

    def run(self) -> Tensor:
        """The query loss: a scalar."""
        loop = self.loop
        for number in range(loop.steps):
            seen = self._outputs(SUPPORT, loop.support, number)
            grads = self._step(seen, number)
            if loop.support_NX is None:
                self.steps.append((seen, grads))
        self.query = self._outputs(QUERY, loop.query, loop.steps)
        return self.query_loss.sum(self.query.seen[-1])

    def _outputs(self, side: int, rows: BlockRows, taken: int) -> Pass:
        """A pass over a side, after so many steps."""
        # The last pass may change what all of them start from.
        again = side == SUPPORT and taken + 1 < self.loop.steps
        found = Pass(side, rows, [self.sides[side]], [self.input_views[side]])
        for at, layer in enumerate(self.layers):
            base_NO = layer.linear(found.seen[-1]) if at else self.first[side]
            out_NO = base_NO
            if layer.gates:
                out_NO = base_NO * layer.gates[side]
            elif at == 0 and again:
                out_NO = base_NO.clone()
            found.bases.append(base_NO if layer.gates else None)
            kept: list[Any] = []
            if layer.changes and taken:
                cut = zip(layer.changes, rows.views(out_NO), found.views[at], strict=True)
                kept = [change.subtract(out, seen) for change, out, seen in cut]
            found.kept.append(kept)
            if at + 1 < len(self.layers):
                out_NO.relu_()
                cuts = bool(self.layers[at + 1].changes)
                found.views.append(rows.views(out_NO) if cuts else [])
            found.seen.append(out_NO)
        return found

    def _step(self, seen: Pass, taken: int) -> Grads:
        """The gradients at the layers' outputs, which become one step more of the changes."""
        rows, found = self.loop.support, Grads()
        grad = self.support_loss.slope_NO(seen.seen[-1])
        for at in reversed(range(self.lowest, len(self.layers))):
            layer = self.layers[at]
            found.by_layer[at] = grad
            if at == self.lowest:
                break
            shared = grad * layer.gates[SUPPORT] if layer.gates else grad
            below = times(shared, layer.weight_OI)
            if layer.changes and taken:
                cut = zip(layer.changes, rows.views(below), rows.views(grad), strict=True)
                found.kept[at] = [change.turned(*views) for change, *views in cut]
            found.shared[at] = shared
            grad = _where_active(below, seen.seen[at], below)
        for at, layer in enumerate(self.layers):
            if layer.changes:
                grad = found.by_layer[at]
                scaled = rows.views(grad if layer.rate is None else grad * layer.rate)
                for change, *step in zip(layer.changes, seen.views[at], scaled, strict=True):
                    change.add(*step)
        return found

    def backward(self, grad: Tensor, wants_inputs: bool) -> Tensor | None:
        """Fills in the layers' gradients; returns that of the inputs."""
        loop, second_order = self.loop, self.loop.support_NX is None
        self.wants_inputs = wants_inputs
        self.inputs_grad = torch.empty_like(self.inputs)
        num_support = len(self.sides[SUPPORT]) if second_order else 0
        self.of_sides = self.inputs_grad[:num_support], self.inputs_grad[num_support:]
        last = self.query_loss.slope_NO(self.query.seen[-1], grad)
        if second_order:
            self.step_grads = self._step_grads()
        first_grads = [self._outputs_backward(self.query, last, {})]
        of_first_N: Tensor | None = None
        for number in reversed(range(loop.steps if second_order else 0)):
            seen, grads = self.steps.pop()
            steps = {at: made[number] for at, made in self.step_grads.items()}
            for at, layer in enumerate(self.layers):
                fresh = at > 0 or number + 1 == loop.steps
                for rectangle, change in enumerate(layer.changes):
                    change.undo(steps[at].of(rectangle), fresh)
            last = self._step_backward(seen, grads, steps)
            mine = self._outputs_backward(seen, last, steps)
            of_first_N = plus(of_first_N, mine)
        if of_first_N is not None:
            first_grads.insert(0, of_first_N)
        self._first_backward(first_grads)
        return self.inputs_grad if wants_inputs else None

    def _step_grads(self) -> dict[int, list[LayerStep]]:
        """By adapting layer, one for each step."""
        rows, found = self.loop.support, {}
        for at, layer in enumerate(self.layers):
            if not layer.changes:
                continue
            shared = "fixed" in self.loop.paths[at]
            made: list[LayerStep] = []
            for number, (seen, grads) in enumerate(self.steps):
                if number and shared:
                    made.append(made[0])
                    continue
                # The first layer's activations are the inputs, in every step.
                activations = torch.empty_like(seen.seen[at]) if at else self.of_sides[SUPPORT]
                scaled = torch.empty_like(grads.by_layer[at])
                views = zip(rows.views(activations), rows.views(scaled), strict=True)
                made.append(LayerStep(activations, scaled, [StepGrads(*pair) for pair in views]))
            found[at] = made
        return found

    def _outputs_backward(self, seen: Pass, grad: Tensor, own: dict[int, LayerStep]) -> Tensor:
        """From the gradient at z_L to that at h_0 W_1 + b_1; `own` are those of the step that this
        pass led to, whose activations it gave.
        """
        for at in reversed(range(len(self.layers))):
            layer, shared = self.layers[at], grad
            if layer.gates:
                base = seen.bases[at]
                assert base is not None
                layer.add_gate_grad(seen.side, grad * base)
                shared = grad * layer.gates[seen.side]
            below: Tensor | None = None
            if at:
                layer.add_weight_grad(shared, seen.seen[at])
                layer.add_bias_grad(shared)
                below = times(shared, layer.weight_OI)
            elif seen.side == SUPPORT or self.wants_inputs:
                below = self.of_sides[seen.side]
            if seen.kept[at]:
                self._changes_backward(at, seen, grad, below)
            if not at:
                return shared
            assert below is not None
            if at in own:
                below.add_(own[at].activations)
            grad = _where_active(below, seen.seen[at], below)
        raise AssertionError("an MLP has layers")

    def _changes_backward(self, at: int, seen: Pass, grad: Tensor, below: Tensor | None) -> None:
        """Of what the changes of a layer took from its outputs in this pass."""
        grads = seen.rows.views(grad)
        belows: Sequence[Tensor | None] = (
            [None] * len(grads) if below is None else seen.rows.views(below)
        )
        for rectangle, change in enumerate(self.layers[at].changes):
            steps = [made.of(rectangle) for made in self.step_grads.get(at, ())]
            change.subtract_backward(
                seen.kept[at][rectangle],
                grads[rectangle],
                seen.views[at][rectangle],
                belows[rectangle],
                steps,
                fresh=seen.side == QUERY,
                # What passes through the weights is added in the end, for both sides at once.
                rows_fresh=seen.side == QUERY and not at,
            )

    def _step_backward(self, seen: Pass, grads: Grads, steps: dict[int, LayerStep]) -> Tensor:
        """From the gradients of a step's rate * g_l to that at z_L of the pass before it."""
        rows, carried = self.loop.support, cast(Tensor | None, None)
        for at in range(self.lowest, len(self.layers)):
            layer, grad = self.layers[at], grads.by_layer[at]
            if carried is not None:
                # Not in its place: what the steps share may be asked for again.
                below = _where_active(carried, seen.seen[at], torch.empty_like(carried))
                layer.add_weight_grad(grads.shared[at], below)
                carried = times(below, layer.weight_IO)
                if layer.gates:
                    layer.add_gate_grad(SUPPORT, grad * carried)
                    carried = carried * layer.gates[SUPPORT]
                if at in grads.kept:
                    belows, mine, carries = (rows.views(x) for x in (below, grad, carried))
                    for rectangle, change in enumerate(layer.changes):
                        change.turned_backward(
                            grads.kept[at][rectangle],
                            belows[rectangle],
                            mine[rectangle],
                            carries[rectangle],
                            [step.of(rectangle) for step in self.step_grads[at]],
                        )
            if layer.changes:
                own = layer.through_rate(steps[at].scaled, grad)
                carried = own if carried is None else carried.add_(own)
        assert carried is not None
        return carried * self.support_loss.curvature_NO(seen.seen[-1])

    def _first_backward(self, grads: list[Tensor]) -> None:
        """Of h_0 W_1 + b_1, from its gradients on the sides that have some."""
        first = self.layers[0]
        grad = torch.cat(grads) if len(grads) > 1 else grads[0]
        first.add_weight_grad(grad, self.inputs)
        task_of_row = self.loop.task_of_row
        if task_of_row is None:
            first.add_bias_grad(grad)
        else:
            assert task_of_row.backward is not None
            first.bias_grad = task_of_row.backward.times(grad)
        if self.wants_inputs:
            add_times(self.inputs_grad, grad, first.weight_OI, beta=1 if first.changes else 0)

    def common_grads(self) -> list[Tensor | None]:
        """The gradient of what the rows of each task have in common, where the loop was given it;
        none where the first layer does not adapt.
        """
        if self.loop.task_of_row is None:
            return []
        parts = [change.common_grad_T for change in self.layers[0].changes]
        return [torch.cat(parts) if parts else None]


def _shared_rate(layers: Sequence[Layer]) -> float | None:
    """The rate of all layers that adapt, where it is one fixed number."""
    rate, *others = {layer.rate for layer in layers if layer.changes}
    return rate if isinstance(rate, float) and not others else None


def _where_active(grad: Tensor, hidden: Tensor, out: Tensor) -> Tensor:
    """The gradient before a ReLU from that after it; `out` may be in its place."""
    before: Tensor = _threshold_backward(grad, hidden, 0, grad_input=out)
    return before
