"""What of a model adapts to a task, in which loop, and how each layer's update is held: decided
once, when a learner is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

from torch import nn

from gmeta.adaptation.rates import WeightRates
from gmeta.config.algorithm import PLAIN, AlgorithmConfig, InnerPath
from gmeta_models.decision import DecisionModel
from gmeta_models.gated import head_layers, row_layers

if TYPE_CHECKING:
    from gmeta.adaptation.rates import InnerRates

Path = Literal["low_rank", "materialised"]
# Of a training batch: no inner loop, that of fused/, or general_loop.py.
Route = Literal["plain", "fused", "general"]


class TaskSize(NamedTuple):
    """The rows of the longest task of a group: what the cheaper path of a layer depends on."""

    support_rows: int
    query_rows: int


@dataclass(frozen=True)
class AdaptationPlan:
    """The answer to "what adapts, and how?", for a model and the config of its algorithm."""

    config: AlgorithmConfig
    layers: Mapping[str, nn.Linear]  # those that adapt, by name
    paths: Mapping[str, InnerPath]  # of each of them, as the config says
    heads: tuple[str, ...] = ()  # the layers that make the outputs, whether they adapt or not
    solves: bool = False  # inner steps are solved: closed_form.py

    @classmethod
    def of(
        cls,
        model: nn.Module,
        config: AlgorithmConfig,
        takes_steps: bool = True,
        solves: bool = False,
    ) -> AdaptationPlan:
        """Make the plan of a model; without `takes_steps` nothing adapts.

        Raises:
            ValueError: the config names a layer that the model does not have, or a path that does
                not exist, or nothing would adapt.
        """
        layers = adaptable_layers(model, config.adapt_layers) if takes_steps else {}
        if takes_steps and not layers and not config.adapt_embeddings:
            raise ValueError(
                "algorithm.adapt_layers = [] and algorithm.adapt_embeddings = false: "
                'nothing would adapt. Set one of them, or algorithm.name = "none" with any of '
                "them for the plain baseline"
            )
        heads = tuple(head_layers(model))
        still = [head for head in heads if head not in layers]
        if config.bias_rate != 1.0 and still:
            raise ValueError(
                f"algorithm.bias_rate = {config.bias_rate}, but the last layer, {still[0]}, does "
                "not adapt. Add it to algorithm.adapt_layers, or leave bias_rate at 1"
            )
        paths = resolve_paths(config, list(layers)) if takes_steps else {}
        return cls(config, layers, paths, heads, solves)

    def route(self, model: nn.Module, rates: InnerRates, asks_inner_loop_alone: bool) -> Route:
        """Return which loop a learner's training batches take: the fused one where only decision
        layers, layers over the dense columns and embedding rows adapt, by steps that are taken and
        not solved, no weight has a rate of its own, all those layers have a bias, and the model is
        nothing else.

        `asks_inner_loop_alone`: the outer loss is a QueryLoss, and no encoder or generator learns.
        """
        if self.config.name == PLAIN:
            return "plain"
        if not asks_inner_loop_alone or self.solves or not isinstance(model, DecisionModel):
            return "general"
        decision = linear_layers(model.decision_layers)
        inside = (*decision, *linear_layers(model.dense_layers))
        is_fused = (
            model.is_in_parts()
            and len(decision) > 1
            and all(layer in inside for layer in self.layers.values())
            and all(layer.bias is not None for layer in inside)
            and not any(isinstance(rates.of_layer(name), WeightRates) for name in self.layers)
        )
        return "fused" if is_fused else "general"

    def moves_inputs(self, model: DecisionModel) -> bool:
        """Tell whether inner steps move what the decision layers see."""
        dense = linear_layers(model.dense_layers)
        return self.adapts_rows or any(layer in dense for layer in self.layers.values())

    def bias_rate(self, name: str) -> float:
        """Return by how much faster than its weights the bias of this layer adapts."""
        return self.config.bias_rate if name in self.heads else 1.0

    @property
    def adapts(self) -> bool:
        """Tell whether inner steps move anything."""
        return bool(self.layers) or self.adapts_rows

    @property
    def adapts_rows(self) -> bool:
        """Tell whether inner steps move a task's copies of embedding rows, of all or some
        tables."""
        return bool(self.config.adapt_embeddings)

    @property
    def num_weights(self) -> int:
        """Count the weights of the layers that adapt."""
        return sum(layer.weight.numel() for layer in self.layers.values())

    def path(self, name: str, width_in: int, width_out: int, size: TaskSize, uses: int = 1) -> Path:
        """Return how the update of a layer is held: as the config says, or whichever needs fewer
        multiply-adds for a layer that works `uses` times on each row of tasks of this size.
        """
        path = self.paths[name]
        if path != "auto":
            return path
        # By the longest task of the group: its rectangle is as long for every task in it.
        costs = PathCosts(size, self.config.inner_steps, width_in, width_out, uses)
        return "low_rank" if costs.low_rank <= costs.materialised else "materialised"


class PathCosts(NamedTuple):
    """Multiply-adds a task over one meta-step's forward passes, for each way to hold an update."""

    size: TaskSize
    steps: int
    width_in: int
    width_out: int
    uses: int

    @property
    def low_rank(self) -> int:
        """Count them with factors: pass j on the support rows applies those of j - 1 steps, the
        query pass those of all.
        """
        support, query = self.size.support_rows * self.uses, self.size.query_rows * self.uses
        support_passes = support * self.steps * (self.steps - 1) // 2
        return (self.width_in + self.width_out) * support * (support_passes + query * self.steps)

    @property
    def materialised(self) -> int:
        """Count them with matrices: each step forms one, and each pass but the first applies it."""
        support, query = self.size.support_rows * self.uses, self.size.query_rows * self.uses
        return self.width_in * self.width_out * (support * (2 * self.steps - 1) + query)


def linear_layers(layers: nn.Sequential | None) -> tuple[nn.Linear, ...]:
    """Return the linear layers in their order; an empty tuple for None."""
    return tuple(layer for layer in layers or () if isinstance(layer, nn.Linear))


def adaptable_layers(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the row layers of `model` whose names match any of the glob patterns, by name.

    Raises:
        ValueError: a pattern matches no such layer.
    """
    linears = row_layers(model)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise ValueError(
                f"algorithm.adapt_layers: {pattern!r} matches no layer; "
                f"this model has {', '.join(linears)}. "
                'Name some of them, "*" for all, or none at all: []'
            )
    return {
        name: layer
        for name, layer in linears.items()
        if any(fnmatchcase(name, p) for p in patterns)
    }


def resolve_paths(config: AlgorithmConfig, layers: Sequence[str]) -> dict[str, InnerPath]:
    """Return what the config says of each adapted layer, by name.

    Raises:
        ValueError: an entry of `layer_paths` matches none of them, or names no path.
    """
    paths: dict[str, InnerPath] = dict.fromkeys(layers, "auto")
    for entry in config.layer_paths:
        pattern, _, path = entry.partition("=")
        if path not in get_args(InnerPath):
            raise ValueError(
                f"algorithm.layer_paths has {entry!r}: write layer=path with one of the paths "
                f"{', '.join(get_args(InnerPath))}"
            )
        matched = [name for name in layers if fnmatchcase(name, pattern)]
        if not matched and pattern != "*":
            raise ValueError(
                f"algorithm.layer_paths: {pattern!r} matches no layer that adapts; those are "
                f"{', '.join(layers) or 'none'}. Name one of them, or remove the entry"
            )
        paths |= dict.fromkeys(matched, cast(InnerPath, path))
    return paths
