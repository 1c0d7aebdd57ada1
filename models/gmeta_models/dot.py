"""Two towers for retrieval: a row's score is the product of its user's and its item's vectors.

The user's vector is the state of the encoder of events, each number times a weight; the item's is
the sum of its embeddings, so that an item without a row in training has its attributes'."""

import torch
from torch import Tensor, nn

from gmeta_models.inputs import RowInputs
from gmeta_models.model_config import InputSizes, ModelConfig


class Dot(nn.Module):
    """Score of a row: sum_d w_d u_d i_d + b of its user's state u and its item's vector i."""

    def __init__(self, config: ModelConfig, sizes: InputSizes) -> None:
        super().__init__()
        if config.events == "none" or sizes.outputs > 1:
            raise ValueError(
                f"model.name = 'dot' with model.events = {config.events!r} and {sizes.outputs} "
                "labels: it scores one label by the state of an encoder. Choose an encoder, such "
                "as sasrec, and a dataset of one label, or another model"
            )
        self.width = config.embedding_dim
        # The user's vector: it is what a task adapts.
        self.head = nn.Linear(self.width, 1)
        nn.init.ones_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: RowInputs) -> Tensor:
        """Return one output a row: [N]."""
        # The encoder's inputs stand first: the state, then its product with the item's vector.
        product_ND = inputs.dense_NK[:, self.width : 2 * self.width]
        output_N: Tensor = self.head(product_ND).squeeze(1)
        return output_N

    def user_vectors_ND(self, interest_ND: Tensor) -> Tensor:
        """Return the vectors whose product with an item's is its score, but for the bias."""
        return interest_ND * self.head.weight[0]


def find_user_vectors(dense_NK: Tensor, output_N: Tensor, width: int) -> Tensor:
    """Return each row's user vector [N, D] by the derivative of its output, whatever adapted: the
    output is linear in the product of state and item."""
    (grad_NK,) = torch.autograd.grad(output_N.sum(), dense_NK)
    return dense_NK[:, :width].detach() * grad_NK[:, width : 2 * width]
