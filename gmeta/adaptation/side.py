"""The support rows, or the query rows, of all tasks of a batch: index tensors into one block of
rows.

Shape suffixes: N rows, P rows of the block, D embedding width, F single-id features, V ids of all
bags, K dense columns.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gmeta.adaptation.layout import RowLayout
from models.inputs import RowInputs


@dataclass(frozen=True)
class Side:
    """Rows task by task; positions index a block of embedding rows [P, D] that is fetched later."""

    layout: RowLayout
    label_N: Tensor
    dense_NK: Tensor
    positions_NF: Tensor
    bag_positions_V: Tensor
    bag_index_V: Tensor
    num_multi: int

    def inputs(self, rows_PD: Tensor) -> RowInputs:
        """What the model sees when the embedding rows have these values."""
        width = rows_PD.shape[1]
        single_ND = rows_PD.index_select(0, self.positions_NF.reshape(-1))
        return RowInputs(
            single_NFD=single_ND.view(*self.positions_NF.shape, width),
            bag_values_VD=rows_PD.index_select(0, self.bag_positions_V),
            bag_index_V=self.bag_index_V,
            num_multi=self.num_multi,
            dense_NK=self.dense_NK.to(rows_PD.dtype),
        )

    def moved(self, place_P: Tensor) -> "Side":
        """The same rows of a block whose row p now stands at place_P[p]."""
        place_P = place_P.to(self.positions_NF.dtype)
        return replace(
            self,
            positions_NF=place_P[self.positions_NF],
            bag_positions_V=place_P[self.bag_positions_V],
        )

    def to(self, device: torch.device) -> "Side":
        """Copy to a device."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return replace(
            self,
            layout=self.layout.to(device),
            label_N=move(self.label_N),
            dense_NK=move(self.dense_NK),
            positions_NF=move(self.positions_NF),
            bag_positions_V=move(self.bag_positions_V),
            bag_index_V=move(self.bag_index_V),
        )
