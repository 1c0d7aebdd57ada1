"""The contract of models that end in an MLP over pooled features: what the fused inner loop reads.

Shape suffixes: N rows, K dense columns, X all inputs side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor, nn

from gmeta_models.internals import has_hooks
from gmeta_models.mlp import is_mlp, outputs_of_rows

if TYPE_CHECKING:
    from gmeta_models.inputs import RowFeatures, RowInputs
    from gmeta_models.model_config import Pooling


class DecisionModel(nn.Module, ABC):
    """A model whose output is its decision layers on something made of pooled features.

    It sees the ids of a multi-id feature only as their pooled vector, those of `history` aside, and
    applies its decision layers, an `mlp`, to a row once; so too an `mlp` over its dense columns, if
    it has one."""

    pooling: Pooling
    history: int | None = None  # the multi-id feature that it sees unpooled
    # The column of the decision inputs from which the features stand side by side, however many
    # there are, so that what all rows of a task share is taken once a task; None: they do not.
    features_from: int | None = None
    sees_dense_last: bool = False  # the dense columns are the last of the decision inputs

    @property
    @abstractmethod
    def decision_layers(self) -> nn.Sequential:
        """Return linear layers with ReLU between them; the last makes the outputs, without one."""

    @property
    def dense_layers(self) -> nn.Sequential | None:
        """Return linear layers, a ReLU after each, that see a row's dense columns alone; None: no
        layer does, and the columns stay as they are."""
        return None

    @abstractmethod
    def decision_inputs_NX(self, rows: RowFeatures) -> Tensor:
        """Return what the decision layers see of each row, which depends on that row alone.

        In place of its dense columns the row has what the dense layers make of them. The pooled
        vector of the history is not to be read: it may be anything."""

    def through_dense(self, rows: RowFeatures) -> RowFeatures:
        """Return the rows as `decision_inputs_NX` takes them."""
        layers = self.dense_layers
        return rows if layers is None else rows._replace(dense_NK=layers(rows.dense_NK))

    def seen_NX(self, inputs: RowInputs) -> Tensor:
        """Return the inputs of the decision layers for rows that are not pooled yet."""
        rows = self.through_dense(inputs.pooled(self.pooling, self.history))
        return self.decision_inputs_NX(rows)

    def is_in_parts(self) -> bool:
        """Tell whether the model is nothing more than its parts: a subclass of somebody's own may
        have layers of another kind among them, hooks, or a forward pass of its own."""
        kind, base = type(self), DecisionModel
        return (
            (kind.forward, kind.seen_NX, kind.through_dense)
            == (base.forward, base.seen_NX, base.through_dense)
            and not has_hooks(self)
            and is_mlp(self.decision_layers, activate_last=False)
            and (self.dense_layers is None or is_mlp(self.dense_layers, activate_last=True))
        )

    def forward(self, inputs: RowInputs) -> Tensor:
        """Return one output a row: [N]; [N, outputs] of several."""
        return outputs_of_rows(self.decision_layers(self.seen_NX(inputs)))
