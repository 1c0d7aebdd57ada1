"""The contract of models with a tower for each output above what the outputs share.

Shape suffixes: N rows, O outputs, X all inputs side by side"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from gmeta_models.inputs import RowInputs
from gmeta_models.mlp import outputs_of_rows


class TowerModel(nn.Module, ABC):
    """A model whose outputs are each made by an `mlp` of its own, from an input of its own."""

    towers: nn.ModuleList  # one for each output; the last layer of each has one output and no ReLU

    @abstractmethod
    def tower_inputs_NX(self, inputs: RowInputs) -> list[Tensor]:
        """Return the inputs of each tower: [N, X] for every output."""

    def forward(self, inputs: RowInputs) -> Tensor:
        """Return the outputs of every row: [N], or [N, O] of several."""
        pairs = zip(self.towers, self.tower_inputs_NX(inputs), strict=True)
        return outputs_of_rows(torch.cat([tower(inputs_NX) for tower, inputs_NX in pairs], dim=1))
