"""The inputs of a model for a set of rows: fetched embedding rows and dense columns.

Shape suffixes: N rows, H longest list or task, F single-id or pooled features, M multi-id features,
C jagged lists, V values, K dense columns, D embedding width, X all inputs side by side"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gmeta_models.model_config import Pooling


class History(NamedTuple):
    """One multi-id feature's values in order, padded with zeros, and which of them are there."""

    values_NHD: Tensor
    there_NH: Tensor


class RowFeatures(NamedTuple):
    """Rows for a model that reads every multi-id feature pooled, except for one, its history."""

    features_NFD: Tensor  # single, then pooled
    dense_NK: Tensor
    history: History | None

    def side_by_side_NX(self) -> Tensor:
        """Return all features and the dense columns in one row: [N, (F + M) D + K]."""
        flat = self.features_NFD.flatten(1)
        return torch.cat([flat, self.dense_NK], dim=1) if self.dense_NK.shape[1] else flat


@dataclass(frozen=True)
class RowInputs:
    """Rows of any number of tasks; a model treats each row on its own."""

    single_NFD: Tensor
    # Embeddings of all multi-id features: row by row, feature by feature in a row.
    bag_values_VD: Tensor
    bag_index_V: Tensor  # int64, row * M + feature: the bag each value belongs to
    num_multi: int  # M
    dense_NK: Tensor
    # The length of each multi-id feature's longest bag, or more; None: found from the values.
    longest_M: tuple[int, ...] | None = field(default=None, kw_only=True)
    # The bag that each row reads, where rows share some: each bag is then pooled once. None: row n
    # reads the bags n * M to (n + 1) * M.
    bag_NM: Tensor | None = field(default=None, kw_only=True)

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return self.single_NFD.shape[0]

    def no_rows(self) -> RowInputs:
        """Return the same columns without a row."""
        return RowInputs(
            single_NFD=self.single_NFD[:0],
            bag_values_VD=self.bag_values_VD[:0],
            bag_index_V=self.bag_index_V[:0],
            num_multi=self.num_multi,
            dense_NK=self.dense_NK[:0],
            longest_M=self.longest_M,
        )

    def bags_NHD(self, feature: int) -> History:
        """Return one multi-id feature, unpooled."""
        bag_V, num_rows = self.bag_index_V, self.num_rows
        lengths_C = bag_V.new_zeros(num_rows * self.num_multi)
        # Not by bincount, for which CUDA makes the host wait.
        lengths_C.index_add_(0, bag_V, torch.ones_like(bag_V))
        lengths_N = lengths_C.view(num_rows, self.num_multi)[:, feature]
        if self.longest_M is None:
            longest = int(lengths_N.max()) if num_rows else 0
        else:
            longest = self.longest_M[feature]
        # Bag by bag and in order, as the values stand.
        starts_C = lengths_C.cumsum(0) - lengths_C
        within_V = torch.arange(bag_V.numel(), device=bag_V.device) - starts_C[bag_V]
        place_V = bag_V // self.num_multi * longest + within_V
        # Values of other features go behind the end: with a mask CUDA would make the host wait.
        end = num_rows * longest
        place_V = torch.where(bag_V % self.num_multi == feature, place_V, end)
        width = self.bag_values_VD.shape[1]
        padded = self.bag_values_VD.new_zeros(end + 1, width)
        padded = padded.index_copy(0, place_V, self.bag_values_VD)[:end]
        there_NH = torch.arange(longest, device=bag_V.device) < lengths_N.unsqueeze(1)
        history = History(padded.view(num_rows, longest, width), there_NH)
        if self.bag_NM is None:
            return history
        row_N = self.bag_NM[:, feature] // self.num_multi
        return History(*(part.index_select(0, row_N) for part in history))

    def pooled_NMD(self, mode: Pooling) -> Tensor:
        """Return a vector for each bag; repeated ids count repeatedly, an empty bag is zero."""
        num_rows, _, width = self.single_NFD.shape
        num_bags = num_rows * self.num_multi
        bags = self.bag_values_VD.new_zeros(num_bags, width)
        bags = bags.index_add(0, self.bag_index_V, self.bag_values_VD)
        if mode == "mean":
            # An empty bag is divided by one, and stays zero.
            # Not by bincount, whose length CUDA makes the host wait for.
            ones_V = bags.new_ones(self.bag_index_V.numel())
            sizes = bags.new_zeros(num_bags).index_add_(0, self.bag_index_V, ones_V).clamp_(min=1)
            bags = bags / sizes.unsqueeze(1)
        if self.bag_NM is not None:
            bags = bags.index_select(0, self.bag_NM.flatten())
        return bags.view(num_rows, self.num_multi, width)

    def features_NFD(self, mode: Pooling) -> Tensor:
        """Return all features, single then pooled: [N, F + M, D]."""
        if self.num_multi == 0:
            return self.single_NFD
        return torch.cat([self.single_NFD, self.pooled_NMD(mode)], dim=1)

    def pooled(self, mode: Pooling, history: int | None = None) -> RowFeatures:
        """Return the rows with their lists pooled; the values of `history` stay unpooled, too."""
        unpooled = None if history is None else self.bags_NHD(history)
        return RowFeatures(self.features_NFD(mode), self.dense_NK, unpooled)
