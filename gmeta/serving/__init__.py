"""Serving: an exported folder as one object that adapts to a task and predicts, in one process.

Needs torch, but neither TorchRec nor a process group nor the dataset that the model was trained on.
"""

from gmeta.serving.load import load
from gmeta.serving.model import AdaptedTask, ServedModel
from gmeta.serving.tasks import TaskPredictions

__all__ = ["AdaptedTask", "ServedModel", "TaskPredictions", "load"]
