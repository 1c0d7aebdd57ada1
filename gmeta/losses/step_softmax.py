"""Sampled softmax: each positive row's item against the items of all rows of the step.

Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", RecSys
2019: items are in a step as often as they are popular, so the logarithm of an item's share of the
rows is taken off its score.

Shape suffixes: N rows, P positive rows, D embedding width"""

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

# Scores of so many pairs are held at a time.
_MOST_PAIRS = 16_000_000


def sampled_softmax_P(
    user_PD: Tensor, item_ND: Tensor, own_P: Tensor, item_N: Tensor, log_share_N: Tensor
) -> Tensor:
    """Return the loss of each positive row, -log of its item's share among the items of the rows.

    `own_P` is the place of the row's own item among the N, `item_N` the item of each row: other
    rows of the own item compete with no one."""
    losses, size = [], max(_MOST_PAIRS // max(len(item_ND), 1), 1)
    for user_CD, own_C in zip(user_PD.split(size), own_P.split(size), strict=True):
        score_CN = user_CD @ item_ND.mT - log_share_N.to(user_CD.dtype)
        is_same_CN = item_N == item_N[own_C].unsqueeze(1)
        is_same_CN.scatter_(1, own_C.unsqueeze(1), False)
        score_CN = score_CN.masked_fill(is_same_CN, -math.inf)
        losses.append(cross_entropy(score_CN, own_C, reduction="none"))
    return torch.cat(losses) if losses else user_PD.new_zeros(0)
