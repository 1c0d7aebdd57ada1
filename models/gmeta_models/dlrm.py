"""DLRM: bottom MLP over dense columns, feature interaction, top MLP.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
arXiv 1906.00091. Trained with an inner loop it is Meta-DLRM of G-Meta (arXiv 2401.04338)."""

import torch
from torch import Tensor, nn

from gmeta_models.decision_model import DecisionModel
from gmeta_models.inputs import RowFeatures
from gmeta_models.mlp import mlp
from gmeta_models.model_config import InputSizes, ModelConfig
from gmeta_models.ops.pairwise_dots import PairwiseDots
from gmeta_models.options import DlrmOptions


class DLRM(DecisionModel):
    """Logit of a click, or a rating, for every row.

    The dense columns become one more vector v_0 = MLP(dense) beside the features' embeddings; the
    top MLP sees v_0 and the dot products v_i . v_j of all pairs i > j (`dot`), or all vectors side
    by side (`cat`). Without dense columns there is no v_0. Raises ValueError: `dot` of a single
    vector."""

    def __init__(self, config: ModelConfig, sizes: InputSizes, options: DlrmOptions) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.interaction = options.interaction
        width = config.embedding_dim
        num_vectors = sizes.num_single + sizes.num_multi
        self.bottom: nn.Sequential | None = None
        if sizes.num_dense:
            self.bottom = mlp([sizes.num_dense, *options.bottom, width], activate_last=True)
            num_vectors += 1
        if options.interaction == "dot" and num_vectors < 2:
            raise ValueError(
                'model.options.interaction = "dot" takes the dot products of pairs of columns: '
                "this dataset has 1 column, so no row would differ from another. Set "
                'model.options.interaction = "cat", or add a column to the schema and prepare again'
            )
        top_width = num_vectors * width
        if options.interaction == "dot":
            # The pairs, and v_0 once more as it is.
            top_width = num_vectors * (num_vectors - 1) // 2
            top_width += 0 if self.bottom is None else width
            self.dots = PairwiseDots(num_vectors)
        else:
            # Behind v_0, if there is one; with `dot` the features stand nowhere side by side.
            self.features_from = 0 if self.bottom is None else width
        self.top = mlp([top_width, *config.hidden, sizes.outputs], dropout=config.dropout)

    @property
    def decision_layers(self) -> nn.Sequential:
        """Return the layers that make the outputs."""
        return self.top

    @property
    def dense_layers(self) -> nn.Sequential | None:
        """Return the bottom MLP, if there are dense columns."""
        return self.bottom

    def decision_inputs_NX(self, rows: RowFeatures) -> Tensor:
        """Return the features, or their dot products, and the dense vector: [N, X]."""
        vectors_NFD, dense_ND = rows.features_NFD, rows.dense_NK
        if self.bottom is not None:
            vectors_NFD = torch.cat([dense_ND.unsqueeze(1), vectors_NFD], dim=1)
        if self.interaction == "cat":
            return vectors_NFD.flatten(1)
        dots: Tensor = self.dots(vectors_NFD)
        return dots if self.bottom is None else torch.cat([dense_ND, dots], dim=1)
