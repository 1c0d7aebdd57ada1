"""Meta-SGD: MAML whose inner rates are parameters, trained with theta by the same meta-gradient.

    theta_t = k steps of  theta <- theta - alpha * grad L_support,t(theta)   from theta,
    min over theta and alpha of  mean_t L_query,t(theta_t)

Li et al., "Meta-SGD: Learning to Learn Quickly for Few-Shot Learning", arXiv 1707.09835. There
alpha has the shape of theta: `learned_rates = "weight"`. Departures: alpha may also be
coarser, one rate a `layer` (and a table) or an `output` (and a table's column; the default), which
keeps the inner loop's low rank and so MAML's cost; a rate for each element of a table would double
the table, so with "weight" too a table has one for each column; all rates start at inner_lr, where
the paper draws them at random; several steps share their rates, as in MAML's inner loop.

Shape suffixes: B tables, D embedding width, P task-row pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from gmeta.adaptation.algorithms.algorithm import Algorithm
from gmeta.adaptation.algorithms.maml import QueryLoss
from gmeta.adaptation.rates import WeightRates, select_by_table
from gmeta.config.algorithm import MetaSgdOptions

if TYPE_CHECKING:
    from gmeta.adaptation.adaptation_plan import AdaptationPlan
    from gmeta.adaptation.algorithms.algorithm import TableSizes
    from gmeta.adaptation.rates import LayerRate


class LayerRates(nn.Module):
    """The learned rates of one layer; `bias` only where each weight has its own."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear, learned_rates: str, inner_lr: float) -> None:
        super().__init__()
        shapes = {"layer": (), "output": (layer.out_features,), "weight": layer.weight.shape}
        self.weight = _rates(shapes[learned_rates], inner_lr, layer.weight)
        # A coarser rate is shared by an output's weights and its bias, so the factors stay factors.
        elementwise = learned_rates == "weight" and layer.bias is not None
        self.bias = _rates(layer.bias.shape, inner_lr, layer.bias) if elementwise else None

    @property
    def rate(self) -> LayerRate:
        """Return the rate as the inner loop takes it."""
        return WeightRates(self.weight, self.bias) if self.weight.dim() == 2 else self.weight


class LearnedRates(nn.Module):
    """Inner rates that are parameters; a module, so that the dense optimizer and checkpoints take
    them.
    """

    _place_B: Tensor

    def __init__(self, plan: AdaptationPlan, tables: TableSizes) -> None:
        super().__init__()
        config, layers = plan.config, plan.layers
        kind = config.options_of(MetaSgdOptions).learned_rates
        if kind == "weight" and "low_rank" in plan.paths.values():
            raise ValueError(
                'algorithm.layer_paths says "low_rank" with algorithm.options.learned_rates = '
                '"weight": a rate for each weight leaves a change no low rank. Leave it out, or '
                'set learned_rates = "layer" or "output"'
            )
        if plan.adapts_rows and not tables.num_tables:
            raise ValueError(
                'algorithm.name = "metasgd" with adapt_embeddings = true, and 0 tables to learn '
                "rates for: tell the learner their TableSizes, as gmeta.runs.build.build_learner "
                "does"
            )
        # A module's name may hold no dot.
        self.layers = nn.ModuleDict(
            {
                name.replace(".", "/"): LayerRates(layer, kind, config.inner_lr)
                for name, layer in layers.items()
            }
        )
        # Rates of the tables that adapt, and each table's place among them; past the end is a 0.
        self.tables_BC: nn.Parameter | None = None
        place_B = list(range(tables.num_tables))
        if plan.adapts_rows:
            chosen = tables.adapting_tables(config)
            chosen = tuple(place_B) if chosen is None else chosen
            place_B = [chosen.index(b) if b in chosen else len(chosen) for b in place_B]
            columns = 1 if kind == "layer" else tables.width
            like = next((layer.weight for layer in layers.values()), torch.empty(0))
            self.tables_BC = _rates((len(chosen), columns), config.inner_lr, like)
        self.register_buffer("_place_B", torch.tensor(place_B), persistent=False)

    def of_layer(self, name: str) -> LayerRate:
        """Return the parameters of the layer of this name."""
        return cast(LayerRates, self.layers[name.replace(".", "/")]).rate

    def of_rows(self, unique_lengths_B: Tensor, fetched_row_P: Tensor) -> float | Tensor:
        """Return the rate of each task's rows, its table's: [P, 1] or [P, D]; 0 if none adapts."""
        if self.tables_BC is None:
            return 0.0
        if len(self.tables_BC) == len(self._place_B):
            return select_by_table(self.tables_BC, unique_lengths_B, fetched_row_P)
        none = self.tables_BC.new_zeros(1, self.tables_BC.shape[1])
        rates = torch.cat([self.tables_BC, none]).index_select(0, self._place_B)
        return select_by_table(rates, unique_lengths_B, fetched_row_P)


def _rates(shape: tuple[int, ...], start: float, like: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, start, dtype=like.dtype, device=like.device))


META_SGD = Algorithm(QueryLoss(second_order=True), rates=LearnedRates)
