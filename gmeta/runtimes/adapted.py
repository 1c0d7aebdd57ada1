"""Adaptation to one task and the prediction of its query rows as one graph: the engine's inner
loop, recorded with its gradients, so that what runs it needs no autograd.

Shape suffixes: S support rows, N query rows, P rows that adapt, Q embeddings of the query rows, F
single-id features, M multi-id features, L longest list, K dense columns, D embedding width, B
tables.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gmeta.losses.objectives import known_weights
from gmeta.rows.ragged import RowLayout
from gmeta.rows.sides import Side, WorkingRows
from gmeta.runtimes.forward import Columns, KeyedTables, PaddedInputs
from gmeta.serving.model import ServedModel

SUPPORT, QUERY, LABEL, WEIGHT = "support.", "query.", "label", "weight"
# For how many query rows the form of an adapted layer is chosen; any number is as exact.
_QUERY_ROWS = 128


@dataclass(frozen=True)
class KeyedSide:
    """The rows of one task by key, as far as the inner loop asks for a Side."""

    layout: RowLayout
    label_N: Tensor
    place_NF: Tensor  # where the embedding of each key stands among rows_PD
    place_NML: Tensor
    dense_NK: Tensor
    lengths_NM: Tensor
    weight: Tensor | None = None

    def inputs(self, rows_PD: Tensor) -> PaddedInputs:
        """Return what the model sees when the embedding rows have these values."""
        single_NFD, values_NMLD = (
            rows_PD.index_select(0, place.flatten()).view(*place.shape, rows_PD.shape[1])
            for place in (self.place_NF, self.place_NML)
        )
        return PaddedInputs.of(single_NFD, self.dense_NK, values_NMLD, self.lengths_NM)


class AdaptAndPredict(nn.Module):
    """Adapts to the support rows of one task and predicts its query rows, as `ServedModel.adapt`
    and `AdaptedTask.predict` do.
    """

    def __init__(self, served: ServedModel) -> None:
        super().__init__()
        learner = served.learner
        self.columns = Columns(served)
        self.tables = KeyedTables(served)
        self.learner = learner
        self._losses = learner.objectives.outer
        # A rate for each table, or one for all.
        places_B = torch.arange(len(served.tables))
        self._rate = learner.rates.of_rows(torch.ones_like(places_B), places_B)
        features = served.config.features
        self._may_lack_labels = bool(features.labels or features.weight)
        self._adapts_rows = bool(learner.general_loop.config.adapt_embeddings)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return probabilities (bce) or ratings [N] of the query rows; `inputs` are those of
        UnadaptedForward, of both sides, the labels [S], or [S, L] of several, and the weights [S]
        of rows that have some.
        """
        key_SF, dense_SK, key_SML, lengths_SM = self.columns(inputs, SUPPORT)
        # A key that stands there several times has its one row where it stands first.
        key_P = torch.cat([key_SF.flatten(), key_SML.flatten()]).sort()[0]
        place_SF, place_SML = torch.searchsorted(key_P, key_SF), torch.searchsorted(key_P, key_SML)
        label_S, weight = inputs[SUPPORT + LABEL], None
        if self._may_lack_labels:
            weight = known_weights(label_S, inputs.get(SUPPORT + WEIGHT))
        layout = _one_task(key_SF)
        support = KeyedSide(layout, label_S, place_SF, place_SML, dense_SK, lengths_SM, weight)
        rows_PD, inner = self.tables(key_P), self.learner.general_loop
        working = WorkingRows(rows_PD, self._rate_of(key_P))
        with torch.enable_grad():
            # The inner loop asks for nothing else of a Side.
            adapted = inner.take_steps(working, cast(Side, support), _QUERY_ROWS, False)
        key_NF, dense_NK, key_NML, lengths_NM = self.columns(inputs, QUERY)
        keys_Q = torch.cat([key_NF.flatten(), key_NML.flatten()])
        fetched_QD = self.tables(keys_Q)
        if self._adapts_rows:
            place_Q = torch.searchsorted(key_P, keys_Q).clamp(max=key_P.shape[0] - 1)
            is_known_Q1 = (key_P[place_Q] == keys_Q).unsqueeze(1)
            # Both are computed and one is chosen, as a graph has no branches.
            fetched_QD = torch.where(is_known_Q1, adapted.rows_PD[place_Q], fetched_QD)
        # Each key of the query has a row of its own, in their order.
        place_Q = torch.arange(keys_Q.shape[0], device=keys_Q.device)
        place_NF, place_NML = place_Q.split([key_NF.numel(), key_NML.numel()])
        label_N = dense_NK.new_zeros(dense_NK.shape[0])
        query = KeyedSide(
            _one_task(key_NF),
            label_N,
            place_NF.view(key_NF.shape),
            place_NML.view(key_NML.shape),
            dense_NK,
            lengths_NM,
        )
        layers = adapted.layers
        asked = inner.adapted_before(layers.changes, layers.gates_TMO, fetched_QD)
        logits = inner.output_N(asked, cast(Side, query)).detach()
        return self._losses.predictions(logits)

    def _rate_of(self, key_P: Tensor) -> float | Tensor:
        if not isinstance(self._rate, Tensor):
            return self._rate
        return self._rate.index_select(0, self.tables.table_of(key_P))


def recorded(module: AdaptAndPredict, example: dict[str, Tensor]) -> GraphModule:
    """Return the operations that the module does for inputs like these, of any number of rows, as a
    module that takes them by name ("." as "_").
    """
    # Parameters and tables are no inputs: they become constants of the graph.
    graph: GraphModule = make_fx(module, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
        example
    )
    return graph


def _one_task(key_NF: Tensor) -> RowLayout:
    """Return the layout of the rows of one task, however many a trace is run with."""
    num_rows = key_NF.shape[0]
    # Counted by an operation: an int of Python would stand in the recorded graph as a constant.
    lengths_1 = key_NF.new_ones(num_rows).sum().view(1)
    return RowLayout(lengths_1, num_rows, num_rows, None)
