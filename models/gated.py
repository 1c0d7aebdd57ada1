"""The contract of models whose initial parameters depend on the task: a gate on each layer.

Shape suffixes: N rows, T tasks, O a layer's output width.
"""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from models.inputs import RowInputs


class GatedModel(nn.Module, ABC):
    """A model that starts each task from gated parameters: W_t = diag(g_t) W and b_t = g_t b.

    The inner loop asks for the gates once a task, applies them, and adapts from there. `forward`
    alone works on rows whose tasks it does not know, with the ungated parameters.
    """

    gate: nn.Module  # what makes the gates: its layers work on tasks, not rows, and never adapt

    @abstractmethod
    def gates_TO(self, support: RowInputs, task_N: Tensor, num_tasks: int) -> dict[str, Tensor]:
        """The gates of each gated linear layer, by its name in this module: [T, O].

        `task_N` (int64) tells the task of each support row; a task may have none.
        """
