"""MeLU: concatenated embeddings and decision layers that adapt to a user.

Lee et al., "MeLU: Meta-Learned User Preference Estimator for Cold-Start Recommendation", KDD 2019
(arXiv 1908.00413), section 3: the embeddings are meta-parameters only, the decision layers
adapt."""

from torch import Tensor, nn

from gmeta_models.decision_model import DecisionModel
from gmeta_models.inputs import RowFeatures
from gmeta_models.mlp import mlp
from gmeta_models.model_config import InputSizes, ModelConfig


class MeLU(DecisionModel):
    """Rating (or logit) of every row from the features' embeddings side by side.

    x = concat(e_1, ..., e_F, pooled bags, dense); y = out(ReLU(fc2(ReLU(fc1(x))))). Departs from
    the paper only in taking dense columns when the data has some."""

    features_from = 0
    sees_dense_last = True

    def __init__(self, config: ModelConfig, sizes: InputSizes) -> None:
        super().__init__()
        self.pooling = config.pooling
        width = sizes.side_by_side(config.embedding_dim)
        self.decision = mlp([width, *config.hidden, sizes.outputs], dropout=config.dropout)

    @property
    def decision_layers(self) -> nn.Sequential:
        """Return the layers that make the outputs."""
        return self.decision

    def decision_inputs_NX(self, rows: RowFeatures) -> Tensor:
        """Return the features and dense columns side by side: [N, X]."""
        return rows.side_by_side_NX()
