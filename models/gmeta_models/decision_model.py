"""The contract of models that end in an MLP over pooled features: what the fused inner loop reads.

Shape suffixes: N rows, K dense columns, X all inputs side by side"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor, nn

from gmeta_models.internals import has_hooks
from gmeta_models.mlp import is_mlp, outputs_of_rows

if TYPE_CHECKING:
    from gmeta_models.inputs import RowFeatures, RowInputs
    from gmeta_models.model_config import Pooling
    from gmeta_models.model_outputs import ModelOutput


class DecisionModel(nn.Module, ABC):
    """A model whose outputs are its decision layers, an `mlp`, applied to pooled features."""

    # The fused inner loop relies on this: of a multi-id feature the model reads the pooled vector
    # alone, `history` aside, and it applies its decision layers, and an `mlp` over its dense
    # columns if it has one, to a row once.
    pooling: Pooling
    history: int | None = None  # the multi-id feature that it sees unpooled
    # The column of the decision inputs from which the features stand side by side, in any number:
    # the loop then takes those that all rows of a task share once a task. None: they do not.
    features_from: int | None = None
    sees_dense_last: bool = False  # the dense columns are the last of the decision inputs

    @property
    @abstractmethod
    def decision_layers(self) -> nn.Sequential:
        """Return linear layers with ReLU between them; the last makes the outputs, without one."""

    @property
    def dense_layers(self) -> nn.Sequential | None:
        """Return linear layers, a ReLU after each, over a row's dense columns alone; None: none."""
        return None

    @abstractmethod
    def decision_inputs_NX(self, rows: RowFeatures) -> Tensor:
        """Return the inputs of the decision layers, each row's from that row alone.

        The row's dense columns are outputs of the dense layers. The history's pooled vector may be
        anything: do not read it."""

    def through_dense(self, rows: RowFeatures) -> RowFeatures:
        """Return the rows as `decision_inputs_NX` takes them."""
        layers = self.dense_layers
        return rows if layers is None else rows._replace(dense_NK=layers(rows.dense_NK))

    def auxiliary_N(self, rows: RowFeatures) -> Tensor | None:
        """Return a loss of each row beside that of its labels (model_outputs.py), from that row
        alone, as `decision_inputs_NX` takes it, and finite for a row of zeros; None: there is
        none."""
        return None

    def seen_NX(self, inputs: RowInputs) -> Tensor:
        """Return the inputs of the decision layers for rows that are not pooled yet."""
        rows = self.through_dense(inputs.pooled(self.pooling, self.history))
        return self.decision_inputs_NX(rows)

    def is_in_parts(self) -> bool:
        """Tell whether the model is nothing more than its parts."""
        # A subclass of another package may have other layers, hooks, or a forward pass of its own.
        kind, base = type(self), DecisionModel
        return (
            (kind.forward, kind.seen_NX, kind.through_dense)
            == (base.forward, base.seen_NX, base.through_dense)
            and not has_hooks(self)
            and is_mlp(self.decision_layers)
            and (self.dense_layers is None or is_mlp(self.dense_layers, activate_last=True))
        )

    @property
    def has_auxiliary(self) -> bool:
        """Tell whether the model makes an auxiliary loss."""
        return type(self).auxiliary_N is not DecisionModel.auxiliary_N

    def forward(self, inputs: RowInputs) -> ModelOutput:
        """Return one output a row: [N]; of several [N, outputs]; or with it `auxiliary_N`."""
        if not self.has_auxiliary:
            return outputs_of_rows(self.decision_layers(self.seen_NX(inputs)))
        # Once for both: an inner step differentiates by what each call of a layer returns.
        rows = self.through_dense(inputs.pooled(self.pooling, self.history))
        output = outputs_of_rows(self.decision_layers(self.decision_inputs_NX(rows)))
        auxiliary_N = self.auxiliary_N(rows)
        return output if auxiliary_N is None else (output, auxiliary_N)
