"""DeepFM: a factorization machine and an MLP over the same embeddings, added up.

Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017
(arXiv 1703.04247), section 2.

Shape suffixes: N rows, F single-id or pooled features, K dense columns, D embedding width, O
outputs"""

import torch
from torch import Tensor, nn

from gmeta_models.inputs import RowInputs
from gmeta_models.mlp import mlp, outputs_of_rows
from gmeta_models.model_config import InputSizes, ModelConfig


class DeepFM(nn.Module):
    """Logit (or rating) of every row: sum_i w_i x_i + sum over i < j of <v_i, v_j> x_i x_j + MLP.

    A field is a sparse column or a dense one; of several ids it has their pooled row. A dense
    column has a weight and factors of its own, times its value. With several outputs each has its
    own last layer of the MLP, and they share the rest."""

    def __init__(self, config: ModelConfig, sizes: InputSizes) -> None:
        super().__init__()
        self.pooling = config.pooling
        # A row of a table is an id's weight and its D - 1 factors: both come in one fetch.
        factors, dense = config.embedding_dim - 1, sizes.num_dense
        self.dense_weights = nn.Linear(dense, 1, bias=False) if dense else None
        self.dense_factors_KJ = (
            # Of length about 1, whatever the number of factors.
            nn.Parameter(torch.randn(dense, factors) / factors**0.5) if dense else None
        )
        width = (sizes.num_single + sizes.num_multi) * factors + dense
        self.deep = mlp([width, *config.hidden, sizes.outputs], dropout=config.dropout)

    def forward(self, inputs: RowInputs) -> Tensor:
        """Return the outputs of every row: [N], or [N, O] of several."""
        features_NFD, dense_NK = inputs.features_NFD(self.pooling), inputs.dense_NK
        # A weight is the first of the D numbers of a field, its factors are the others.
        weights_NF, factors_NFD = features_NFD[:, :, 0], features_NFD[:, :, 1:]
        output_N1 = weights_NF.sum(dim=1, keepdim=True) + self.pairs_N1(factors_NFD, dense_NK)
        if self.dense_weights is not None:
            output_N1 = output_N1 + self.dense_weights(dense_NK)
        # Dense columns enter as they are: with their factors the MLP could compute nothing more.
        deep_NO = self.deep(torch.cat([factors_NFD.flatten(1), dense_NK], dim=1))
        return outputs_of_rows(output_N1 + deep_NO)

    def pairs_N1(self, factors_NFD: Tensor, dense_NK: Tensor) -> Tensor:
        """Return the sum over all pairs of fields of their factors' dot products: [N, 1]."""
        # Half of |sum_i v_i x_i|^2 - sum_i |v_i x_i|^2 (Rendle, ICDM 2010, lemma 3.1).
        sum_ND, own_N = factors_NFD.sum(dim=1), factors_NFD.square().sum(dim=(1, 2))
        if self.dense_factors_KJ is not None:
            sum_ND = sum_ND + dense_NK @ self.dense_factors_KJ
            own_N = own_N + dense_NK.square() @ self.dense_factors_KJ.square().sum(dim=1)
        return ((sum_ND.square().sum(dim=1) - own_N) / 2).unsqueeze(1)
