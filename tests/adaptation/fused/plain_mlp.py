"""The equations of mlp.py as they stand, differentiated by autograd: its definition.

Shape suffixes: N rows of one side, S support rows, T tasks, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, final

import torch
import torch.nn.functional as F
from torch import Tensor

from gmeta.adaptation.fused.mlp import AdaptedMlp
from gmeta.adaptation.layer_change import LayerChange, after_step, one_step
from gmeta.adaptation.rates import LayerRate
from gmeta.rows.rectangles import PaddedRows


@final
@dataclass(frozen=True)
class PlainMlp(AdaptedMlp):
    """Takes any rate, in any order of differentiation."""

    changes: tuple[tuple[LayerChange, ...], ...] = ()  # by layer and rectangle; none before a step

    def forward(self, inputs_NI: Tensor, rows: PaddedRows) -> tuple[Tensor, ...]:
        """Return h_0, ..., h_{L-1} and z_L of rows of the tasks."""
        passed, out_NO = [inputs_NI], inputs_NI
        for at, gate_NO in enumerate(self.gates_of(rows)):
            if at:
                passed.append(out_NO.relu())
            out_NO = F.linear(passed[-1], self.weights_OI[at], self.biases_O[at])
            out_NO = out_NO if gate_NO is None else out_NO * gate_NO
            if change := self._changes_of(at):
                blocks = zip(change, rows.blocks(passed[-1]), strict=True)
                out_NO = out_NO - rows.joined(
                    [mine.of_outputs_TLO(block) for mine, block in blocks]
                )
        return (*passed, out_NO)

    def gradients(
        self, last_SO: Tensor, hidden: Sequence[Tensor], lowest: int
    ) -> tuple[Tensor, ...]:
        """Return d_lowest, ..., d_L of the support rows, from d_L and h_1, ..., h_{L-1}."""
        grads, gates = [last_SO], self.gates_of(self.support)
        for at in reversed(range(lowest, len(self.weights_OI))):
            grad_SO, gate_SO = grads[0], gates[at]
            gated_SO = grad_SO if gate_SO is None else grad_SO * gate_SO
            below_SI = gated_SO @ self.weights_OI[at]
            if change := self._changes_of(at):
                blocks = zip(change, self.support.blocks(grad_SO), strict=True)
                moved = [mine.of_gradients_TLI(block) for mine, block in blocks]
                below_SI = below_SI - self.support.joined(moved)
            grads.insert(0, torch.where(hidden[at - 1] > 0, below_SI, 0.0) if at else below_SI)
        return tuple(grads)

    def _changes_of(self, at: int) -> tuple[LayerChange, ...]:
        return self.changes[at] if self.changes else ()

    def _moved(self, at: int, activations_SI: Tensor, grads_SO: Tensor, rate: LayerRate) -> Self:
        blocks = self.support.blocks(activations_SI), self.support.blocks(grads_SO)
        before = self._changes_of(at) or [None] * len(self.paths[at])
        after = tuple(
            after_step(change, one_step(path, activations, grads, rate, self.bias_rates[at]))
            for change, path, activations, grads in zip(
                before, self.paths[at], *blocks, strict=True
            )
        )
        changes = list(self.changes or [()] * len(self.paths))
        changes[at] = after
        return replace(self, changes=tuple(changes))
