"""The loss of padded rows: where their layout meets what is learnt of them.

Shape suffixes: N rows of one side with its padding, L labels.
"""

import torch

from gmeta.losses.objectives import LabelLosses, RowLoss, known_labels
from gmeta.losses.row_losses import HALVES
from gmeta.rows.rectangles import PaddedRows


def row_loss(
    rows: PaddedRows, losses: LabelLosses, dtype: torch.dtype, prior: float = 0.0
) -> RowLoss:
    """Return the sum over the tasks of the (shrunken) mean loss of their rows, for outputs of this
    dtype.
    """
    weight_N = rows.mean_weights_N(torch.float32 if dtype in HALVES else dtype, prior)
    weight_NL, shape_NL = weight_N.unsqueeze(1), (rows.num_rows, len(losses.losses))
    label_NL = known_labels(rows.label_N, rows.weight).view(shape_NL)
    if rows.weight is not None:
        weight_NL = weight_NL * rows.weight.view(shape_NL)
    return RowLoss(losses, label_NL, losses.scaled(weight_NL), rows)
