"""MMoE: experts that all outputs share, mixed for each output by a gate of its own.

Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts",
KDD 2018 (doi 10.1145/3219819.3220007), section 4.2. What the paper calls a task is an output here.

Shape suffixes: N rows, O outputs, X all inputs side by side"""

import torch
from torch import Tensor, nn

from gmeta_models.inputs import RowInputs
from gmeta_models.mlp import mlp
from gmeta_models.model_config import InputSizes, ModelConfig
from gmeta_models.options import ExpertOptions
from gmeta_models.towers import TowerModel


class MMoE(TowerModel):
    """Logit (or rating) of every row for each output o: tower_o(sum_e g_oe expert_e(x)).

    g_o = softmax(W_o x), without a bias, as in the paper. `expert` are the widths of an
    expert, `model.hidden` those inside a tower. With one output it is a mixture of experts."""

    def __init__(self, config: ModelConfig, sizes: InputSizes, options: ExpertOptions) -> None:
        super().__init__()
        self.pooling = config.pooling
        width = sizes.side_by_side(config.embedding_dim)
        self.experts = make_experts(options.experts, width, options.expert)
        self.gates = nn.ModuleList(
            nn.Linear(width, options.experts, bias=False) for _ in range(sizes.outputs)
        )
        self.towers = make_towers(config, options, sizes.outputs)

    def tower_inputs_NX(self, inputs: RowInputs) -> list[Tensor]:
        """Return the experts' outputs, mixed by the gate of each tower: [N, O]."""
        rows_NX = inputs.pooled(self.pooling).side_by_side_NX()
        outputs = torch.stack([expert(rows_NX) for expert in self.experts], dim=1)
        return [mix_experts_NO(gate(rows_NX), outputs) for gate in self.gates]


def make_towers(config: ModelConfig, options: ExpertOptions, outputs: int) -> nn.ModuleList:
    """Return a tower for each output. Raises ValueError: model.options.expert has no layer."""
    if not options.expert:
        raise ValueError(
            "model.options.expert = []: an expert needs at least one layer. Write its width, "
            "e.g. [64]"
        )
    # A tower sees a mixture of experts, as wide as one.
    widths = [options.expert[-1], *config.hidden, 1]
    return nn.ModuleList(mlp(widths, dropout=config.dropout) for _ in range(outputs))


def make_experts(count: int, width: int, hidden: tuple[int, ...]) -> nn.ModuleList:
    """Return `count` experts over inputs of this width: MLPs with a ReLU after each layer."""
    return nn.ModuleList(mlp([width, *hidden], activate_last=True) for _ in range(count))


def mix_experts_NO(score: Tensor, outputs: Tensor) -> Tensor:
    """Return the experts' outputs, weighted by the softmax of their scores: [N, O]."""
    return score.softmax(dim=1).unsqueeze(1).bmm(outputs).squeeze(1)
