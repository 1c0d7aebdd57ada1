"""The model of an export as modules of padded tensors, which other runtimes can take over.

AdaptAndPredict is the engine's own inner loop, recorded with its gradients: no autograd is needed
where it runs.

Shape suffixes: T tasks, N rows, S support rows, Q query rows, H longest list or task, F single-id
or pooled features, M multi-id features, V values, K dense columns, B tables, D embedding width, P
task-row pairs, O outputs, J parts of a gate, X all inputs side by side"""

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
from gmeta.serving.formats.program_events import EventInputs
from gmeta.serving.formats.program_rows import (
    LABEL,
    QUERY,
    SUPPORT,
    WEIGHT,
    ColumnKeys,
    KeyedTables,
    PaddedInputs,
)
from gmeta.serving.served_model import EXPECTED_QUERY_ROWS, ServedModel
from gmeta_models.gated import row_layers
from gmeta_models.inputs import RowInputs
from gmeta_models.model_outputs import split_output

OUTPUT = "prediction"


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
        self.events = EventInputs.of(served, self.columns, self.tables)
        self._num_statistics = learner.statistics.width
        self._losses = learner.objectives.outer

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return probabilities (bce) or ratings [N] of `ids` [N, F], `dense` columns [N, K] and
        `lists` [N, M, H], of which the first `list_lengths` [N, M] ids count; the task's events are
        those of its support rows (EventInputs)."""
        key_NF, dense_NK, key_NMH, lengths_NM = self.columns(inputs)
        if self.events is not None:
            dense_NK = torch.cat([self.events(inputs, key_NF), dense_NK], dim=1)
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
        self.events = EventInputs.of(served, self.columns, self.tables)
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
        key_QF, dense_QK, key_QMH, lengths_QM = self.columns(inputs, QUERY)
        if self.events is not None:
            # No inner step moves them.
            with torch.no_grad():
                own_NX = self.events(inputs, key_QF, with_support=True)
            own_SX, own_QX = own_NX.split([dense_SK.shape[0], dense_QK.shape[0]])
            dense_SK, dense_QK = torch.cat([own_SX, dense_SK], 1), torch.cat([own_QX, dense_QK], 1)
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
