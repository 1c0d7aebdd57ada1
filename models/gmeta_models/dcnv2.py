"""DCN-V2: cross layers, which multiply features explicitly, and an MLP.

Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to
Rank Systems", WWW 2021 (arXiv 2008.13535), section 3.

Shape suffixes: N rows, L labels, O outputs, X all inputs side by side"""

import torch
from torch import Tensor, nn

from gmeta_models.decision_model import DecisionModel
from gmeta_models.inputs import RowFeatures, RowInputs
from gmeta_models.mlp import mlp, outputs_of_rows
from gmeta_models.model_config import InputSizes, ModelConfig
from gmeta_models.options import DcnOptions


class CrossLayers(nn.Module):
    """x_(l+1) = x_0 * (W_l x_l + b_l) + x_l, so that layer l adds products of l + 1 features.

    With a `rank` r > 0, W_l = U_l V_l of the shapes [X, r] and [r, X]."""

    def __init__(self, width: int, layers: int, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_cross_weights(width, rank) for _ in range(layers))

    def forward(self, first_NX: Tensor) -> Tensor:
        """Return x_L of the rows that the first layer sees as `first_NX`: [N, X]."""
        crossed_NX = first_NX
        for layer in self.layers:
            crossed_NX = first_NX * layer(crossed_NX) + crossed_NX
        return crossed_NX


def _cross_weights(width: int, rank: int) -> nn.Module:
    if not rank:
        return nn.Linear(width, width)
    # U (V x) + b: one bias is enough.
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))


class StackedDCN(DecisionModel):
    """Logit (or rating) of every row: MLP(x_L), the cross layers below the MLP."""

    def __init__(self, config: ModelConfig, sizes: InputSizes, options: DcnOptions) -> None:
        super().__init__()
        self.pooling = config.pooling
        width = sizes.side_by_side(config.embedding_dim)
        # Crossed features are no longer those of a task alone: features_from stays None.
        self.cross = CrossLayers(width, options.cross_layers, options.cross_rank)
        self.deep = mlp([width, *config.hidden, sizes.outputs], dropout=config.dropout)

    @property
    def decision_layers(self) -> nn.Sequential:
        """Return the layers that make the outputs."""
        return self.deep

    def decision_inputs_NX(self, rows: RowFeatures) -> Tensor:
        """Return the features and dense columns, crossed: [N, X]."""
        crossed_NX: Tensor = self.cross(rows.side_by_side_NX())
        return crossed_NX


class ParallelDCN(nn.Module):
    """Logit (or rating) of every row: a linear layer over [x_L, MLP(x_0)]."""

    def __init__(self, config: ModelConfig, sizes: InputSizes, options: DcnOptions) -> None:
        super().__init__()
        self.pooling = config.pooling
        width = sizes.side_by_side(config.embedding_dim)
        self.cross = CrossLayers(width, options.cross_layers, options.cross_rank)
        self.deep = mlp([width, *config.hidden], activate_last=True, dropout=config.dropout)
        # Without hidden layers the MLP is empty and passes its inputs on.
        deep = [width, *config.hidden][-1]
        self.output = nn.Linear(width + deep, sizes.outputs)

    def forward(self, inputs: RowInputs) -> Tensor:
        """Return the outputs of every row: [N], or [N, O] of several."""
        first_NX = inputs.pooled(self.pooling).side_by_side_NX()
        both = torch.cat([self.cross(first_NX), self.deep(first_NX)], dim=1)
        return outputs_of_rows(self.output(both))


def dcnv2(config: ModelConfig, sizes: InputSizes, options: DcnOptions) -> nn.Module:
    """Return the DCN-V2 of the config's structure."""
    kind = StackedDCN if options.structure == "stacked" else ParallelDCN
    return kind(config, sizes, options)
