"""The model of an export as one module of padded tensors, without adaptation: what other runtimes
can take over.

Shape suffixes: N rows, F single-id features, M multi-id features, L longest list, K dense columns,
D embedding width, R rows of all tables, B tables.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gmeta.serving.model import ServedModel
from gmeta.serving.tables import StoredTable
from gmeta_models.config import Pooling
from gmeta_models.gated import row_layers
from gmeta_models.inputs import History, RowInputs
from gmeta_models.table_projections import filled_UD

IDS, DENSE, LISTS, LENGTHS = "ids", "dense", "lists", "list_lengths"
OUTPUT = "prediction"


@dataclass(frozen=True)
class PaddedInputs(RowInputs):
    """Rows whose lists are padded to one length. A model that asks for the bags by `bags_NHD` and
    the methods that pool them computes the same as from ragged ones; the ragged fields are empty.
    """

    values_NMLD: Tensor
    lengths_NM: Tensor

    @classmethod
    def of(
        cls, single_NFD: Tensor, dense_NK: Tensor, values_NMLD: Tensor, lengths_NM: Tensor
    ) -> "PaddedInputs":
        """Return the rows of these values."""
        none_VD = single_NFD.new_zeros(0, single_NFD.shape[2])
        none_V, num_multi = lengths_NM.new_zeros(0), values_NMLD.shape[1]
        return cls(single_NFD, none_VD, none_V, num_multi, dense_NK, values_NMLD, lengths_NM)

    def no_rows(self) -> "PaddedInputs":
        """Return the same columns without a row."""
        return self.of(
            self.single_NFD[:0], self.dense_NK[:0], self.values_NMLD[:0], self.lengths_NM[:0]
        )

    def bags_NHD(self, feature: int) -> History:
        """Return one multi-id feature, unpooled."""
        values_NMLD, there_NML = self._there()
        return History(values_NMLD[:, feature], there_NML[:, feature])

    def pooled_NMD(self, mode: Pooling) -> Tensor:
        """Return a vector for each list; an empty one is zero."""
        sums_NMD = self._there()[0].sum(dim=2)
        if mode == "sum":
            return sums_NMD
        return sums_NMD / self.lengths_NM.clamp(min=1).to(sums_NMD.dtype).unsqueeze(2)

    def _there(self) -> tuple[Tensor, Tensor]:
        """Return the values with zeros in place of padding, and which are none."""
        places_L = torch.arange(self.values_NMLD.shape[2], device=self.lengths_NM.device)
        there_NML = places_L < self.lengths_NM.unsqueeze(2)
        return self.values_NMLD * there_NML.to(self.values_NMLD.dtype).unsqueeze(3), there_NML


class KeyedTables(nn.Module):
    """All tables as one, whose rows are found by key: the place of a row among those of all."""

    values_RD: Tensor
    scale_R: Tensor | None
    first_B: Tensor

    def __init__(self, served: ServedModel) -> None:
        """Join the tables in the format they are stored in, zeros behind the rows of narrower ones.
        Where an IdGenerator adds to the rows of a table, they are 0.
        """
        super().__init__()
        tables, generated = served.tables, served.learner.generated_table
        self.projections = served.learner.projections
        width = served.config.model.embedding_dim
        values = [filled_UD(table.values_RD, width) for table in tables]
        if generated >= 0:
            values[generated] = torch.zeros_like(values[generated])
        scales = [table.scale_R for table in tables if table.scale_R is not None]
        rows_B = torch.tensor([len(table) for table in values])
        self.register_buffer("values_RD", torch.cat(values))
        self.register_buffer("scale_R", torch.cat(scales) if scales else None)
        self.register_buffer("first_B", rows_B.cumsum(0) - rows_B)

    def forward(self, keys: Tensor) -> Tensor:
        """Return the rows of keys of any shape [...] as float32: [..., D]."""
        keys_U = keys.flatten()
        fetched_UD = StoredTable(self.values_RD, self.scale_R).rows_UD(keys_U)
        rows_UD, table_U1 = fetched_UD, self.table_of(keys_U).unsqueeze(1)
        for place in self.projections.narrow:
            # By a choice for each row: how many there are of each table is not known here.
            projected_UD = self.projections.of_table(place, fetched_UD)
            rows_UD = torch.where(table_U1 == place, projected_UD, rows_UD)
        return rows_UD.view(*keys.shape, rows_UD.shape[1])

    def table_of(self, keys_U: Tensor) -> Tensor:
        """Return the place of each key's table: [U]."""
        return torch.searchsorted(self.first_B, keys_U, right=True) - 1


class Columns(nn.Module):
    """From the ids of each column to keys, and what training rows say of them to dense columns."""

    first_F: Tensor
    first_M: Tensor

    def __init__(self, served: ServedModel) -> None:
        super().__init__()
        features = served.config.features
        sizes = torch.tensor([table.num_rows for table in features.tables])
        place = {table.name: index for index, table in enumerate(features.tables)}
        first_B = sizes.cumsum(0) - sizes
        self.register_buffer("first_F", first_B[[place[c.table] for c in features.single]])
        self.register_buffer("first_M", first_B[[place[c.table] for c in features.multi]])
        self.items = served.learner.items

    def forward(
        self, inputs: Mapping[str, Tensor], side: str = ""
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the keys of both kinds, the dense columns and the lengths of the lists; groups of
        columns that the model does not have are of width 0.
        """
        ids_NF, dense_NK = inputs.get(side + IDS), inputs.get(side + DENSE)
        ids_NML, lengths_NM = inputs.get(side + LISTS), inputs.get(side + LENGTHS)
        given = next(each for each in (ids_NF, ids_NML) if each is not None)
        rows = given.shape[0]
        if ids_NF is None:
            ids_NF = given.new_zeros(rows, 0)
        if dense_NK is None:
            dense_NK = given.new_zeros(rows, 0, dtype=torch.float32)
        if ids_NML is None or lengths_NM is None:
            ids_NML, lengths_NM = given.new_zeros(rows, 0, 1), given.new_zeros(rows, 0)
        if self.items is not None:
            said = self.items.of_ids(ids_NF, ids_NML, lengths_NM)
            dense_NK = torch.cat([dense_NK, said], dim=1)
        return ids_NF + self.first_F, dense_NK, ids_NML + self.first_M.unsqueeze(1), lengths_NM


class UnadaptedForward(nn.Module):
    """The model's predictions for rows of tasks of which nothing is known: those of
    `ServedModel.predict`.

    Gates that the model or an encoder makes of no support rows are the same for every task, so
    they are multiplied into the layers; statistics of no support rows are 0.
    """

    def __init__(self, served: ServedModel) -> None:
        super().__init__()
        learner = served.learner
        self.columns = Columns(served)
        self.tables = KeyedTables(served)
        self.model = _gated(deepcopy(learner.model), served.unadapted.gates_1MO)
        self.generator = learner.generator
        self._num_statistics = learner.statistics.width
        self._losses = learner.objectives.outer

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return probabilities (bce) or ratings [N] of `ids` [N, F], `dense` columns [N, K], and
        `lists` [N, M, L] of which the first `list_lengths` [N, M] ids count.
        """
        key_NF, dense_NK, key_NML, lengths_NM = self.columns(inputs)
        unknown_NG = dense_NK.new_zeros(dense_NK.shape[0], self._num_statistics)
        rows: RowInputs = PaddedInputs.of(
            self.tables(key_NF),
            torch.cat([dense_NK, unknown_NG], dim=1) if self._num_statistics else dense_NK,
            self.tables(key_NML),
            lengths_NM,
        )
        if self.generator is not None:
            rows = self.generator(rows)
        return self._losses.predictions(self._losses.logits(self.model(rows)))


@torch.no_grad()
def _gated(model: nn.Module, gates: Mapping[str, Tensor]) -> nn.Module:
    """Return the model with each gate's scale and shift in its layer: s (W x + b) + t."""
    layers = row_layers(model)
    for name, gate_1MO in gates.items():
        scale_O, *shifts = gate_1MO[0].unbind(0)
        layer = layers[name]
        bias_O = scale_O.new_zeros(len(scale_O)) if layer.bias is None else layer.bias * scale_O
        layer.weight.mul_(scale_O.unsqueeze(1))
        layer.bias = nn.Parameter(sum(shifts, bias_O), requires_grad=False)
    return model
