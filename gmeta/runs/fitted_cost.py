"""Resolves data.task_cost = "fitted": what the steps before a run's checkpoint measured."""

import json
from pathlib import Path

from gmeta.config.train_config import DataConfig, RunConfig
from gmeta.runs.checkpoints.selected_checkpoint import named_checkpoint
from gmeta.runs.run_folder import RunFolder, list_checkpoints

COST_FILE_NAME = "task_cost.json"  # of a checkpoint


def resolve_task_cost(data: DataConfig, run: RunConfig) -> tuple[float, ...] | str:
    """Return data.task_cost; where it is fitted, the cost in ms that stands in the checkpoint with
    which the run goes on or begins, or, where none was measured yet, the default."""
    if data.task_cost != "fitted":
        return data.task_cost
    checkpoints = list_checkpoints(RunFolder(Path(run.dir)).checkpoints)[-1:]
    for name in ("continue_from", "start_from"):
        if not checkpoints and (named := getattr(run, name)):
            checkpoints = [named_checkpoint(f"run.{name}", named)[1]]
    for file in (checkpoint / COST_FILE_NAME for checkpoint in checkpoints):
        if file.exists():
            costs = json.loads(file.read_text())
            return costs["per_task_ms"], costs["per_row_ms"]
    return DataConfig.task_cost
