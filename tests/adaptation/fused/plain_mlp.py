"""The equations of mlp.py as they stand, differentiated by autograd: its definition.

Shape suffixes: T tasks, N rows, S support rows, H longest list or task, L labels, I inputs, O
outputs"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, final

import torch
import torch.nn.functional as F
from torch import Tensor

from gmeta.adaptation.fused.mlp import AdaptedMlp
from gmeta.adaptation.layout.padded_layout import PaddedRows
from gmeta.adaptation.plain_update import PlainUpdate, add_step, step_update
from gmeta.adaptation.rates import LayerRate
from gmeta_models.mlp import DropoutReLU


@final
@dataclass(frozen=True)
class PlainMlp(AdaptedMlp):
    """Takes any rate, in any order of differentiation."""

    changes: tuple[tuple[PlainUpdate, ...], ...] = ()  # by layer and rectangle; none before a step

    def forward(
        self, inputs_NI: Tensor, rows: PaddedRows, dropout: DropoutReLU | None = None
    ) -> tuple[Tensor, ...]:
        """Return h_0, ..., h_{L-1} and z_L of rows of the tasks."""
        passed, out_NO = [inputs_NI], inputs_NI
        for at, gate_NO in enumerate(self.gates_of(rows)):
            if at:
                hidden_NO = out_NO.relu()
                passed.append(hidden_NO if dropout is None else dropout.drop_out(hidden_NO))
            out_NO = F.linear(passed[-1], self.weights_OI[at], self.biases_O[at])
            out_NO = out_NO if gate_NO is None else out_NO * gate_NO
            if change := self._changes_of(at):
                blocks = zip(change, rows.blocks(passed[-1]), strict=True)
                out_NO = out_NO - rows.join_blocks(
                    [mine.output_change_THO(block) for mine, block in blocks]
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
                blocks_change = [mine.gradient_change_THI(block) for mine, block in blocks]
                below_SI = below_SI - self.support.join_blocks(blocks_change)
            grads.insert(0, torch.where(hidden[at - 1] > 0, below_SI, 0.0) if at else below_SI)
        return tuple(grads)

    def _changes_of(self, at: int) -> tuple[PlainUpdate, ...]:
        return self.changes[at] if self.changes else ()

    def _with_layer_step(
        self, at: int, activations_SI: Tensor, grads_SO: Tensor, rate: LayerRate
    ) -> Self:
        blocks = self.support.blocks(activations_SI), self.support.blocks(grads_SO)
        before = self._changes_of(at) or [None] * len(self.paths[at])
        after = tuple(
            add_step(change, step_update(path, activations, grads, rate, self.bias_rates[at]))
            for change, path, activations, grads in zip(
                before, self.paths[at], *blocks, strict=True
            )
        )
        changes = list(self.changes or [()] * len(self.paths))
        changes[at] = after
        return replace(self, changes=tuple(changes))
