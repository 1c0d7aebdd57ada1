"""The first decision layer where no inner step moves its inputs: its products are taken once.

    z_1 = g * (x W_1 + b_1) - (x A^T + c) (a G_1 + ... + a G_j)

A are the inputs of the support rows; c is 1, for the bias, and more where x is not all of a row's
inputs (common_features.py). mlp.py does the layers above.

Shape suffixes: T tasks, N rows, S support rows, H longest list or task, I inputs, O outputs"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmeta_models.ops.matmul import linear

if TYPE_CHECKING:
    from gmeta.adaptation.fused.fast_weight_update import Rectangles
    from gmeta.adaptation.layout.padded_layout import PaddedTasks


class FirstLayer(NamedTuple):
    """The first decision layer, applied to the inputs that are a row's own."""

    weight_OI: Tensor
    bias: Tensor  # [O], or [T, O] where the rows of a task share inputs
    in_common_T: Tensor | None  # c; None: 1
    gate_TO: Tensor | None
    adapts: bool

    @property
    def differs_by_task(self) -> bool:
        """Tell whether the layer differs between tasks before any inner step."""
        return self.in_common_T is not None or self.gate_TO is not None


class FirstOutputs(NamedTuple):
    """The first layer's outputs on one side's rows, and what inner steps move them by."""

    outputs_NO: Tensor  # before any inner step
    overlaps_THS: list[Tensor]  # x A^T + c of each rectangle; none where no step needs them

    def after_steps_NO(self, scaled_grads_SO: Tensor | None) -> Tensor:
        """Return z_1, with this sum of the steps' gradients."""
        if scaled_grads_SO is None:
            return self.outputs_NO
        # A is the same in every step, so the steps' gradients are added up before one product: a
        # step of the MovieLens example, with three inner steps, takes five eighths of the time.
        width = scaled_grads_SO.shape[1]
        rows = self.outputs_NO.split([each.shape[0] * each.shape[1] for each in self.overlaps_THS])
        support = scaled_grads_SO.split([len(each) * each.shape[2] for each in self.overlaps_THS])
        blocks = [
            torch.baddbmm(
                mine.view(*overlap.shape[:2], width),
                overlap,
                grads.view(len(overlap), overlap.shape[2], width),
                alpha=-1,
            ).flatten(0, 1)
            for overlap, mine, grads in zip(self.overlaps_THS, rows, support, strict=True)
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def compute_first_outputs(
    layer: FirstLayer,
    inputs: Tensor,
    constant_SI: Tensor | None,
    tasks: PaddedTasks,
    several_steps: bool,
) -> tuple[FirstOutputs, FirstOutputs]:
    """Return what the layer makes of support and of query rows. `inputs` are those of both sides,
    the support's first, if `constant_SI` is None; else those of the query rows."""
    support, query = tasks.support, tasks.query
    alone = layer.in_common_T is None  # the rows of a task share no inputs
    tensors = layer.weight_OI, layer.bias if alone else None, support.rectangles
    query_rectangles = query.rectangles if layer.adapts else ()
    # Only a second step reads what the first one changed on the support rows themselves.
    own = support.rectangles if layer.adapts and several_steps else ()
    if constant_SI is None:
        # Second order: one product of both sides, so autograd finds one gradient of the inputs.
        both_NO, *overlaps = _FirstProducts.apply(
            inputs, None, *tensors, query_rectangles, bool(own)
        )
        if layer.differs_by_task:
            both_NO = _apply_task_terms(layer, both_NO, torch.cat([support.task_N, query.task_N]))
        support_SO, query_NO = both_NO.split([support.num_rows, query.num_rows])
    else:
        # First order: the support rows' inputs are constants, so no graph of their outputs is kept.
        query_NO, *overlaps = _FirstProducts.apply(
            inputs, constant_SI, *tensors, query_rectangles, False
        )
        query_NO = _apply_task_terms(layer, query_NO, query.task_N)
        with torch.no_grad():
            support_SO, *more = _FirstProducts.apply(constant_SI, constant_SI, *tensors, own, False)
            support_SO = _apply_task_terms(layer, support_SO, support.task_N)
        overlaps += more
    if layer.in_common_T is not None:
        common = layer.in_common_T.view(-1, 1, 1).split([mine.tasks for mine in support.rectangles])
        # Query rectangles come first, then the support's own, if asked for: of the same tasks.
        overlaps = [each + mine for each, mine in zip(overlaps, [*common, *common], strict=False)]
    of_query, of_support = overlaps[: len(query_rectangles)], overlaps[len(query_rectangles) :]
    return FirstOutputs(support_SO, of_support), FirstOutputs(query_NO, of_query)


def _apply_task_terms(layer: FirstLayer, outputs_NO: Tensor, task_N: Tensor) -> Tensor:
    if layer.in_common_T is not None:
        outputs_NO = outputs_NO + layer.bias.index_select(0, task_N)
    if layer.gate_TO is not None:
        outputs_NO = outputs_NO * layer.gate_TO.index_select(0, task_N)
    return outputs_NO


class _FirstProducts(torch.autograd.Function):
    """Computes x W + b, and x A^T (+ 1 with a bias) of query rows, then (`own`) of support rows."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs_NI: Tensor,
        constant_SI: Tensor | None,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        support: Rectangles,
        query: Rectangles,
        own: bool,
    ) -> tuple[Tensor, ...]:
        # One operation: autograd would take a pass over the inputs' gradients for each product.
        ctx.rectangles = support, query, own
        ctx.save_for_backward(inputs_NI, constant_SI, weight_OI)
        ctx.set_materialize_grads(False)
        of_support, of_query = _split_sides(inputs_NI, constant_SI, support)
        pairs = [(q.of(of_query), s.of(of_support)) for q, s in zip(query, support, strict=False)]
        pairs += [(s.of(of_support), s.of(of_support)) for s in support if own]
        overlaps = [torch.bmm(rows, activations.mT) for rows, activations in pairs]
        if bias_O is not None:
            overlaps = [overlap.add_(1.0) for overlap in overlaps]
        return linear(inputs_NI, weight_OI, bias_O), *overlaps

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs_NI, constant_SI, weight_OI = ctx.saved_tensors
        support, query, own = ctx.rectangles
        both_NO, *overlaps = grads
        assert both_NO is not None  # overlaps are used beside them alone
        both_NO, found_NI = both_NO.contiguous(), None
        if ctx.needs_input_grad[0]:
            found_NI = linear(both_NO, weight_OI.mT)
            of_support, of_query = _split_sides(inputs_NI, constant_SI, support)
            # Views: what is added to them is added to the gradient of the inputs.
            to_support, to_query = _split_sides(found_NI, constant_SI, support)
            for overlap, q, s in zip(overlaps, query, support, strict=False):
                if overlap is not None:
                    q.of(to_query).baddbmm_(overlap, s.of(of_support))
                    if constant_SI is None:
                        s.of(to_support).baddbmm_(overlap.mT, q.of(of_query))
            for overlap, s in zip(overlaps[len(query) :], support if own else (), strict=False):
                if overlap is not None:
                    # Derivative of A A^T, in which A stands twice.
                    s.of(to_support).baddbmm_(overlap + overlap.mT, s.of(of_support))
        of_bias = both_NO.sum(dim=0) if ctx.needs_input_grad[3] else None
        return found_NI, None, both_NO.mT @ inputs_NI, of_bias, None, None, None


def _split_sides(
    inputs: Tensor, constant: Tensor | None, support: Rectangles
) -> tuple[Tensor, Tensor]:
    if constant is not None:
        return constant, inputs
    count = sum(mine.tasks * mine.rows for mine in support)
    return inputs[:count], inputs[count:]
