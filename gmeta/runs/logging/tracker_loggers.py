"""Readings to experiment trackers: Weights & Biases and MLflow, each an extra.

Where they report to is theirs to know: WANDB_PROJECT, WANDB_MODE; MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME. The tracker's id of a run lies in its folder, so that a resumed run goes on
in the same place."""

import importlib
import os
import re
from pathlib import Path
from typing import Any, final

from gmeta.errors import UserError
from gmeta.platform.files.atomic_write import write_atomically
from gmeta.platform.verbosity import is_quiet
from gmeta.runs.logging.logger import Logger, Reading, RunInfo, Status

MLFLOW_STATUSES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MOST_PARAMETERS = 100  # that a server of MLflow takes in one request


# They tell people where to look, unless told not to.
SILENT = {"wandb": "WANDB_SILENT", "mlflow": "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"}


def _import_tracker(name: str) -> Any:
    if is_quiet():
        os.environ.setdefault(SILENT[name], "true")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"run.loggers names {name!r}, which needs the extra: pip install 'gmeta[{name}]'"
        ) from error


def _run_id_path(run: RunInfo, tracker: str) -> Path:
    return run.folder / f"{tracker}-run-id"


def _read_run_id(run: RunInfo, tracker: str) -> str | None:
    path = _run_id_path(run, tracker)
    return path.read_text().strip() if run.done_steps and path.exists() else None


@final
class WandB(Logger):
    """A run of Weights & Biases."""

    def __init__(self) -> None:
        self._run: Any = None

    def begin(self, run: RunInfo) -> None:
        """Begin a run there, or go on with the one from before. Raises UserError: wandb is not
        installed."""
        self._run = _import_tracker("wandb").init(
            id=_read_run_id(run, "wandb"),
            resume="allow",
            name=run.folder.name,
            dir=str(run.folder),
            config={section: dict(keys) for section, keys in run.config.items()},
        )
        write_atomically(_run_id_path(run, "wandb"), self._run.id.encode())
        # W&B's own step may not go back, as the step of a resumed run does.
        self._run.define_metric("*", step_metric="step")

    def log(self, reading: Reading) -> None:
        """Send the numbers with their step."""
        self._run.log({"step": reading.step, "epoch": reading.epoch, **reading.scalars()})

    def end(self, status: Status) -> None:
        """End the run there; one that failed is marked so."""
        if self._run is not None:
            self._run.finish(exit_code=int(status == "failed"))


@final
class MLflow(Logger):
    """A run of MLflow."""

    def __init__(self) -> None:
        self._mlflow: Any = None

    def begin(self, run: RunInfo) -> None:
        """Begin a run there with the config as its parameters, or go on with the one from before.
        Raises UserError: mlflow is not installed."""
        mlflow = _import_tracker("mlflow")
        known = _read_run_id(run, "mlflow")
        begun = mlflow.start_run(run_id=known, run_name=None if known else run.folder.name)
        self._mlflow = mlflow
        write_atomically(_run_id_path(run, "mlflow"), begun.info.run_id.encode())
        if known is None:  # a parameter is never written twice
            parameters = list(run.parameters().items())
            for first in range(0, len(parameters), MOST_PARAMETERS):
                mlflow.log_params(dict(parameters[first : first + MOST_PARAMETERS]))

    def log(self, reading: Reading) -> None:
        """Send the numbers; ndcg@3 becomes ndcg_at_3, as MLflow takes no @ and no colon."""
        scalars = {
            re.sub(r"[^\w.\-/ ]", "_", name.replace("@", "_at_")): value
            for name, value in reading.scalars().items()
        }
        self._mlflow.log_metrics({**scalars, "epoch": reading.epoch}, step=reading.step)

    def end(self, status: Status) -> None:
        """End the run there with how it ended here."""
        if self._mlflow is not None:
            self._mlflow.end_run(status=MLFLOW_STATUSES[status])
