"""The contract of models that end in an MLP over pooled features: what the fused inner loop reads.

Shape suffixes: N rows, F features (single, then pooled), D embedding width, K dense columns, X
inputs of the decision layers.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from models.inputs import Pooling, RowInputs


class DecisionModel(nn.Module, ABC):
    """A model whose output is its decision layers on something made of pooled features.

    It sees the ids of a multi-id feature only as their pooled vector, and applies its decision
    layers, an `mlp` with one output, to a row once.
    """

    pooling: Pooling

    @property
    @abstractmethod
    def decision_layers(self) -> nn.Sequential:
        """Linear layers with ReLU between them; the last has one output and no ReLU."""

    @abstractmethod
    def decision_inputs_NX(self, features_NFD: Tensor, dense_NK: Tensor) -> Tensor:
        """What the decision layers see of each row, which depends on that row alone."""

    def forward(self, inputs: RowInputs) -> Tensor:
        """One output a row: [N]."""
        inputs_NX = self.decision_inputs_NX(inputs.features_NFD(self.pooling), inputs.dense_NK)
        output_N: Tensor = self.decision_layers(inputs_NX).squeeze(1)
        return output_N
