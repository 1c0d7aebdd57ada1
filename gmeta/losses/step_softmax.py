"""Sampled softmax: each positive row's item against the items of all rows of the step.

Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", RecSys
2019: items are in a step as often as they are popular, so the logarithm of an item's share of the
rows is taken off its score.

Or against items drawn by popularity (Bengio and Senecal, IEEE TNN 2008): the sum over all other
items is estimated without bias by those drawn, each over how often it is drawn on average.

Shape suffixes: N rows, Q query rows, D embedding width, A items"""

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gmeta_models.sequence.encoder import DrawnItems

# Scores of so many pairs are held at a time.
_MOST_PAIRS = 16_000_000


def sampled_softmax_Q(
    user_QD: Tensor, item_ND: Tensor, own_Q: Tensor, item_N: Tensor, log_share_N: Tensor
) -> Tensor:
    """Return the loss of each positive row, -log of its item's share among the items of the rows.

    `own_Q` is the place of the row's own item among the N, `item_N` the item of each row: other
    rows of the own item compete with no one."""
    losses, size = [], max(_MOST_PAIRS // max(len(item_ND), 1), 1)
    for user_vectors, own in zip(user_QD.split(size), own_Q.split(size), strict=True):
        score = user_vectors @ item_ND.mT - log_share_N.to(user_vectors.dtype)
        is_same = item_N == item_N[own].unsqueeze(1)
        is_same.scatter_(1, own.unsqueeze(1), False)
        score = score.masked_fill(is_same, -math.inf)
        losses.append(cross_entropy(score, own, reduction="none"))
    return torch.cat(losses) if losses else user_QD.new_zeros(0)


def drawn_softmax_Q(
    user_QD: Tensor,
    item_ND: Tensor,
    own_Q: Tensor,
    item_N: Tensor,
    drawn_AD: Tensor,
    drawn: DrawnItems,
) -> Tensor:
    """Return the loss of each positive row, -log of its item's share among it and the drawn items.

    The first four as of sampled_softmax_Q; where the own item is drawn it competes with no one."""
    score_Q, losses = (user_QD * item_ND[own_Q]).sum(dim=1), list[Tensor]()
    log_expected_A = drawn.log_expected_A.to(user_QD.dtype)
    size = max(_MOST_PAIRS // max(len(drawn_AD), 1), 1)
    of_rows = user_QD.split(size), score_Q.split(size), item_N[own_Q].split(size)
    for user_vectors, own, items in zip(*of_rows, strict=True):
        score = user_vectors @ drawn_AD.mT - log_expected_A
        score = score.masked_fill(items.unsqueeze(1) == drawn.item_A, -math.inf)
        score = torch.cat([own.unsqueeze(1), score], dim=1)
        losses.append(score.logsumexp(dim=1) - own)
    return torch.cat(losses) if losses else score_Q
