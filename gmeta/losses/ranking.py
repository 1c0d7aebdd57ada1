"""Losses of the order of a task's rows: of the list that its support rows are, or its query rows.

With m rows whose label is known, z their outputs and y their labels,

    softmax     l_n = m q_n (-log p_n),    p = softmax(z),    q_n = y_n / sum y
    pairwise    l_n = m / (2 |P|) sum_{(i, j) in P, i = n or j = n} log(1 + e^(z_j - z_i)),
                P the pairs with y_i > y_j

so that the mean of l_n over the list is ListNet's cross-entropy (Cao et al., "Learning to Rank:
From Pairwise Approach to Listwise Approach", ICML 2007), or the mean loss of a pair: RankNet's
(Burges et al., ICML 2005), BPR's where labels are 0 and 1 (Rendle et al., arXiv 1205.2618). A list
of equal labels, or of one row, has the loss 0. Written as a loss of each row, row weights, masks
and means over tasks are those of any other loss; a row that weighs 0 is not in the list.

Shape suffixes: N rows, L labels, T lists (of each label its own), R rows of the longest, r some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Pairs that are in memory at once: 1 MB in float32, a few times.
MOST_PAIRS = 1 << 18
NO_SCORE = -1e30  # its share of a softmax is 0, also in float32


class Lists(Protocol):
    """Where the rows of each task stand: rows/ragged.py, rows/rectangles.py."""

    def blocks(self, rows_NX: Tensor) -> Sequence[Tensor]:
        """Return the rows in blocks [tasks, rows, X]; what pads is 0."""

    def joined(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return blocks as rows [N, X], the inverse of `blocks`."""


def list_losses(
    kind: str, output: Tensor, label: Tensor, weight: Tensor | None, lists: Lists
) -> Tensor:
    """Return l_n of each row, in the shape and the precision of the outputs: [N] or [N, L].

    The weights only say, by 0, which labels are not known; None: all are.
    """
    of_block = _softmax_losses if kind == "softmax" else _pair_losses
    return _by_list(of_block, lists, output, label, weight)


def list_slopes(
    kind: str, output: Tensor, label: Tensor, weight: Tensor | None, lists: Lists
) -> Tensor:
    """Return the gradient of the weighted sum of these losses at the outputs, differentiable once
    more. None: each weighs 1."""
    of_block = _softmax_slopes if kind == "softmax" else _pair_slopes
    return _by_list(of_block, lists, output, label, weight)


def _by_list(
    of_block: Callable[[Tensor, Tensor, Tensor], Tensor],
    lists: Lists,
    output: Tensor,
    label: Tensor,
    weight: Tensor | None,
) -> Tensor:
    """Return what the function makes of outputs, labels and weights [T, R] of each block."""
    rows = output, label, torch.ones_like(label) if weight is None else weight
    dtype, found = output.dtype, []
    columns = [each.to(dtype).view(len(each), -1 if each.numel() else 1) for each in rows]
    for parts in zip(*map(lists.blocks, columns), strict=True):
        num_tasks, longest, num_labels = parts[0].shape
        mine_TR = [part.mT.flatten(0, 1) for part in parts]
        # Of no row there is no largest label.
        block_TR = of_block(*mine_TR) if longest else mine_TR[0]
        found.append(block_TR.unflatten(0, (num_tasks, num_labels)).mT)
    return lists.joined(found).view_as(output)


def _targets(label_TR: Tensor, weight_TR: Tensor) -> Tensor:
    """Return m q_n; 0 where the labels of a list are equal."""
    is_known_TR = weight_TR > 0
    most_T1 = label_TR.masked_fill(~is_known_TR, -torch.inf).amax(1, keepdim=True)
    least_T1 = label_TR.masked_fill(~is_known_TR, torch.inf).amin(1, keepdim=True)
    known_TR = label_TR * is_known_TR
    # NaN where no label is above 0; such lists are of equal labels, and masked below.
    share_TR = known_TR * (is_known_TR.sum(1, keepdim=True) / known_TR.sum(1, keepdim=True))
    return torch.where(most_T1 > least_T1, share_TR, 0.0)


def _softmax_losses(output_TR: Tensor, label_TR: Tensor, weight_TR: Tensor) -> Tensor:
    log_p_TR = output_TR.masked_fill(weight_TR == 0, NO_SCORE).log_softmax(1)
    return -_targets(label_TR, weight_TR) * log_p_TR


def _softmax_slopes(output_TR: Tensor, label_TR: Tensor, weight_TR: Tensor) -> Tensor:
    target_TR = _targets(label_TR, weight_TR) * weight_TR
    p_TR = output_TR.masked_fill(weight_TR == 0, NO_SCORE).softmax(1)
    # The gradient of - sum_n t_n log p_n, whose targets need not add up to 1 with row weights.
    return p_TR * target_TR.sum(1, keepdim=True) - target_TR


def _pair_losses(output_TR: Tensor, label_TR: Tensor, weight_TR: Tensor) -> Tensor:
    losses_TR: Tensor = _PairLosses.apply(output_TR, _or_unknown(label_TR, weight_TR))
    return losses_TR


def _pair_slopes(output_TR: Tensor, label_TR: Tensor, weight_TR: Tensor) -> Tensor:
    label_TR = _or_unknown(label_TR, weight_TR)
    slopes_TR: Tensor = _PairSlopes.apply(output_TR, label_TR, weight_TR)
    return slopes_TR


def _or_unknown(label_TR: Tensor, weight_TR: Tensor) -> Tensor:
    # NaN is neither above nor below anything, so such a row is in no pair.
    return label_TR.masked_fill(weight_TR == 0, torch.nan)


class _PairLosses(torch.autograd.Function):
    """l_n; its derivative is made anew from the outputs, so that no pair is kept."""

    @staticmethod
    def forward(ctx: Any, output_TR: Tensor, label_TR: Tensor) -> Tensor:
        ctx.save_for_backward(output_TR, label_TR)
        above, below = _sums_over_pairs(output_TR, label_TR, lambda pairs: pairs.losses_TrR)
        return above + below

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _PairSlopes.apply(*ctx.saved_tensors, grads[0]), None


class _PairSlopes(torch.autograd.Function):
    """The gradient of sum_n c_n l_n at the outputs."""

    @staticmethod
    def forward(ctx: Any, output_TR: Tensor, label_TR: Tensor, weight_TR: Tensor) -> Tensor:
        ctx.save_for_backward(output_TR, label_TR, weight_TR)

        def slopes(pairs: _Pairs) -> Tensor:
            return pairs.gap_TrR.sigmoid() * pairs.both(weight_TR)

        above, below = _sums_over_pairs(output_TR, label_TR, slopes)
        return below - above

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        output_TR, label_TR, weight_TR = ctx.saved_tensors

        def curvatures(pairs: _Pairs) -> Tensor:
            share_TrR = pairs.gap_TrR.sigmoid()
            slopes_TrR = share_TrR * pairs.difference(grads[0])
            # sigmoid' = s (1 - s), times how far apart the two outputs are moved: the Hessian of a
            # pair has one direction.
            return slopes_TrR * (1.0 - share_TrR) * pairs.both(weight_TR)

        above, below = _sums_over_pairs(output_TR, label_TR, curvatures)
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = torch.stack(
                _sums_over_pairs(
                    output_TR,
                    label_TR,
                    lambda pairs: pairs.gap_TrR.sigmoid() * pairs.difference(grads[0]),
                )
            ).sum(0)
        return below - above, None, of_weight


class _Pairs(NamedTuple):
    """Each of some rows of some lists with every row of its list."""

    lists: slice
    rows: slice
    is_pair_TrR: Tensor  # whether the first has the larger label
    gap_TrR: Tensor  # by how much the second scores more

    @property
    def losses_TrR(self) -> Tensor:
        """Return log(1 + e^gap)."""
        return torch.logaddexp(self.gap_TrR, self.gap_TrR.new_zeros(()))

    def both(self, values_TR: Tensor) -> Tensor:
        """Return the sum of the values of the two rows."""
        return values_TR[self.lists, self.rows, None] + values_TR[self.lists, None, :]

    def difference(self, values_TR: Tensor) -> Tensor:
        """Return by how much the value of the second row is above that of the first."""
        return values_TR[self.lists, None, :] - values_TR[self.lists, self.rows, None]


def _pairs(output_TR: Tensor, label_TR: Tensor) -> Iterator[_Pairs]:
    num_lists, longest = output_TR.shape
    rows = min(longest, max(1, MOST_PAIRS // longest))
    lists = max(1, MOST_PAIRS // (rows * longest))
    for first in range(0, num_lists, lists):
        for row in range(0, longest, rows):
            at, of = slice(first, first + lists), slice(row, row + rows)
            is_pair_TrR = label_TR[at, of, None] > label_TR[at, None, :]
            yield _Pairs(at, of, is_pair_TrR, output_TR[at, None, :] - output_TR[at, of, None])


def _sums_over_pairs(
    output_TR: Tensor, label_TR: Tensor, term: Callable[[_Pairs], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return, for each row, m / (2 |P|) times the sum of the terms of the pairs in which it is
    first, and of those in which it is second: [T, R] each."""
    above_TR, below_TR = torch.empty_like(output_TR), torch.zeros_like(output_TR)
    count_T1 = output_TR.new_zeros(len(output_TR), 1)
    for pairs in _pairs(output_TR, label_TR):
        terms_TrR = torch.where(pairs.is_pair_TrR, term(pairs), 0.0)
        above_TR[pairs.lists, pairs.rows] = terms_TrR.sum(2)
        below_TR[pairs.lists] += terms_TrR.sum(1)
        count_T1[pairs.lists] += pairs.is_pair_TrR.sum((1, 2)).unsqueeze(1)
    num_known_T1 = label_TR.isfinite().sum(1, keepdim=True)
    each_T1 = num_known_T1 / (2.0 * count_T1).clamp(min=1.0)
    return above_TR * each_T1, below_TR * each_T1
