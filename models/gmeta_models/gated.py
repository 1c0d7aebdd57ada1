"""The contract of models whose initial parameters depend on the task: gates on decision layers.

Shape suffixes: T tasks, O outputs, X all inputs side by side"""

from abc import abstractmethod

from torch import Tensor, nn

from gmeta_models.decision_model import DecisionModel
from gmeta_models.towers import TowerModel


class GatedModel(DecisionModel):
    """A model that starts each task from gated parameters: W_t = diag(g_t) W and b_t = g_t b.

    The inner loop computes the gates once a task and adapts from there. `forward` alone uses the
    ungated parameters: it does not know its rows' tasks."""

    gate: nn.Module  # what makes the gates: its layers work on tasks, not rows, and never adapt

    @abstractmethod
    def gates_TO(self, mean_TX: Tensor) -> dict[str, Tensor]:
        """Return the gates of each gated decision layer, by its name in this module [T, O], from
        the mean of each task's support rows' decision inputs; 0 if it has none."""


def row_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that work on rows, by name, in order of definition."""
    # A gate's layers see one row a task: an inner step on rows cannot move them.
    of_tasks = set(model.gate.modules()) if isinstance(model, GatedModel) else set()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module not in of_tasks
    }


def head_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers of the outputs, by name: the last of each tower, else the last defined."""
    layers = row_layers(model)
    if not isinstance(model, TowerModel):
        return dict([layers.popitem()])
    # A tower has no ReLU at its end: its last module is its last linear layer.
    heads = {list(tower.modules())[-1] for tower in model.towers}
    return {name: layer for name, layer in layers.items() if layer in heads}
