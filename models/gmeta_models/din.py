"""DIN: attention pooling over a behaviour history, by each entry's relation to the row's target
item.

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018 (arXiv 1706.06978),
section 4.3.

Shape suffixes: N rows, H longest list or task, F single-id or pooled features, M multi-id features,
K dense columns, D embedding width, X all inputs side by side"""

from typing import cast

import torch
from torch import Tensor, nn

from gmeta_models.decision_model import DecisionModel
from gmeta_models.inputs import History, RowFeatures
from gmeta_models.mlp import mlp
from gmeta_models.model_config import InputSizes, ModelConfig
from gmeta_models.options import DinOptions


class DIN(DecisionModel):
    """Logit of a click, or a rating, for every row.

    interest = sum_h a(h, e) h over the history's entries h, with the target's embedding e and the
    activation unit a(h, e) = MLP([h, e, h - e, h * e]). `model.options.history` names the multi-id
    column; the target is the single-id column of its table. Departures: ReLU instead of Dice, and
    the difference and the element-wise product (as in the authors' code) instead of the outer
    product."""

    sees_dense_last = True

    def __init__(self, config: ModelConfig, sizes: InputSizes, options: DinOptions) -> None:
        super().__init__()
        self.pooling = config.pooling
        # Never None here, as it may be in the base class.
        self.history: int
        self.history, self.target = history_and_target(options.history, sizes)
        self.num_single = sizes.num_single
        width = config.embedding_dim
        self.attention = mlp([4 * width, *options.attention, 1])
        inputs = sizes.side_by_side(width)
        self.decision = mlp([inputs, *config.hidden, sizes.outputs], dropout=config.dropout)

    @property
    def decision_layers(self) -> nn.Sequential:
        """Return the layers that make the outputs."""
        return self.decision

    def decision_inputs_NX(self, rows: RowFeatures) -> Tensor:
        """Return the features side by side, the history pooled by attention: [N, X]."""
        single_NFD, pooled_NMD = rows.features_NFD.tensor_split([self.num_single], dim=1)
        parts = [
            single_NFD.flatten(1),
            # `history` above asks for it.
            self.interest_ND(cast(History, rows.history), single_NFD[:, self.target]),
            pooled_NMD[:, : self.history].flatten(1),
            pooled_NMD[:, self.history + 1 :].flatten(1),
            rows.dense_NK,
        ]
        return torch.cat(parts, dim=1)

    def interest_ND(self, history: History, target_ND: Tensor) -> Tensor:
        """Return each row's history, pooled by its attention to the row's target; 0 without one."""
        history_NHD, there_NH = history
        target_NHD = target_ND.unsqueeze(1).expand_as(history_NHD)
        pairs = [history_NHD, target_NHD, history_NHD - target_NHD, history_NHD * target_NHD]
        weight_NH: Tensor = self.attention(torch.cat(pairs, dim=2)).squeeze(2)
        # Weights are not normalised, as in the paper: their sum tells how strong the interest is.
        return (weight_NH * there_NH).unsqueeze(1).bmm(history_NHD).squeeze(1)


def history_and_target(history: str, sizes: InputSizes) -> tuple[int, int]:
    """Return the places of the history's multi-id column and of its target's single-id column."""
    multi = [column.name for column in sizes.multi]
    if history not in multi:
        raise ValueError(
            f"model.options.history = {history!r} is no multi-id column: this dataset has "
            f"{', '.join(multi) or 'none'}. Name the one that holds the behaviour history"
        )
    table = sizes.multi[multi.index(history)].table
    targets = [index for index, column in enumerate(sizes.single) if column.table == table]
    if len(targets) != 1:
        names = [sizes.single[index].name for index in targets]
        raise ValueError(
            f"model.options.history = {history!r} has table {table!r}, which {len(targets)} "
            "single-id "
            f"columns share ({', '.join(names) or 'none'}): DIN takes exactly 1, the target item. "
            f"Give that column table = {table!r} in the schema, and no other, and prepare again"
        )
    return multi.index(history), targets[0]
