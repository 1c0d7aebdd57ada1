"""Losses of the order of a task's rows: its support rows are a list, or its query rows.

With m rows whose label is known, z their outputs and y their labels,

    softmax     l_n = m q_n (-log p_n),    p = softmax(z),    q_n = y_n / sum y
    pairwise    l_n = m / (2 |P|) sum_{(i, j) in P, i = n or j = n} log(1 + e^(z_j - z_i)),
                P the pairs with y_i > y_j

so that the mean of l_n over the list is ListNet's cross-entropy (Cao et al., "Learning to Rank:
From Pairwise Approach to Listwise Approach", ICML 2007), or the mean loss of a pair: RankNet's
(Burges et al., ICML 2005), BPR's where labels are 0 and 1 (Rendle et al., arXiv 1205.2618). A list
of equal labels, or of one row, has the loss 0. Each label has lists of its own.

Shape suffixes: T tasks, N rows, H longest list or task, L labels, X all inputs side by side"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Pairs that are in memory at once: 1 MB in float32, a few times.
MOST_PAIRS = 1 << 18
NO_SCORE = -1e30  # its share of a softmax is 0, also in float32


class TaskLists(Protocol):
    """Where the rows of each task stand: layout/ragged.py, layout/padded_layout.py."""

    def blocks(self, rows_NX: Tensor) -> Sequence[Tensor]:
        """Return the rows in blocks [tasks, rows, X]; what pads is 0."""

    def join_blocks(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return blocks as rows [N, X], the inverse of `blocks`."""


def list_losses(
    kind: str, output: Tensor, label: Tensor, weight: Tensor | None, lists: TaskLists
) -> Tensor:
    """Return l_n of each row, in the shape and precision of the outputs: [N] or [N, L]."""
    # A loss of each row, so that row weights, masks and means over tasks are as with other losses;
    # the weights only say here, by 0, which rows are in no list.
    of_block = _softmax_losses if kind == "softmax" else _pair_losses
    return _by_list(of_block, lists, output, label, weight)


def list_grads(
    kind: str, output: Tensor, label: Tensor, weight: Tensor | None, lists: TaskLists
) -> Tensor:
    """Return the gradient of the weighted sum of these losses at the outputs, differentiable
    again."""
    of_block = _softmax_grads if kind == "softmax" else _pair_grads
    return _by_list(of_block, lists, output, label, weight)


def _by_list(
    of_block: Callable[[Tensor, Tensor, Tensor], Tensor],
    lists: TaskLists,
    output: Tensor,
    label: Tensor,
    weight: Tensor | None,
) -> Tensor:
    rows = output, label, torch.ones_like(label) if weight is None else weight
    dtype, found = output.dtype, []
    columns = [each.to(dtype).view(len(each), -1 if each.numel() else 1) for each in rows]
    for parts in zip(*map(lists.blocks, columns), strict=True):
        num_tasks, longest, num_labels = parts[0].shape
        mine_TH = [part.mT.flatten(0, 1) for part in parts]
        # Of no row there is no largest label.
        block_TH = of_block(*mine_TH) if longest else mine_TH[0]
        found.append(block_TH.unflatten(0, (num_tasks, num_labels)).mT)
    return lists.join_blocks(found).view_as(output)


def _targets(label_TH: Tensor, weight_TH: Tensor) -> Tensor:
    is_known_TH = weight_TH > 0
    most_T1 = label_TH.masked_fill(~is_known_TH, -torch.inf).amax(1, keepdim=True)
    least_T1 = label_TH.masked_fill(~is_known_TH, torch.inf).amin(1, keepdim=True)
    known_TH = label_TH * is_known_TH
    # NaN where no label is above 0; such lists are of equal labels, and masked below.
    share_TH = known_TH * (is_known_TH.sum(1, keepdim=True) / known_TH.sum(1, keepdim=True))
    return torch.where(most_T1 > least_T1, share_TH, 0.0)


def _softmax_losses(output_TH: Tensor, label_TH: Tensor, weight_TH: Tensor) -> Tensor:
    log_p_TH = output_TH.masked_fill(weight_TH == 0, NO_SCORE).log_softmax(1)
    return -_targets(label_TH, weight_TH) * log_p_TH


def _softmax_grads(output_TH: Tensor, label_TH: Tensor, weight_TH: Tensor) -> Tensor:
    target_TH = _targets(label_TH, weight_TH) * weight_TH
    p_TH = output_TH.masked_fill(weight_TH == 0, NO_SCORE).softmax(1)
    # The gradient of - sum_n t_n log p_n, whose targets need not add up to 1 with row weights.
    return p_TH * target_TH.sum(1, keepdim=True) - target_TH


def _pair_losses(output_TH: Tensor, label_TH: Tensor, weight_TH: Tensor) -> Tensor:
    losses_TH: Tensor = _PairLosses.apply(output_TH, _or_unknown(label_TH, weight_TH))
    return losses_TH


def _pair_grads(output_TH: Tensor, label_TH: Tensor, weight_TH: Tensor) -> Tensor:
    label_TH = _or_unknown(label_TH, weight_TH)
    grads_TH: Tensor = _PairGrads.apply(output_TH, label_TH, weight_TH)
    return grads_TH


def _or_unknown(label_TH: Tensor, weight_TH: Tensor) -> Tensor:
    # NaN is neither above nor below anything, so such a row is in no pair.
    return label_TH.masked_fill(weight_TH == 0, torch.nan)


class _PairLosses(torch.autograd.Function):
    """Computes l_n."""

    @staticmethod
    def forward(ctx: Any, output_TH: Tensor, label_TH: Tensor) -> Tensor:
        # The derivative is made anew from the outputs: no pair is kept.
        ctx.save_for_backward(output_TH, label_TH)
        above, below = _sums_over_pairs(output_TH, label_TH, lambda pairs: pairs.losses_ThH)
        return above + below

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _PairGrads.apply(*ctx.saved_tensors, grads[0]), None


class _PairGrads(torch.autograd.Function):
    """Computes the gradient of sum_n c_n l_n at the outputs."""

    @staticmethod
    def forward(ctx: Any, output_TH: Tensor, label_TH: Tensor, weight_TH: Tensor) -> Tensor:
        ctx.save_for_backward(output_TH, label_TH, weight_TH)

        def pair_grads(pairs: _Pairs) -> Tensor:
            return pairs.gap_ThH.sigmoid() * pairs.both(weight_TH)

        above, below = _sums_over_pairs(output_TH, label_TH, pair_grads)
        return below - above

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        output_TH, label_TH, weight_TH = ctx.saved_tensors

        def curvatures(pairs: _Pairs) -> Tensor:
            share_ThH = pairs.gap_ThH.sigmoid()
            grads_ThH = share_ThH * pairs.difference(grads[0])
            # sigmoid' = s (1 - s), times the difference of both moves: a pair's Hessian has rank 1.
            return grads_ThH * (1.0 - share_ThH) * pairs.both(weight_TH)

        above, below = _sums_over_pairs(output_TH, label_TH, curvatures)
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = torch.stack(
                _sums_over_pairs(
                    output_TH,
                    label_TH,
                    lambda pairs: pairs.gap_ThH.sigmoid() * pairs.difference(grads[0]),
                )
            ).sum(0)
        return below - above, None, of_weight


class _Pairs(NamedTuple):
    """Each of h rows of some lists with every row of its list."""

    lists: slice
    rows: slice
    is_pair_ThH: Tensor  # whether the first has the larger label
    gap_ThH: Tensor  # by how much the second scores more

    @property
    def losses_ThH(self) -> Tensor:
        return torch.logaddexp(self.gap_ThH, self.gap_ThH.new_zeros(()))

    def both(self, values_TH: Tensor) -> Tensor:
        return values_TH[self.lists, self.rows, None] + values_TH[self.lists, None, :]

    def difference(self, values_TH: Tensor) -> Tensor:
        return values_TH[self.lists, None, :] - values_TH[self.lists, self.rows, None]


def _pairs(output_TH: Tensor, label_TH: Tensor) -> Iterator[_Pairs]:
    num_lists, longest = output_TH.shape
    rows = min(longest, max(1, MOST_PAIRS // longest))
    lists = max(1, MOST_PAIRS // (rows * longest))
    for first in range(0, num_lists, lists):
        for row in range(0, longest, rows):
            at, of = slice(first, first + lists), slice(row, row + rows)
            is_pair_ThH = label_TH[at, of, None] > label_TH[at, None, :]
            yield _Pairs(at, of, is_pair_ThH, output_TH[at, None, :] - output_TH[at, of, None])


def _sums_over_pairs(
    output_TH: Tensor, label_TH: Tensor, term: Callable[[_Pairs], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return m / (2 |P|) times the sums of the terms of each row's pairs: of those where the row is
    first, and of those where it is second."""
    above_TH, below_TH = torch.empty_like(output_TH), torch.zeros_like(output_TH)
    count_T1 = output_TH.new_zeros(len(output_TH), 1)
    for pairs in _pairs(output_TH, label_TH):
        terms_ThH = torch.where(pairs.is_pair_ThH, term(pairs), 0.0)
        above_TH[pairs.lists, pairs.rows] = terms_ThH.sum(2)
        below_TH[pairs.lists] += terms_ThH.sum(1)
        count_T1[pairs.lists] += pairs.is_pair_ThH.sum((1, 2)).unsqueeze(1)
    num_known_T1 = label_TH.isfinite().sum(1, keepdim=True)
    each_T1 = num_known_T1 / (2.0 * count_T1).clamp(min=1.0)
    return above_TH * each_T1, below_TH * each_T1
