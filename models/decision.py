"""The contract of models that end in an MLP over pooled features: what the fused inner loop reads.

Shape suffixes: N rows, X inputs of the decision layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from models.config import Pooling
    from models.inputs import RowFeatures, RowInputs


class DecisionModel(nn.Module, ABC):
    """A model whose output is its decision layers on something made of pooled features.

    It sees the ids of a multi-id feature only as their pooled vector, those of `history` aside, and
    applies its decision layers, an `mlp` with one output, to a row once.
    """

    pooling: Pooling
    history: int | None = None  # the multi-id feature that it sees unpooled

    @property
    @abstractmethod
    def decision_layers(self) -> nn.Sequential:
        """Linear layers with ReLU between them; the last has one output and no ReLU."""

    @abstractmethod
    def decision_inputs_NX(self, rows: RowFeatures) -> Tensor:
        """What the decision layers see of each row, which depends on that row alone.

        The pooled vector of the history is not to be read: it may be anything.
        """

    def seen_NX(self, inputs: RowInputs) -> Tensor:
        """What the decision layers see of rows that are not pooled yet."""
        return self.decision_inputs_NX(inputs.pooled(self.pooling, self.history))

    def forward(self, inputs: RowInputs) -> Tensor:
        """One output a row: [N]."""
        output_N: Tensor = self.decision_layers(self.seen_NX(inputs)).squeeze(1)
        return output_N
