"""The model of an export as modules of padded tensors, which other runtimes can take over.

AdaptAndPredict is the engine's own inner loop, recorded with its gradients: no autograd is needed
where it runs.

Shape suffixes: T tasks, N rows, S support rows, Q query rows, H longest list or task, F single-id
or pooled features, M multi-id features, V values, K dense columns, L labels, B tables, U unique
ids, R rows of tables, D embedding width, P task-row pairs, O outputs, J parts of a gate"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gmeta.adaptation.layout.ragged import RowLayout
from gmeta.adaptation.layout.sides import Side, WorkingRows
from gmeta.losses.objectives import known_weights
from gmeta.serving.served_model import EXPECTED_QUERY_ROWS, ServedModel
from gmeta.serving.stored_tables import StoredTable
from gmeta_models.gated import row_layers
from gmeta_models.inputs import History, RowInputs
from gmeta_models.model_config import Pooling
from gmeta_models.model_outputs import split_output
from gmeta_models.table_projections import pad_width_UD

IDS, DENSE, LISTS, LENGTHS = "ids", "dense", "lists", "list_lengths"
OUTPUT = "prediction"
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

    def __init__(self, served: ServedModel) -> None:
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


class ColumnKeys(nn.Module):
    """From the ids of each column to keys, and item statistics to dense columns."""

    first_F: Tensor
    first_M: Tensor
    size_F: Tensor
    size_M: Tensor

    def __init__(self, served: ServedModel) -> None:
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
        self._no_key = int(sizes.sum())
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
        are_rows_NF = (ids_NF >= 0) & (ids_NF < self.size_F)
        are_rows_NMH = (ids_NMH >= 0) & (ids_NMH < self.size_M.unsqueeze(1))
        are_lists_NM = (lengths_NM >= 0) & (lengths_NM <= ids_NMH.shape[2])
        key_NF = torch.where(are_rows_NF, ids_NF + self.first_F, self._no_key)
        are_right_NMH = are_rows_NMH & are_lists_NM.unsqueeze(2)
        key_NMH = torch.where(are_right_NMH, ids_NMH + self.first_M.unsqueeze(1), self._no_key)
        return key_NF, dense_NK, key_NMH, lengths_NM


class UnadaptedForward(nn.Module):
    """The predictions of `ServedModel.predict`, for tasks of which nothing is known."""

    def __init__(self, served: ServedModel) -> None:
        super().__init__()
        learner = served.learner
        self.columns = ColumnKeys(served)
        self.tables = KeyedTables(served)
        # Gates made of no support rows are the same for every task, so layers can hold them.
        # A copy, as the gates are multiplied into its weights.
        self.model = _apply_gates(deepcopy(learner.model), served.unadapted.gates_1JO)
        self.generator = learner.generator
        self._num_statistics = learner.statistics.width
        self._losses = learner.objectives.outer

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return probabilities (bce) or ratings [N] of `ids` [N, F], `dense` columns [N, K] and
        `lists` [N, M, H], of which the first `list_lengths` [N, M] ids count."""
        key_NF, dense_NK, key_NMH, lengths_NM = self.columns(inputs)
        # Statistics of no support rows are 0.
        unknown_NK = dense_NK.new_zeros(dense_NK.shape[0], self._num_statistics)
        rows: RowInputs = PaddedInputs.of(
            self.tables(key_NF),
            torch.cat([dense_NK, unknown_NK], dim=1) if self._num_statistics else dense_NK,
            self.tables(key_NMH),
            lengths_NM,
        )
        if self.generator is not None:
            rows = self.generator(rows)
        return self._losses.predictions(self._losses.logits(split_output(self.model(rows))[0]))


@torch.no_grad()
def _apply_gates(model: nn.Module, gates: Mapping[str, Tensor]) -> nn.Module:
    """Return the model with each gate's scale and shift in its layer: s (W x + b) + t."""
    layers = row_layers(model)
    for name, gate_1JO in gates.items():
        scale_O, *shifts = gate_1JO[0].unbind(0)
        layer = layers[name]
        # A gate of one part has no shift.
        bias_O = scale_O.new_zeros(len(scale_O)) if layer.bias is None else layer.bias * scale_O
        layer.weight.mul_(scale_O.unsqueeze(1))
        layer.bias = nn.Parameter(sum(shifts, bias_O), requires_grad=False)
    return model


@dataclass(frozen=True)
class KeyedRows:
    """The rows of one task by key, as far as the inner loop asks for a Side."""

    layout: RowLayout
    label_N: Tensor
    place_NF: Tensor  # where the embedding of each key stands among rows_PD
    place_NMH: Tensor
    dense_NK: Tensor
    lengths_NM: Tensor
    weight: Tensor | None = None

    def inputs(self, rows_PD: Tensor) -> PaddedInputs:
        """Return what the model sees when the embedding rows have these values."""
        single_NFD, values_NMHD = (
            rows_PD.index_select(0, place.flatten()).view(*place.shape, rows_PD.shape[1])
            for place in (self.place_NF, self.place_NMH)
        )
        return PaddedInputs.of(single_NFD, self.dense_NK, values_NMHD, self.lengths_NM)


class AdaptAndPredict(nn.Module):
    """Adapts to one task's support rows and predicts its query rows, as `ServedModel.adapt`."""

    def __init__(self, served: ServedModel) -> None:
        super().__init__()
        learner = served.learner
        self.columns = ColumnKeys(served)
        self.tables = KeyedTables(served)
        self.learner = learner
        self._losses = learner.objectives.outer
        # A rate for each table, or one for all.
        places_B = torch.arange(len(served.tables))
        self._rate = learner.rates.of_rows(torch.ones_like(places_B), places_B)
        features = served.config.features
        self._may_lack_labels = bool(features.labels or features.weight)
        self._adapts_rows = learner.general_loop.plan.adapts_rows

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return probabilities (bce) or ratings [N] of the query rows, given UnadaptedForward's
        `inputs` for both sides, and the support's labels and weights."""
        key_SF, dense_SK, key_SMH, lengths_SM = self.columns(inputs, SUPPORT)
        # A key that stands there several times has its one row where it stands first.
        key_P = torch.cat([key_SF.flatten(), key_SMH.flatten()]).sort()[0]
        place_SF, place_SMH = torch.searchsorted(key_P, key_SF), torch.searchsorted(key_P, key_SMH)
        label_S, weight = inputs[SUPPORT + LABEL], None
        if self._may_lack_labels:
            weight = known_weights(label_S, inputs.get(SUPPORT + WEIGHT))
        layout = _layout_of_one_task(key_SF)
        support = KeyedRows(layout, label_S, place_SF, place_SMH, dense_SK, lengths_SM, weight)
        rows_PD, inner = self.tables(key_P), self.learner.general_loop
        rate = self._rate
        if isinstance(rate, Tensor):
            rate = rate.index_select(0, self.tables.table_of(key_P))
        working = WorkingRows(rows_PD, rate)
        with torch.enable_grad():
            # The inner loop asks for nothing else of a Side.
            adapted = inner.take_steps(working, cast(Side, support), EXPECTED_QUERY_ROWS, False)
        key_QF, dense_QK, key_QMH, lengths_QM = self.columns(inputs, QUERY)
        keys_V = torch.cat([key_QF.flatten(), key_QMH.flatten()])
        fetched_VD = self.tables(keys_V)
        if self._adapts_rows:
            place_V = torch.searchsorted(key_P, keys_V).clamp(max=key_P.shape[0] - 1)
            is_known_V1 = (key_P[place_V] == keys_V).unsqueeze(1)
            # Both are computed and one is chosen, as a graph has no branches.
            fetched_VD = torch.where(is_known_V1, adapted.rows_PD[place_V], fetched_VD)
        # Each key of the query has a row of its own, in their order.
        place_V = torch.arange(keys_V.shape[0], device=keys_V.device)
        place_QF, place_QMH = place_V.split([key_QF.numel(), key_QMH.numel()])
        place_QF, place_QMH = place_QF.view(key_QF.shape), place_QMH.view(key_QMH.shape)
        layout, label_Q = _layout_of_one_task(key_QF), dense_QK.new_zeros(dense_QK.shape[0])
        query = KeyedRows(layout, label_Q, place_QF, place_QMH, dense_QK, lengths_QM)
        layers = adapted.layers
        query_inputs = inner.restore_adapted(layers.changes, layers.gates_TJO, fetched_VD)
        logits = inner.output_N(query_inputs, cast(Side, query)).detach()
        return self._losses.predictions(logits)


def record_graph(module: AdaptAndPredict, example: dict[str, Tensor]) -> GraphModule:
    """Return the operations of the module for inputs like these, of any number of rows."""
    # Parameters and tables are no inputs: they become constants of the graph.
    trace = make_fx(module, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    graph: GraphModule = trace(example)
    return graph


def _layout_of_one_task(key_NF: Tensor) -> RowLayout:
    num_rows = key_NF.shape[0]
    # Counted by an operation: an int of Python would stand in the recorded graph as a constant.
    lengths_1 = key_NF.new_ones(num_rows).sum().view(1)
    return RowLayout(lengths_1, num_rows, num_rows, None)
