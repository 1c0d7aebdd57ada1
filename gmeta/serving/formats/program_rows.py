"""The inputs of a program as padded tensors: ids of columns as keys, and the rows of the tables.

Shape suffixes: N rows, H longest list or task, F single-id or pooled features, M multi-id features,
V values, K dense columns, B tables, U unique ids, R rows of tables, D embedding width"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gmeta.serving.stored_tables import StoredTable
from gmeta_models.inputs import History, RowInputs
from gmeta_models.model_config import Pooling
from gmeta_models.table_projections import pad_width_UD

if TYPE_CHECKING:
    from gmeta.serving.served_model import ServedModel

IDS, DENSE, LISTS, LENGTHS = "ids", "dense", "lists", "list_lengths"
SUPPORT, QUERY, LABEL, WEIGHT = "support.", "query.", "label", "weight"


@dataclass(frozen=True)
class PaddedInputs(RowInputs):
    """Rows whose lists are padded to one length, RowInputs' ragged fields empty: a model that asks
    for lists by `bags_NHD` and `pooled_NMD` computes the same from both."""

    values_NMHD: Tensor
    lengths_NM: Tensor

    @classmethod
    def of(
        cls, single_NFD: Tensor, dense_NK: Tensor, values_NMHD: Tensor, lengths_NM: Tensor
    ) -> "PaddedInputs":
        """Return the rows of these values."""
        none_VD = single_NFD.new_zeros(0, single_NFD.shape[2])
        none_V, num_multi = lengths_NM.new_zeros(0), values_NMHD.shape[1]
        return cls(single_NFD, none_VD, none_V, num_multi, dense_NK, values_NMHD, lengths_NM)

    def no_rows(self) -> "PaddedInputs":
        """Return the same columns without a row."""
        lists = self.values_NMHD[:0], self.lengths_NM[:0]
        return self.of(self.single_NFD[:0], self.dense_NK[:0], *lists)

    def bags_NHD(self, feature: int) -> History:
        """Return one multi-id feature, unpooled."""
        values_NMHD, there_NMH = self._masked_values()
        return History(values_NMHD[:, feature], there_NMH[:, feature])

    def pooled_NMD(self, mode: Pooling) -> Tensor:
        """Return a vector for each list; an empty one is zero."""
        sums_NMD = self._masked_values()[0].sum(dim=2)
        if mode == "sum":
            return sums_NMD
        return sums_NMD / self.lengths_NM.clamp(min=1).to(sums_NMD.dtype).unsqueeze(2)

    def _masked_values(self) -> tuple[Tensor, Tensor]:
        places_H = torch.arange(self.values_NMHD.shape[2], device=self.lengths_NM.device)
        there_NMH = places_H < self.lengths_NM.unsqueeze(2)
        return self.values_NMHD * there_NMH.to(self.values_NMHD.dtype).unsqueeze(3), there_NMH


class KeyedTables(nn.Module):
    """All tables as one, whose rows are found by key: the place of a row among those of all."""

    values_RD: Tensor
    scale_R: Tensor | None
    first_B: Tensor

    def __init__(self, served: "ServedModel") -> None:
        """Join the tables in the format they are stored in."""
        super().__init__()
        tables, generated = served.tables, served.learner.generated_table
        self.projections = served.learner.projections
        width = served.config.model.embedding_dim
        # Zeros stand behind the rows of narrower tables.
        values = [pad_width_UD(table.values_RD, width) for table in tables]
        if generated >= 0:
            # The generator makes these rows from ids; a program adds what it makes to 0.
            values[generated] = torch.zeros_like(values[generated])
        scales = [table.scale_R for table in tables if table.scale_R is not None]
        rows_B = torch.tensor([len(table) for table in values])
        self.register_buffer("values_RD", torch.cat(values))
        self.register_buffer("scale_R", torch.cat(scales) if scales else None)
        self.register_buffer("first_B", rows_B.cumsum(0) - rows_B)

    def forward(self, keys: Tensor, for_events: bool = False) -> Tensor:
        """Return the rows of keys of any shape [...] as float32: [..., D], as the model takes them
        or, for events, as their encoder does."""
        keys_U = keys.flatten()
        fetched_UD = StoredTable(self.values_RD, self.scale_R).rows_UD(keys_U)
        table_U = self.table_of(keys_U)
        if (shared_BD := self.projections.shared_BD) is not None:
            fetched_UD = self.projections.share_UD(fetched_UD, shared_BD.index_select(0, table_U))
        rows_UD, table_U1 = fetched_UD, table_U.unsqueeze(1)
        for place in self.projections.narrow:
            # By a choice for each row: how many there are of each table is not known here.
            projected_UD = self.projections.project(place, fetched_UD)
            rows_UD = torch.where(table_U1 == place, projected_UD, rows_UD)
        for place in () if for_events else self.projections.hidden:
            rows_UD = rows_UD.masked_fill(table_U1 == place, 0.0)
        return rows_UD.view(*keys.shape, rows_UD.shape[1])

    def table_of(self, keys_U: Tensor) -> Tensor:
        """Return the place of each key's table: [U]."""
        return torch.searchsorted(self.first_B, keys_U, right=True) - 1


class ColumnKeys(nn.Module):
    """From the ids of each column to keys, and item statistics to dense columns."""

    first_F: Tensor
    first_M: Tensor
    size_F: Tensor
    size_M: Tensor

    def __init__(self, served: "ServedModel") -> None:
        super().__init__()
        features = served.config.features
        sizes = torch.tensor([table.num_rows for table in features.tables])
        place = {table.name: index for index, table in enumerate(features.tables)}
        first_B = sizes.cumsum(0) - sizes
        self.register_buffer("first_F", first_B[[place[c.table] for c in features.single]])
        self.register_buffer("first_M", first_B[[place[c.table] for c in features.multi]])
        self.register_buffer("size_F", sizes[[place[c.table] for c in features.single]])
        self.register_buffer("size_M", sizes[[place[c.table] for c in features.multi]])
        # A program cannot raise. The key behind all rows stands for ids and lengths that are wrong:
        # every runtime fails when it looks this row up on a CPU.
        self.no_key = int(sizes.sum())
        self.items = served.learner.items

    def forward(
        self, inputs: Mapping[str, Tensor], side: str = ""
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return keys of both kinds, dense columns and lengths; of width 0 where there are none."""
        ids_NF, dense_NK = inputs.get(side + IDS), inputs.get(side + DENSE)
        ids_NMH, lengths_NM = inputs.get(side + LISTS), inputs.get(side + LENGTHS)
        ids = next(each for each in (ids_NF, ids_NMH) if each is not None)
        rows = ids.shape[0]
        if ids_NF is None:
            ids_NF = ids.new_zeros(rows, 0)
        if dense_NK is None:
            dense_NK = ids.new_zeros(rows, 0, dtype=torch.float32)
        if ids_NMH is None or lengths_NM is None:
            ids_NMH, lengths_NM = ids.new_zeros(rows, 0, 1), ids.new_zeros(rows, 0)
        if self.items is not None:
            statistics = self.items.features_of_ids(ids_NF, ids_NMH, lengths_NM)
            dense_NK = torch.cat([dense_NK, statistics], dim=1)
        are_rows_NMH = (ids_NMH >= 0) & (ids_NMH < self.size_M.unsqueeze(1))
        are_lists_NM = (lengths_NM >= 0) & (lengths_NM <= ids_NMH.shape[2])
        are_right_NMH = are_rows_NMH & are_lists_NM.unsqueeze(2)
        key_NMH = torch.where(are_right_NMH, ids_NMH + self.first_M.unsqueeze(1), self.no_key)
        return self.of_single(ids_NF), dense_NK, key_NMH, lengths_NM

    def of_single(self, ids_NF: Tensor) -> Tensor:
        """Return the keys of single-id columns alone."""
        are_rows_NF = (ids_NF >= 0) & (ids_NF < self.size_F)
        return torch.where(are_rows_NF, ids_NF + self.first_F, self.no_key)
