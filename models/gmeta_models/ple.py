"""PLE: experts of each output's own beside shared ones, in levels.

Tang et al., "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for
Personalized Recommendations", RecSys 2020 (doi 10.1145/3383313.3412236), section 4. What the paper
calls a task is an output here.

Shape suffixes: N rows, O outputs, X all inputs side by side.
"""

from typing import cast

import torch
from torch import Tensor, nn

from gmeta_models.inputs import RowInputs
from gmeta_models.mmoe import make_experts, make_towers, mix_experts_NO
from gmeta_models.model_config import InputSizes, ModelConfig
from gmeta_models.options import PleOptions
from gmeta_models.towers import TowerModel


class ExtractionLevel(nn.Module):
    """One level: what each output goes on with, and behind them what they share.

    An output's gate mixes its own experts and the shared ones, the shared gate the experts of all.
    A gate reads what its own experts read. The last level has no shared gate: nothing reads it.
    """

    def __init__(self, options: PleOptions, outputs: int, width: int, is_last: bool) -> None:
        super().__init__()
        self.own = nn.ModuleList(
            make_experts(options.own_experts, width, options.expert) for _ in range(outputs)
        )
        self.shared = make_experts(options.experts, width, options.expert)
        both = options.own_experts + options.experts
        self.gates = nn.ModuleList(nn.Linear(width, both, bias=False) for _ in range(outputs))
        every = outputs * options.own_experts + options.experts
        self.shared_gate = None if is_last else nn.Linear(width, every, bias=False)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return the mixtures of the outputs, then the shared one if there is a level above: each
        [N, O]; the inputs are in the same order: each [N, X]."""
        *own_inputs, shared_NX = inputs
        shared = [expert(shared_NX) for expert in self.shared]
        own = [
            [expert(own_NX) for expert in cast(nn.ModuleList, mine)]
            for mine, own_NX in zip(self.own, own_inputs, strict=True)
        ]
        mixtures = [
            mix_experts_NO(gate(own_NX), torch.stack([*mine, *shared], dim=1))
            for gate, own_NX, mine in zip(self.gates, own_inputs, own, strict=True)
        ]
        if self.shared_gate is not None:
            every = torch.stack([*(made for mine in own for made in mine), *shared], dim=1)
            mixtures.append(mix_experts_NO(self.shared_gate(shared_NX), every))
        return mixtures


class PLE(TowerModel):
    """Logit (or rating) of every row for each output o: tower_o of its mixture at the last level.

    `levels` levels, each with `experts` shared experts and `own_experts` of each
    output; `expert` are the widths of an expert, `model.hidden` those inside a tower. One
    level is the paper's CGC.
    """

    def __init__(self, config: ModelConfig, sizes: InputSizes, options: PleOptions) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.towers = make_towers(config, options, sizes.outputs)
        widths = [sizes.side_by_side(config.embedding_dim)]
        widths += [options.expert[-1]] * (options.levels - 1)
        self.levels = nn.ModuleList(
            ExtractionLevel(options, sizes.outputs, width, is_last=level + 1 == options.levels)
            for level, width in enumerate(widths)
        )

    def tower_inputs_NX(self, inputs: RowInputs) -> list[Tensor]:
        """Return the mixture of each output at the last level: [N, O]."""
        rows_NX = inputs.pooled(self.pooling).side_by_side_NX()
        inputs_NX = [rows_NX] * (len(self.towers) + 1)
        for level in self.levels:
            inputs_NX = level(inputs_NX)
        return inputs_NX
