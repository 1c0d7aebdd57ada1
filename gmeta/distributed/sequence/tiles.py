"""Attention of queries to one block of keys and values, tile by tile: the matrix of all scores is
never there, neither forward nor backward. No ranks.

Queries, keys and values have the shape [tasks x heads, places, width], scores [tasks x heads,
queries, keys].

Shape suffix: T tasks"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self, final

import torch
from torch import Tensor
from torch.nn.functional import silu

TILE_SCORES = 1 << 20  # that are in memory at a time
Block = Sequence[Tensor]  # tensors of the same queries, or of the same keys
SMALLEST_TILE = 64  # places: the products of smaller ones are slow


class Tile(NamedTuple):
    """Some queries and keys of a block, and the places of the first of each in the whole sequence;
    `hidden` [tasks, queries, keys] are keys that a query does not see, None: it sees all."""

    queries: slice
    keys: slice
    hidden: Tensor | None
    first_query: int
    first_key: int

    def hide(self, scores: Tensor, value: float) -> Tensor:
        """Replace the scores of keys that are not seen, in place, and return all."""
        if self.hidden is not None:
            by_task(scores, len(self.hidden)).masked_fill_(self.hidden.unsqueeze(1), value)
        return scores


def by_task(scores: Tensor, tasks: int) -> Tensor:
    """Return a view [tasks, heads, queries, keys] of scores."""
    return scores.view(tasks, -1, *scores.shape[1:])


def flatten_heads(tensor: Tensor) -> Tensor:
    """Return a tensor [tasks, heads, ...] as [tasks x heads, ...], of 32 bits a number or more."""
    return tensor.flatten(0, 1).to(torch.promote_types(tensor.dtype, torch.float32)).contiguous()


@final
class KeyLimits:
    """How many keys each query sees, from the first of the whole sequence on: [tasks, queries]."""

    def __init__(self, of_host: Tensor, limits: Tensor, first_query: int = 0) -> None:
        # The host's decide which tiles there are: no kernel is waited for.
        self._of_host, self._limits = of_host, limits.unsqueeze(2)
        self._first_query = first_query

    @classmethod
    def causal(cls, length_T: Tensor, first: int, places: int, device: torch.device) -> Self:
        """Return those of queries at places from `first` on, each of which sees itself and what was
        before it among its task's events. `length_T` is on the host."""
        of_host, limits = (
            torch.arange(first + 1, first + places + 1, device=one.device).minimum(one.unsqueeze(1))
            for one in (length_T, length_T.to(device, non_blocking=True))
        )
        return cls(of_host, limits, first)

    def tiles(self, key: Tensor, first_key: int) -> Iterator[Tile]:
        """Yield the tiles of a block of keys, the first of which has that place: all that any query
        sees."""
        num_keys, side = (
            key.shape[1],
            max(SMALLEST_TILE, math.isqrt(TILE_SCORES // max(1, len(key)))),
        )
        for first in range(0, self._of_host.shape[1] if len(key) else 0, side):
            of_host = self._of_host[:, first : first + side]
            rows = slice(first, first + of_host.shape[1])
            fewest, most = (int(one) for one in of_host.aminmax())
            for start in range(0, min(num_keys, most - first_key), side):
                keys, hidden = slice(start, min(start + side, num_keys)), None
                places = torch.arange(keys.start, keys.stop, device=key.device) + first_key
                if first_key + keys.stop > fewest:
                    hidden = places >= self._limits[:, rows]
                yield Tile(rows, keys, hidden, self._first_query + first, first_key + start)


def queries_with_gradient(
    query: Tensor, grad_output: Tensor, outputs: Sequence[Tensor]
) -> list[Tensor]:
    """Return what `add_gradients` needs of queries; `outputs` are what `finish` returned."""
    # Of softmax also the total's logarithm, and what its gradient subtracts.
    softmax = [outputs[1], (outputs[0] * grad_output).sum(2, keepdim=True)] if outputs[1:] else []
    return [query, grad_output, *softmax]


@final
class Softmax:
    """softmax(q k^T / sqrt(width)) v. The sums are the online softmax's: the largest score so far,
    the total of exponentials relative to it, and the values weighted by those."""

    def begin(self, query: Tensor) -> list[Tensor]:
        """Return the sums of queries over no keys."""
        # The lowest number in place of -inf, whose differences are NaN.
        largest = query.new_full((*query.shape[:2], 1), torch.finfo(query.dtype).min)
        return [largest, torch.zeros_like(largest), torch.zeros_like(query)]

    def add(self, sums: Block, query: Tensor, block: Block, tiles: Iterator[Tile]) -> None:
        """Add a block of keys and values to the sums of queries."""
        for tile in tiles:
            largest, total, weighted = (one[:, tile.queries] for one in sums)
            scores = tile.hide(self._scores(query, block[0], tile), -math.inf)
            new_largest = torch.maximum(largest, scores.amax(2, keepdim=True))
            shrink = (largest - new_largest).exp_()
            weights = scores.sub_(new_largest).exp_()
            total.mul_(shrink).add_(weights.sum(2, keepdim=True))
            weighted.mul_(shrink).baddbmm_(weights, block[1][:, tile.keys])
            largest.copy_(new_largest)

    def finish(self, sums: Block) -> list[Tensor]:
        """Return the output and the logarithm of the total; 0 and -inf for a query that saw no key.
        The sums are gone."""
        largest, total, weighted = sums
        # The largest score's own term is 1: a smaller total is that of no key.
        return [weighted.div_(total.clamp_min(1)), largest + total.log()]

    def add_gradients(
        self, of_queries: Block, block: Block, tiles: Iterator[Tile], grads: Block
    ) -> None:
        """Add the gradients of one block to those of queries, keys and values."""
        query, grad_output, log_total, subtracted = of_queries
        scale = query.shape[2] ** -0.5
        for tile in tiles:
            rows, keys = tile.queries, tile.keys
            weights = self._scores(query, block[0], tile).sub_(log_total[:, rows]).exp_()
            tile.hide(weights, 0.0)
            grads[2][:, keys].baddbmm_(weights.mT, grad_output[:, rows])
            grad_scores = grad_output[:, rows].bmm(block[1][:, keys].mT)
            grad_scores.sub_(subtracted[:, rows]).mul_(weights)
            grads[0][:, rows].baddbmm_(grad_scores, block[0][:, keys], alpha=scale)
            grads[1][:, keys].baddbmm_(grad_scores.mT, query[:, rows], alpha=scale)

    def _scores(self, query: Tensor, key: Tensor, tile: Tile) -> Tensor:
        scaled: Tensor = query[:, tile.queries] * query.shape[2] ** -0.5
        return scaled.bmm(key[:, tile.keys].mT)


class RelativeBias(NamedTuple):
    """What HSTU adds to a score: an entry of each table, by how many places and how much time lie
    between query and key: the number of `edges`, in order, that the difference reaches."""

    position: Tensor  # [heads or 1, edges + 1]
    time: Tensor  # the same
    edges: Tensor
    times: Tensor  # [tasks, places]: of the whole sequence

    def indices(self, tile: Tile) -> list[Tensor]:
        """Return the entries of each table, [tasks or 1, queries, keys]."""
        rows = slice(tile.first_query, tile.first_query + tile.queries.stop - tile.queries.start)
        keys = slice(tile.first_key, tile.first_key + tile.keys.stop - tile.keys.start)
        places = torch.arange(self.times.shape[1], device=self.times.device).unsqueeze(0)
        # Keys after the query are hidden, whatever is added to their scores.
        passed = (one[:, rows, None] - one[:, None, keys] for one in (places, self.times))
        return [torch.bucketize(one.to(self.edges), self.edges, right=True) for one in passed]


@final
class Pointwise:
    """silu(q k^T + bias) v: HSTU (arXiv 2402.17152, equation 2). No term needs to know of another:
    the sum is the output."""

    def __init__(self, bias: RelativeBias) -> None:
        self._bias = bias
        self.grad_tables = [torch.zeros_like(bias.position), torch.zeros_like(bias.time)]

    def begin(self, query: Tensor) -> list[Tensor]:
        """Return the sum of queries over no keys."""
        return [torch.zeros_like(query)]

    def add(self, sums: Block, query: Tensor, block: Block, tiles: Iterator[Tile]) -> None:
        """Add a block of keys and values to the sum of queries."""
        for tile in tiles:
            weights = tile.hide(silu(self._scores(query, block[0], tile)[0], inplace=True), 0.0)
            sums[0][:, tile.queries].baddbmm_(weights, block[1][:, tile.keys])

    def finish(self, sums: Block) -> Block:
        """Return the output."""
        return sums

    def add_gradients(
        self, of_queries: Block, block: Block, tiles: Iterator[Tile], grads: Block
    ) -> None:
        """Add the gradients of one block to those of queries, keys, values and tables."""
        query, grad_output = of_queries
        for tile in tiles:
            rows, keys = tile.queries, tile.keys
            scores, indices = self._scores(query, block[0], tile)
            gates = scores.sigmoid()
            weights = tile.hide(scores * gates, 0.0)
            grads[2][:, keys].baddbmm_(weights.mT, grad_output[:, rows])
            slopes = gates.mul_(scores.sub_(weights).add_(1))
            grad_scores = grad_output[:, rows].bmm(block[1][:, keys].mT)
            tile.hide(grad_scores.mul_(slopes), 0.0)
            grads[0][:, rows].baddbmm_(grad_scores, block[0][:, keys])
            grads[1][:, keys].baddbmm_(grad_scores.mT, query[:, rows])
            of_tasks = by_task(grad_scores, len(self._bias.times))
            for table, index in zip(self.grad_tables, indices, strict=True):
                shared = of_tasks.sum_to_size(len(index), len(table), *grad_scores.shape[1:])
                for grad, of_head in zip(table, shared.transpose(0, 1).flatten(1), strict=True):
                    grad.index_add_(0, index.flatten(), of_head)

    def _scores(self, query: Tensor, key: Tensor, tile: Tile) -> tuple[Tensor, list[Tensor]]:
        """Return the scores of a tile, and the entries of the tables that are in them."""
        scores, indices = query[:, tile.queries].bmm(key[:, tile.keys].mT), self._bias.indices(tile)
        for table, index in zip(self._bias[:2], indices, strict=True):
            by_task(scores, len(self._bias.times)).add_(table[:, index].transpose(0, 1))
        return scores, indices
